"""One cycle of the loop with nothing to ask the host: what a GPU can replay as one graph.

`decode` says what a cycle is; here its lengths, positions, tokens and counts stay on the device, and every tensor has
the same shape and place whatever is drafted or accepted.

Shapes: B = 1, K drafted tokens of the chain, R rows of a pass (K + 1, or with siblings more), D hidden, V vocabulary,
n recalled layers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.cache import KVCache
from selfspec.device_draft import DeviceDraft, DeviceDrafter
from selfspec.device_steps import Draws, Held, Kind, Passes
from selfspec.kernels import ops
from selfspec.masks import Tree
from selfspec.sampling import RECOVER_STREAM, TARGET_STREAM
from selfspec.target import Target


@dataclass(frozen=True)
class DeviceVerdict:
    """What verification found."""

    num_drafted: Tensor  # [1], drafts that count
    num_accepted: Tensor  # [1]
    tokens: Tensor  # [1, R], what the text has behind each row, if that is accepted
    next_token: Tensor  # [1], recovered or bonus
    length: Tensor  # [1], rows held from now on
    path: Tensor | None = None  # [K + 1], accepted rows of a tree, the last of them again and again behind it

    @property
    def last(self) -> Tensor:
        """The row of the last accepted token, [1]."""
        return self.num_accepted if self.path is None else self.path[-1:]

    def along(self, states: Tensor) -> Tensor:
        """Of ``states`` [1, R, ...] those of the accepted rows in order, [1, K + 1, ...]."""
        return states if self.path is None else states.index_select(1, self.path)


class DeviceCycle:
    """A cycle of ``kind.draft_len`` drafts; none: an ordinary step, which the exit's block sees."""

    def __init__(self, target: Target, kind: Kind, cache: KVCache, held: Held) -> None:
        self.target, self.kind, self.held = target, kind, held
        self.passes, self.draws = Passes(target, cache), Draws(kind.sampling, held.seed)
        self.drafter = None if kind.head is None else DeviceDrafter(kind, self.passes, self.draws, held)
        self.rows = torch.arange(kind.draft_len + 1, device=target.device)
        self.tree = Tree.of(kind.parents, target.device)

    @torch.no_grad()
    def __call__(self) -> None:
        """Draft, verify, keep; what came of it lies in ``held``."""
        draft = self.propose()  # layers [0, N)
        logits, recalls = self.score(draft.taps)  # layers [N, L), same cache
        verdict = self.judge(logits, draft)
        self._report(logits, verdict)
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
        """Logits [1, R, V] in float32 of ``taps`` [1, R, D], and the deep states that drafts recall."""
        start, depths = (0, ()) if self.kind.head is None else (self.kind.head.exit_layer, self.kind.head.recall_layers)
        return self.passes.finish(taps, start, self.held.first, depths, self.tree if self.kind.is_tree else None)

    def judge(self, logits: Tensor, draft: DeviceDraft) -> DeviceVerdict:
        """Apply the rule to those drafts that the loop would have drawn."""
        kind, held = self.kind, self.held
        scores, positions = self.draws.scores(logits), self.tree.depths[None] + held.first + 1
        if not kind.draft_len:
            stream = TARGET_STREAM if kind.rule == "coupled" else RECOVER_STREAM
            none = torch.zeros_like(held.first)
            own = self.draws.tokens(scores, positions, stream)
            return DeviceVerdict(none, none, own, own[:, 0], held.first + 1)
        is_drawn, above = self._drawn(draft), self.tree.parents[1:]
        parents = torch.where(is_drawn, above, kind.num_rows - 1)  # others hang where the walk does not come
        if kind.rule == "rejection":
            found = ops.verify_rejection(scores, draft.tokens, parents, draft.probs, held.seed, positions, held.first)
            _, num_accepted, next_token, length = found
            drafted = torch.cat([draft.tokens, next_token[None]], dim=1)
            own = torch.where(self.rows < num_accepted, drafted, next_token)
            return DeviceVerdict(is_drawn.sum(1), num_accepted, own, next_token, length)
        own = self.draws.tokens(scores, positions, TARGET_STREAM)
        walked, num_accepted, next_token, length = ops.verify_coupled(own, draft.tokens, parents, held.first)
        path = None
        if kind.is_tree:  # siblings are leaves behind the chain: all but the last accepted row are the chain's
            path = torch.where(self.rows < num_accepted, self.rows, walked.amax(1).clamp(min=0))
        return DeviceVerdict(is_drawn.sum(1), num_accepted, own, next_token, length, path)

    def _drawn(self, draft: DeviceDraft) -> Tensor:
        """Whether the loop would have drawn each token, [1, R - 1]: a sibling where its draft was."""
        has_room = self.rows[:-1] < self.held.end - self.held.first - 2  # the last token needs no draft
        is_drawn = (draft.chances.cumprod(1) >= self.kind.min_confidence) & has_room  # falls, so once and for good
        return is_drawn[:, self.tree.parents[1:]] if self.kind.is_tree else is_drawn

    def _report(self, logits: Tensor, verdict: DeviceVerdict) -> None:
        """What the host reads."""
        num_accepted = verdict.num_accepted
        is_bad = ~torch.isfinite(verdict.along(logits.amax(-1))[0]) & (self.rows <= num_accepted)
        bad = torch.where(is_bad.any(), is_bad.int().argmax(), -1)
        self.held.emitted.copy_(verdict.along(verdict.tokens)[0])
        self.held.counts.copy_(torch.stack([verdict.num_drafted[0], num_accepted[0], bad]))

    def _keep(self, draft: DeviceDraft, recalls: Tensor | None, verdict: DeviceVerdict) -> None:
        """What the next cycle reads of this one's rows."""
        held, kind, stands = self.held, self.kind, verdict.length
        if verdict.path is not None:
            self.passes.compact(verdict.path[None, 1:], verdict.num_accepted, held.first)
            stands = stands - (verdict.last > verdict.num_accepted).long()  # no block has seen a sibling
        if recalls is not None:
            held.recall.copy_(recalls.index_select(1, verdict.last))
        if kind.head is not None:
            held.seen.copy_(torch.minimum(held.first + kind.num_seen, stands))
            rows, before = self._waiting(verdict)
            if kind.draft_len and kind.num_waiting:
                held.taps.copy_(draft.taps[:, rows])
            if kind.draft_len and kind.num_waiting and recalls is not None:
                held.tap_recalls.copy_(recalls[:, before])
        held.first.copy_(verdict.length)
        held.token.copy_(verdict.next_token[:, None])

    def _waiting(self, verdict: DeviceVerdict) -> tuple[slice | Tensor, slice | Tensor]:
        """Rows that may wait for the exit's block, M, and those before them, which they recall."""
        seen = self.kind.num_seen
        if verdict.path is None:
            return slice(seen, None), slice(seen - 1, -1)
        rows = verdict.path[seen:]
        return rows, self.tree.parents[rows]
