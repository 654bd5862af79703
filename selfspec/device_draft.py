"""Drafts with nothing to ask the host: the three forms, on tensors of one shape whatever they say.

They are the loop's (`drafter`), but for three things. A draft that confidence would have stopped is made all the same;
`DeviceCycle` counts what was to be drawn. And as many rows as may wait for the exit's block always go along with its
first step: the step's own rows stand behind those that do wait, and what lies behind them is overwritten before it is
read.

Siblings are all made, worth a row of the verify pass or not: their number is fixed, and rows cost a GPU little.

Shapes: B = 1, K drafted tokens of the chain, each one of w candidates, R = K w + 1 rows of a pass, J draft steps of one
pass, D hidden, V vocabulary, V_d drafted vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfspec.device_steps import Draws, Held, Kind, Passes
from selfspec.exits import ExitHead
from selfspec.masks import Tree
from selfspec.sampling import DRAFT_STREAM, TARGET_STREAM


@dataclass(frozen=True)
class DeviceDraft:
    """A whole draft and how sure the exit was of it."""

    tokens: Tensor  # [1, K w]: the chain, then each one's siblings
    chances: Tensor  # [1, K], of being accepted, foreseen before the token was drawn; NaN where none could be
    probs: Tensor | None  # [1, K, V], q as drawn from, where the rule asks for it
    taps: Tensor  # [1, R, D], states at the exit layer


class DeviceDrafter:
    """Drafts ``kind.draft_len`` tokens behind what ``held`` says; ``kind`` has an exit."""

    def __init__(self, kind: Kind, passes: Passes, draws: Draws, held: Held) -> None:
        assert kind.head is not None
        self.kind, self.passes, self.draws, self.held = kind, passes, draws, held
        self.head: ExitHead = kind.head
        self.target = passes.target
        self.ids = self.head.token_ids(self.target)
        behind = [parent - 1 for parent in kind.parents[1:]]  # what hangs on the last token is a root among the rest
        self.rest = Tree.of(behind, self.target.device) if kind.is_tree else None

    def propose(self) -> DeviceDraft:
        """All tokens, and the taps of all rows."""
        tokens, chances, scores = list[Tensor](), list[Tensor](), list[Tensor]()
        taps = [self.trunk(self.held.token, 0)]
        for normed in FORMS[self.head.config.form](self, tokens, taps):
            token, chance, score = self.guess(normed, tokens)
            tokens.append(token)
            chances.append(chance)
            scores.append(score)
        if self.rest is not None:
            tokens.append(self.siblings(torch.stack(scores)[None], torch.cat(tokens, dim=1)))
            del taps[1:]  # siblings must not see a chain in the slots before them: its rows are made with theirs
        rest = torch.cat([self.held.token, *tokens][len(taps) :], dim=1)  # the last one buys the bonus token
        return DeviceDraft(
            tokens=torch.cat(tokens, dim=1),
            chances=torch.cat(chances, dim=1),
            probs=self._widened(scores) if self.kind.rule == "rejection" else None,
            taps=torch.cat([*taps, self.trunk(rest, len(taps), self.rest)], dim=1),
        )

    def trunk(self, tokens: Tensor, offset: int, tree: Tree | None = None) -> Tensor:
        """States [1, R, D] at the exit layer of ``tokens`` [1, R], the first ``offset`` behind the last emitted one."""
        return self.passes.run(range(self.head.exit_layer), self.target.embed(tokens), self.held.first + offset, tree)

    def first_states(self, tap: Tensor, num_steps: int) -> Tensor:
        """What `ExitHead.states` gives of the first J draft steps of ``tap`` [1, 1, D]: [1, J, D]."""
        head, held = self.head, self.held
        own = torch.cat([self.bridged(tap, step) for step in range(num_steps)], dim=1)
        if not head.blocks:
            return head.norm(own)
        waiting = head.bridge(held.taps, held.tap_recalls if head.recall_layers else None, 1)
        rows = held.first - held.seen + torch.arange(num_steps, device=tap.device)
        inputs = nn.functional.pad(waiting, (0, 0, 0, num_steps)).index_copy(1, rows, own)
        made = self.passes.run_modules(head.blocks, head.slots(self.target), inputs, held.seen)
        return head.norm(made.index_select(1, rows))

    def next_state(self, inputs: Tensor, step: int) -> Tensor:
        """The normed state [1, 1, D] of the block's ``inputs`` [1, 1, D] for draft ``step``, counted from 0."""
        head = self.head
        if head.blocks:
            first = self.held.first + step
            inputs = self.passes.run_modules(head.blocks, head.slots(self.target), inputs, first)
        return head.norm(inputs)

    def bridged(self, tap: Tensor, step: int) -> Tensor:
        """The block's input [1, 1, D] for draft ``step``, counted from 0, from ``tap`` [1, 1, D]."""
        if self.head.adapter is None:
            return tap
        return self.head.bridge(tap, self.held.recall if self.head.recall_layers else None, step + 1)

    def guess(self, normed: Tensor, before: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The token [1, 1] behind the drafted ones ``before``, its chance [1, 1], and what it was drawn from."""
        head = self.head
        logits = head.logits(self.target, normed, before[-1][0] if before else None)  # [V_d]
        scores = self.draws.scores(logits[None, None])
        stream, scale = DRAFT_STREAM, head.config.noise_scale
        if self.kind.rule == "coupled":
            stream = TARGET_STREAM
            if scale < 1 and not self.kind.sampling.is_greedy:  # `guess_scores`, of probabilities
                scores = (scores / scores.amax(-1, keepdim=True)) ** (1 / scale)
        token = self.draws.tokens(scores, (self.held.first + len(before) + 1)[None], stream, head.vocab_ids)
        chance = torch.where(torch.isfinite(logits.amax()), self._chance(normed), torch.nan)
        return token, chance, scores[0, 0]

    def siblings(self, scores: Tensor, tokens: Tensor) -> Tensor:
        """The next likeliest [1, K (w - 1)] beside each of ``tokens`` [1, K], which ``scores`` [1, K, V_d] gave.

        Each is drawn as its token was, with the same noise, from what the ones before it leave.
        """
        positions = (self.held.first + 1 + torch.arange(self.kind.draft_len, device=scores.device))[None]
        found, least = [tokens], -torch.inf if self.kind.sampling.is_greedy else 0.0
        while len(found) < self.kind.draft_width:
            scores = scores.masked_fill(self.ids == found[-1][..., None], least)
            found.append(self.draws.tokens(scores, positions, TARGET_STREAM, self.head.vocab_ids))
        return torch.stack(found[1:], dim=2).flatten(1)

    def _chance(self, normed: Tensor) -> Tensor:
        """What `ExitHead.chance` gives, [1, 1]."""
        if self.head.adapter is None or self.kind.min_confidence == 0:
            return torch.ones(1, 1, device=normed.device)
        return self.head.confidence(normed)[..., 0].float().sigmoid()

    def _widened(self, probs: list[Tensor]) -> Tensor:
        return torch.stack([self.head.widen(q, self.target.vocab_size) for q in probs])[None]


Steps = Iterator[Tensor]  # the states [1, 1, D] that drafts are drawn from; tokens grow in between


def chain_steps(drafter: DeviceDrafter, tokens: list[Tensor], taps: list[Tensor]) -> Steps:
    """Trunk and block for every token (`ChainDrafter`)."""
    yield drafter.first_states(taps[0], 1)
    for step in range(1, drafter.kind.draft_len):
        taps.append(drafter.trunk(tokens[-1], step))
        yield drafter.next_state(drafter.bridged(taps[-1], step), step)


def recursive_steps(drafter: DeviceDrafter, tokens: list[Tensor], taps: list[Tensor]) -> Steps:
    """The trunk for the last token only, the block on its own output (`RecursiveDrafter`)."""
    normed = drafter.first_states(taps[0], 1)
    yield normed
    for step in range(1, drafter.kind.draft_len):
        embedded = drafter.target.embed(tokens[-1])
        normed = drafter.next_state(drafter.head.bridge.again(embedded, normed), step)
        yield normed


def parallel_steps(drafter: DeviceDrafter, tokens: list[Tensor], taps: list[Tensor]) -> Steps:
    """Trunk and block once (`ParallelDrafter`)."""
    del tokens
    yield from drafter.first_states(taps[0], drafter.kind.draft_len).split(1, dim=1)


FORMS: dict[str, Callable[[DeviceDrafter, list[Tensor], list[Tensor]], Steps]] = {
    "chain": chain_steps,
    "recursive": recursive_steps,
    "parallel": parallel_steps,
}
