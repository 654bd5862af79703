"""One cycle of the loop with nothing to ask the host: what a GPU can replay as one graph.

`decode` says what a cycle is; here its lengths, positions, tokens and counts stay on the device, and every tensor has
the same shape and place whatever is drafted or accepted.

Shapes: B = 1, K drafted tokens, D hidden, V vocabulary, n recalled layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.cache import KVCache
from selfspec.device_draft import DeviceDraft, DeviceDrafter
from selfspec.device_steps import Draws, Held, Kind, Passes
from selfspec.kernels import ops
from selfspec.sampling import RECOVER_STREAM, TARGET_STREAM
from selfspec.target import Target


@dataclass(frozen=True)
class DeviceVerdict:
    """What verification found."""

    num_drafted: Tensor  # [1], drafts that count
    num_accepted: Tensor  # [1]
    next_token: Tensor  # [1], recovered or bonus
    length: Tensor  # [1], rows held from now on


class DeviceCycle:
    """A cycle of ``kind.draft_len`` drafts; none: an ordinary step, which the exit's block sees."""

    def __init__(self, target: Target, kind: Kind, cache: KVCache, held: Held) -> None:
        self.target, self.kind, self.held = target, kind, held
        self.passes, self.draws = Passes(target, cache), Draws(kind.sampling, held.seed)
        self.drafter = None if kind.head is None else DeviceDrafter(kind, self.passes, self.draws, held)
        self.rows = torch.arange(kind.draft_len + 1, device=target.device)

    @torch.no_grad()
    def __call__(self) -> None:
        """Draft, verify, keep; what came of it lies in ``held``."""
        draft = self.propose()  # layers [0, N)
        logits, recalls = self.score(draft.taps)  # layers [N, L), same cache
        verdict = self.judge(logits, draft)
        self._report(logits, draft, verdict)
        self._keep(draft, recalls, verdict)

    def propose(self) -> DeviceDraft:
        """The draft, or none; the exit's block sees the last token in any case."""
        if self.drafter is not None and self.kind.draft_len:
            return self.drafter.propose()
        none = self.held.token[:, :0]
        if self.drafter is None:
            return DeviceDraft(none, none.float(), None, self.target.embed(self.held.token))
        tap = self.drafter.trunk(self.held.token, 0)
        self.drafter.first_states(tap, 1)
        return DeviceDraft(none, none.float(), None, tap)

    def score(self, taps: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [1, K + 1, V] in float32 of ``taps`` [1, K + 1, D], and the deep states that drafts recall."""
        start, depths = (0, ()) if self.kind.head is None else (self.kind.head.exit_layer, self.kind.head.recall_layers)
        return self.passes.finish(taps, start, self.held.first, depths)

    def judge(self, logits: Tensor, draft: DeviceDraft) -> DeviceVerdict:
        """Apply the rule to those drafts that the loop would have drawn."""
        kind, held = self.kind, self.held
        scores, positions = self.draws.scores(logits), self.rows[None] + held.first + 1
        if not kind.draft_len:
            stream = TARGET_STREAM if kind.rule == "coupled" else RECOVER_STREAM
            none = torch.zeros_like(held.first)
            return DeviceVerdict(none, none, self.draws.tokens(scores, positions, stream)[:, 0], held.first + 1)
        has_room = self.rows[:-1] < held.end - held.first - 2  # the last token needs no draft
        is_drawn = (draft.chances.cumprod(1) >= kind.min_confidence) & has_room  # falls, so once and for good
        parents = torch.where(is_drawn, self.rows[:-1], kind.draft_len)  # others hang where the walk does not come
        if kind.rule == "coupled":
            own = self.draws.tokens(scores, positions, TARGET_STREAM)
            found = ops.verify_coupled(own, draft.tokens, parents, held.first)
        else:
            found = ops.verify_rejection(scores, draft.tokens, parents, draft.probs, held.seed, positions, held.first)
        _, num_accepted, next_token, length = found
        return DeviceVerdict(is_drawn.sum(1), num_accepted, next_token, length)

    def _report(self, logits: Tensor, draft: DeviceDraft, verdict: DeviceVerdict) -> None:
        """What the host reads."""
        num_accepted = verdict.num_accepted
        is_bad = ~torch.isfinite(logits[0].amax(-1)) & (self.rows <= num_accepted)
        bad = torch.where(is_bad.any(), is_bad.int().argmax(), -1)
        drafted = torch.cat([draft.tokens[0], verdict.next_token])  # [K + 1]
        self.held.emitted.copy_(torch.where(self.rows < num_accepted, drafted, verdict.next_token))
        self.held.counts.copy_(torch.stack([verdict.num_drafted[0], num_accepted[0], bad]))

    def _keep(self, draft: DeviceDraft, recalls: Tensor | None, verdict: DeviceVerdict) -> None:
        """What the next cycle reads of this one's rows."""
        held, kind = self.held, self.kind
        if recalls is not None:
            held.recall.copy_(recalls.index_select(1, verdict.num_accepted))
        if kind.head is not None:
            seen = kind.num_seen
            held.seen.copy_(torch.minimum(held.first + seen, verdict.length))
            if kind.draft_len and kind.num_waiting:
                held.taps.copy_(draft.taps[:, seen:])
            if kind.draft_len and kind.num_waiting and recalls is not None:
                held.tap_recalls.copy_(recalls[:, seen - 1 : -1])  # a row recalls what lies before it
        held.first.copy_(verdict.length)
        held.token.copy_(verdict.next_token[:, None])
