"""A cascade: an early exit guesses ahead, a later one drafts from all of its guesses in one pass.

The drafts are those of the later exit alone, chain for chain; the early one only says at which rows it may be asked at
once. So what it guesses changes neither the text nor the drafts, under any acceptance rule. Both exits stand on the
target's cache, and no token passes a layer twice.

Shapes: R rows, D hidden. A row's tap is wide, [1, R, 2 D]: the state after the early exit's layer, then the later's.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from selfspec.decode import DecodeState
from selfspec.drafter import ChainDrafter
from selfspec.exits import ExitHead
from selfspec.lookup import PromptLookup
from selfspec.target import Target


class CascadeHead(ExitHead):
    """The exit ``later``, with ``early`` before it; raises ValueError where they cannot share their inputs."""

    def __init__(self, early: ExitHead, later: ExitHead) -> None:
        if early.config.form != "chain" or later.config.form != "chain":
            forms = f"{early.name} is {early.config.form}, {later.name} {later.config.form}"
            raise ValueError(f"a cascade takes two chains: {forms}")
        if early is later or early.exit_layer > later.exit_layer:
            raise ValueError(
                f"a cascade goes from an early exit to a later one, got {early.name} (layer {early.exit_layer}) and "
                f"{later.name} (layer {later.exit_layer})"
            )
        if early.recall_layers not in ((), later.recall_layers):
            raise ValueError(
                f"a cascade's exits recall the same layers: {early.name} {early.recall_layers}, "
                f"{later.name} {later.recall_layers}"
            )
        self.__dict__.update(later.__dict__)  # what it drafts is what the later exit drafts
        self.early = early.moved(len(later.blocks))

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return (self.early.exit_layer, self.exit_layer)

    @property
    def num_slots(self) -> int:
        return len(self.blocks) + len(self.early.blocks)

    def catch_up(self, target: Target, state: DecodeState) -> None:
        """Let both blocks see the prompt."""
        for head in (self, self.early):
            if head.blocks:
                self.read(head, target, state, state.backlog, [], 0)
        state.backlog = []

    def seen(self, head: ExitHead, target: Target, state: DecodeState, num_drafted: int) -> int:
        """Positions that one of both exits needs no more: its block has them, or it has none and reads row by row."""
        return state.cache.lengths[head.slots(target).start] if head.blocks else len(state.tokens) - 1 + num_drafted

    def read(
        self,
        head: ExitHead,
        target: Target,
        state: DecodeState,
        held: list[tuple[Tensor, Tensor | None]],
        taps: list[Tensor],
        num_rows: int,
    ) -> Tensor:
        """Normed states [1, num_rows, D] of one of both exits at the last rows of a draft, whose ``taps`` [1, R, D]
        begin at the last emitted token; its block sees first what it has not seen, of these and of ``held`` positions.
        """
        if head.adapter is None:
            return head.norm(torch.cat(taps, dim=1)[:, -num_rows:])
        first, drafted = len(state.tokens) - 1, sum(tap.shape[1] for tap in taps)
        seen = self.seen(head, target, state, drafted - num_rows)
        recall = state.recall if head.recall_layers else None
        inputs = []
        if seen < first:
            size = target.hidden_size
            part = slice(0, size) if head is self.early else slice(size, None)
            behind = torch.cat([wide[..., part] for wide, _ in held], dim=1)[:, seen - first :]
            recalls = [r for _, r in held if r is not None] if head.recall_layers else []
            inputs.append(head.bridge(behind, torch.cat(recalls, dim=1)[:, seen - first :] if recalls else None))
        rows = torch.cat(taps, dim=1).split(1, dim=1) if taps else ()
        inputs += [head.bridge(rows[i], recall, i + 1) for i in range(max(seen - first, 0), drafted)]
        made = head.run_blocks(target, state, torch.cat(inputs, dim=1))
        return head.norm(made[:, made.shape[1] - num_rows :])


class CascadeDrafter(ChainDrafter):
    """Drafts a chain with the later exit of a `CascadeHead`, some rows at a time: those that the early exit guesses."""

    is_stepwise = True  # the one kernel drafts with one exit
    exit_head: CascadeHead

    def __init__(
        self, target: Target, exit_head: CascadeHead, draft_len: int, min_confidence: float = 0.0,
        lookup: PromptLookup | None = None,
    ) -> None:  # fmt: skip
        super().__init__(target, exit_head, draft_len, min_confidence, lookup=lookup)
        self.early = ChainDrafter(target, exit_head.early, exit_head.early.config.draft_len)

    def _steps(self, state: DecodeState, tokens: list[int], taps: list[Tensor], num_drafts: int) -> Iterator[Tensor]:
        head, size, held = self.exit_head, self.target.hidden_size, state.backlog
        while len(tokens) < num_drafts:
            guessed, lower = self._guess_ahead(state, tokens, taps, held, num_drafts - len(tokens) - 1)
            wide = self._through(state, lower)
            later = [tap[..., size:] for tap in (*taps, wide)]
            normed = head.read(head, self.target, state, held, later, wide.shape[1])
            if min(head.seen(h, self.target, state, 0) for h in (head, head.early)) >= len(state.tokens) - 1:
                state.backlog = []  # both have seen it
            for i, (row, own) in enumerate(zip(wide.split(1, dim=1), normed.split(1, dim=1), strict=True)):
                taps.append(row)
                yield own
                if i < len(guessed) and tokens[-1] != guessed[i]:
                    break

    def _guess_ahead(
        self,
        state: DecodeState,
        tokens: list[int],
        taps: list[Tensor],
        held: list[tuple[Tensor, Tensor | None]],
        most: int,
    ) -> tuple[list[int], Tensor]:
        """At most ``most`` tokens that the early exit expects behind ``tokens``, and its taps of the rows they make."""
        size, guessed, lower = self.target.hidden_size, list[int](), list[Tensor]()
        while True:
            last = [state.tokens[-1], *tokens, *guessed][-1]
            lower.append(self._lower(state, [last], len(tokens) + len(guessed)))
            if len(guessed) == min(most, self.early.draft_len) or self.early.is_broken:
                break
            rows = [*(tap[..., :size] for tap in taps), *lower]
            normed = self.exit_head.read(self.early.exit_head, self.target, state, held, rows, 1)
            guess = self.early.guess(normed, state, [*tokens, *guessed])
            if guess is None or guess.token in state.eos_ids:
                break
            guessed.append(guess.token)
        return guessed, torch.cat(lower, dim=1)

    def _run_trunk(self, state: DecodeState, tokens: Sequence[int], offset: int) -> Tensor:
        return self._through(state, self._lower(state, tokens, offset))

    def _lower(self, state: DecodeState, tokens: Sequence[int], offset: int) -> Tensor:
        """The early exit's taps [1, R, D]."""
        state.cache.rollback(len(state.tokens) - 1 + offset)  # guesses that the later exit did not share
        embedded = self._embed(state, tokens, offset)
        return self.target.run_layers(embedded, 0, self.early.exit_head.exit_layer, state.cache)

    def _through(self, state: DecodeState, lower: Tensor) -> Tensor:
        """Wide taps of the same rows: on to the later exit's layer."""
        begin, end = self.exit_head.tap_layers
        upper = self.target.run_layers(lower, begin, end, state.cache) if begin < end else lower
        return torch.cat([lower, upper], dim=-1)
