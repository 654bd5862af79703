"""One cycle of the loop with nothing to ask the host: what a GPU can replay as one graph.

`decode` says what a cycle is; here its lengths, positions, tokens and counts stay on the device, and every tensor has
the same shape and place whatever is drafted or accepted. A draft that confidence would have stopped is computed all the
same and then not counted.

Shapes: B = 1, K drafted tokens, W rows of exact mode, D hidden, V vocabulary, n recalled layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfspec.cache import KVCache
from selfspec.exits import ExitHead
from selfspec.kernels import ops
from selfspec.layer_calls import Place
from selfspec.sampling import TARGET_STREAM, Sampling, logits_to_probs
from selfspec.target import Target, pad_rows


@dataclass(eq=False)
class Held:
    """What a cycle reads and leaves to the next one, in tensors that stay where they are."""

    first: Tensor  # [1], rows that the target's layers hold: the position of the last emitted token
    token: Tensor  # [1, 1], that token
    seed: Tensor  # [1]
    recall: Tensor  # [1, 1, nD], deep states of position first - 1
    tap: Tensor  # [1, 1, D], the state at the exit layer of position first - 1,
    tap_recall: Tensor  # [1, 1, nD], what the bridge reads with it,
    is_unseen: Tensor  # [1], whether the exit's block has not seen that position
    counts: Tensor  # [3], of the last cycle: drafted, accepted, the first row whose logits are not finite or -1
    emitted: Tensor  # [K + 1], its tokens, of which accepted + 1 count

    @classmethod
    def of(cls, target: Target, head: ExitHead | None, draft_len: int) -> "Held":
        """As before any text."""
        width = 0 if head is None else len(head.recall_layers) * target.hidden_size
        sizes = {"first": (1,), "token": (1, 1), "seed": (1,), "counts": (3,), "emitted": (draft_len + 1,)}
        states = {"recall": width, "tap": target.hidden_size, "tap_recall": width}
        return cls(  # a position behind the first has one before it, as in any text: what is captured runs on this
            **{name: torch.ones(size, dtype=torch.long, device=target.device) for name, size in sizes.items()},
            **{n: torch.zeros(1, 1, d, dtype=target.dtype, device=target.device) for n, d in states.items()},
            is_unseen=torch.zeros(1, dtype=torch.bool, device=target.device),
        )


class DeviceCycle:
    """A chain's cycle of ``draft_len`` drafts (0: an ordinary step), verified by the rule `coupled`."""

    def __init__(
        self, target: Target, head: ExitHead | None, draft_len: int, min_confidence: float, sampling: Sampling,
        cache: KVCache, held: Held,
    ) -> None:  # fmt: skip
        self.target, self.head, self.draft_len, self.min_confidence = target, head, draft_len, min_confidence
        self.sampling, self.cache, self.held = sampling, cache, held
        self.exit_layer = 0 if head is None else head.exit_layer
        self.calls = target.calls_for(cache)
        self.rows = torch.arange(draft_len + 1, device=target.device)
        self.parents = self.rows[None, :-1]

    @torch.no_grad()
    def __call__(self) -> None:
        """Draft, verify, keep; what came of it lies in ``held``."""
        tokens, taps, chances = [self.held.token], list[Tensor](), list[Tensor]()
        for step in range(self.draft_len):
            taps.append(self._trunk(tokens[-1], step))
            normed = self._exit_states(taps[-1], step)
            chances.append(self._chance(normed))
            tokens.append(self._guess(normed, step))
        taps.append(self._trunk(tokens[-1], self.draft_len))
        if self.draft_len == 0 and self.head is not None:
            self._exit_states(taps[0], 0)  # the block sees every position, drafted from or not
        hidden = torch.cat(taps, dim=1)
        logits, recalls = self._verify_pass(hidden)
        own = self._draw(logits, self.rows[None] + self.held.first + 1)  # [1, K + 1]
        num_drafted, num_accepted, next_token, length = self._judge(own, tokens[1:], chances)
        is_bad = ~torch.isfinite(logits[0].amax(-1)) & (self.rows <= num_accepted)
        bad = torch.where(is_bad.any(), is_bad.int().argmax(), -1)
        self._keep(hidden, recalls, num_accepted)
        self.held.first.copy_(length)
        self.held.token.copy_(next_token[:, None])
        self.held.counts.copy_(torch.stack([num_drafted[0], num_accepted[0], bad]))
        self.held.emitted.copy_(own[0])

    def _trunk(self, token: Tensor, step: int) -> Tensor:
        """The state [1, 1, D] at the exit layer of a token, ``step`` behind the last emitted one."""
        return self._run(range(self.exit_layer), self.target.embed(token), self.held.first + step)

    def _exit_states(self, tap: Tensor, step: int) -> Tensor:
        """What `ExitHead.states` gives of draft ``step``, counted from 0, [1, 1, D]."""
        head, held = self.head, self.held
        assert head is not None
        if head.adapter is None:
            return head.norm(tap)
        recall = held.recall if head.recall_layers else None
        inputs, first, slots = head.bridge(tap, recall, step + 1), held.first + step, None
        if step == 0 and head.blocks:  # the position before goes with it: its row counts where it was not seen yet
            before = head.bridge(held.tap, held.tap_recall if head.recall_layers else None, 1)
            inputs, first = torch.cat([before, inputs], dim=1), first - 1
            slots = torch.cat([torch.where(held.is_unseen, first, self.cache.capacity - 1), held.first])
        inputs = (
            self._run_modules(head.blocks, head.slots(self.target), inputs, first, slots) if head.blocks else inputs
        )
        return head.norm(inputs[:, -1:])

    def _chance(self, normed: Tensor) -> Tensor:
        """What `ExitHead.chance` gives, [1]."""
        assert self.head is not None
        if self.head.adapter is None or self.min_confidence == 0:
            return torch.ones(1, device=normed.device)
        return self.head.confidence(normed)[0, 0].float().sigmoid()

    def _guess(self, normed: Tensor, step: int) -> Tensor:
        """The token [1, 1] behind draft ``step``'s row."""
        assert self.head is not None
        logits = self.head.head(normed).float()
        return self._draw(logits, (self.held.first + step + 1)[None], self.head.vocab_ids)

    def _draw(self, logits: Tensor, positions: Tensor, columns: Tensor | None = None) -> Tensor:
        """Tokens [1, R] of ``logits`` [1, R, V] at ``positions`` [1, R], with the noise that the loop draws with."""
        sampling = self.sampling
        if sampling.is_greedy:
            return ops.sample(logits, self.held.seed, positions, 0.0, TARGET_STREAM, columns, False)
        probs = logits_to_probs(logits[0], sampling)[None]
        return ops.sample(probs, self.held.seed, positions, 1.0, TARGET_STREAM, columns, True)

    def _verify_pass(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [1, K + 1, V] in float32 of taps ``hidden``, and the deep states that drafts recall."""
        depths = () if self.head is None else self.head.recall_layers
        states, start = {self.exit_layer: hidden}, self.exit_layer
        for depth in sorted({*depths, self.target.num_layers}):
            states[depth] = hidden = self._run(range(start, depth), hidden, self.held.first)
            start = depth
        recalls = torch.cat([states[depth] for depth in depths], dim=-1) if depths else None
        return self.target.logits(hidden, self.cache), recalls

    def _judge(
        self, own: Tensor, drafted: Sequence[Tensor], chances: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Numbers drafted [1] and accepted [1], the next token [1], the rows held from now on [1]."""
        if not drafted:
            none = torch.zeros_like(self.held.first)
            return none, none, own[:, 0], self.held.first + 1
        is_kept = torch.stack(list(chances), dim=1).cumprod(1) >= self.min_confidence  # falls, so once and for good
        tokens = torch.where(is_kept, torch.cat(list(drafted), dim=1), -1)  # what was not drafted agrees with nothing
        _, num_accepted, next_token, length = ops.verify_coupled(own, tokens, self.parents, self.held.first)
        return is_kept.sum(1), num_accepted, next_token, length

    def _keep(self, taps: Tensor, recalls: Tensor | None, num_accepted: Tensor) -> None:
        """What the next draft reads of this cycle's rows."""
        held, count = self.held, self.draft_len
        if recalls is not None:
            held.recall.copy_(recalls.index_select(1, num_accepted))
        if count:  # the block has seen all rows but the last
            held.is_unseen.copy_(num_accepted == count)
            held.tap.copy_(taps[:, count:])
            if recalls is not None:
                held.tap_recall.copy_(recalls[:, count - 1 : count])
        else:
            held.is_unseen.zero_()

    def _run(self, layers: range, hidden: Tensor, first: Tensor) -> Tensor:
        """`Target.run_layers` at a place that the device knows; in exact mode as many rows as ever."""
        if not layers:
            return hidden
        num_rows = hidden.shape[1]
        padded = pad_rows(hidden, self.cache.width)
        made = self._run_modules(self.target.layers[layers.start : layers.stop], layers, padded, first)
        return made[:, :num_rows]

    def _run_modules(
        self, modules: Sequence[nn.Module], slots: range, hidden: Tensor, first: Tensor, writes: Tensor | None = None
    ) -> Tensor:
        """`Target.run_modules` likewise; rows go to the slots ``writes`` [R] of the cache, if they are given."""
        num_rows, width = hidden.shape[1], self.cache.width
        is_exact = width is not None and slots.start < self.target.num_layers
        place = Place(first, num_rows, self.cache.capacity, width=width if is_exact else None)
        by_layer = self.calls.at(place, self.target.device)
        self.cache.open_at(first + torch.arange(num_rows, device=first.device) if writes is None else writes)
        return self.target.call_modules(modules, hidden, slots, by_layer, self.cache)
