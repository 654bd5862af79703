"""Drafters: what proposes the tokens of a cycle.

A drafter sees the `DecodeState` and returns a whole `Draft`, so that chains, parallel heads, n-grams or a second model
fit alike. It may run layers [0, N) of the target over the shared cache; the verify pass takes it from there.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from selfspec.exits import ExitHead
from selfspec.fused_draft import FusedDraft
from selfspec.kernels import dispatch
from selfspec.lookup import Found, LookupDrafter, PromptLookup, chain, joined
from selfspec.masks import tree_shape
from selfspec.sampling import DRAFT_STREAM, TARGET_STREAM, argmax, draw, guess_scores, logits_to_probs, uniform
from selfspec.stats import DecodeStats
from selfspec.target import Target
from selfspec.verify import Draft

if TYPE_CHECKING:
    from selfspec.decode import DecodeState

WINDOW = 10  # cycles with drafts over which acceptance is averaged
RETRY = 8  # cycles of a pause, after which one draft is tried
HOPE = 0.5  # accepted drafts a cycle, thought of a text of which nothing is known


class Drafter(Protocol):
    """Proposes tokens; ``exit_head`` tells the loop which taps and deep states to keep for it (None: none)."""

    @property
    def exit_head(self) -> ExitHead | None:
        """The exit whose inputs the loop keeps."""
        ...

    def propose(self, state: "DecodeState") -> Draft:
        """Draft for the tokens behind ``state``'s last one; an empty draft makes the cycle an ordinary step."""
        ...


@dataclass(frozen=True)
class Guess:
    """One drafted token, and what else might stand in its place."""

    token: int
    logits: Tensor  # [V_d], the exit's own
    probs: Tensor | None  # [V_d], q as drawn from; None is one-hot at the token
    share: float = 1.0  # of the likeliest token, where there may be siblings
    siblings: tuple[tuple[int, float], ...] = ()  # further tokens and their shares, the likeliest first


class NoDrafter:
    """Drafts nothing: the loop becomes ordinary autoregressive decoding. Takes any drafter's arguments."""

    exit_head: ExitHead | None = None

    def __init__(self, *_: object) -> None:
        pass

    def propose(self, state: "DecodeState") -> Draft:
        """An empty draft."""
        return empty_draft(state.device)


class Pace:
    """Whether drafting pays on the text at hand: a running mean of accepted drafts against what a draft costs.

    Below ``min_accepted`` drafting pauses, but for one draft every few cycles, which keeps the mean up to date. Only
    verdicts of earlier cycles count, so what is drafted depends on nothing but the text so far.
    """

    def __init__(self, min_accepted: float) -> None:
        self.min_accepted = min_accepted
        self.mean = max(HOPE, 2 * min_accepted)
        self._seen: tuple[int, int] | None = None  # drafted and accepted before the cycle that is awaited
        self._pause = 0

    def pays(self, stats: DecodeStats) -> bool:
        """To be asked at the start of every cycle."""
        if self._seen is not None and stats.num_drafted > self._seen[0]:
            self.mean += (stats.num_accepted - self._seen[1] - self.mean) / WINDOW
        self._seen = (stats.num_drafted, stats.num_accepted)
        self._pause = (self._pause + 1) % RETRY if self.mean < self.min_accepted else 0
        return self._pause == 0

    def pass_over(self) -> None:
        """The cycle at hand goes without the exit, whatever is drafted in it."""
        self._seen = None


class ChainDrafter:
    """Drafts a chain: layers [0, N) and the exit head for every token, each fed with the one before (Kangaroo's form).

    ``draft_len`` is the largest number of drafts k, ``min_confidence`` the probability that all drafts so far and the
    next one are accepted below which no further token is drawn (decided before the token is drawn, so that a drawn
    token is always judged). With a ``draft_width`` w > 1 up to w - 1 siblings stand beside each token, leaves of a tree
    whose trunk is the chain: those that the exit gives, with all before them, a chance worth a row of the verify pass
    (as in EAGLE-2's trees, Li et al. 2024, cut to one level beside the chain), which a second token needs, too. What a
    ``lookup`` finds joins the draft; where it is sure, and where drafting does not pay, it is the draft.
    """

    is_stepwise = False  # a subclass that looks at single steps says so

    def __init__(
        self, target: Target, exit_head: ExitHead, draft_len: int, min_confidence: float = 0.0, draft_width: int = 1,
        lookup: PromptLookup | None = None,
    ) -> None:  # fmt: skip
        self.target, self.exit_head = target, exit_head
        self.draft_len, self.min_confidence, self.draft_width = draft_len, min_confidence, draft_width
        self.lookup = lookup
        least = exit_head.config.min_branch
        self.min_branch = dispatch.worth_of_a_row(target.device) if least is None else least
        self.is_broken = False  # the exit's logits were not finite: no more drafts
        self.pace = Pace(exit_head.config.min_accepted)
        self._fused: FusedDraft | None = None

    def propose(self, state: "DecodeState") -> Draft:
        """Draft up to k tokens; the taps of all rows, the last draft's included, go with them."""
        num_drafts = min(self.draft_len, state.most_drafted)
        if num_drafts < 1:
            return empty_draft(state.device)
        found = Found() if self.lookup is None else self.lookup.find(state.tokens, state.eos_ids)
        found = found.cut(state.most_drafted)
        is_alone = state.room is None  # rows of a shared pass are too dear to draft for
        if not is_alone or not self.pace.pays(state.stats) or found.is_sure or self.is_broken:
            self.pace.pass_over()
            return chain(found.tokens, state.device)
        looked = self._beside(found, state)
        whole = self._in_one_call(state, num_drafts, looked)
        if whole is not None:
            return whole
        tokens: list[int] = []
        siblings: list[tuple[int, int]] = []  # the row that each hangs on, and its token
        probs: list[Tensor] = []
        taps: list[Tensor] = []
        steps = self._steps(state, tokens, taps, num_drafts)
        survival = reach = 1.0
        for normed in steps:  # [1, 1, D]
            survival *= self.exit_head.chance(normed) if self.min_confidence > 0 else 1.0
            if survival < self.min_confidence:
                break
            guess = self.guess(normed, state, tokens)
            if guess is None:
                break
            worth = self.min_branch / reach if self.draft_width > 1 else 0.0
            if tokens and guess.share < worth:  # known before the token is drawn, if it is drawn at all
                break
            siblings += [(len(tokens), token) for token, share in guess.siblings if share >= worth]
            reach *= guess.share
            tokens.append(guess.token)
            if state.rule == "rejection" and not state.sampling.is_greedy:
                assert guess.probs is not None
                probs.append(self.exit_head.widen(guess.probs, self.target.vocab_size))
            if tokens[-1] in state.eos_ids:
                break
        parents = [*range(len(tokens)), *(row for row, _ in siblings)]
        num_taps, num_drawn = sum(tap.shape[1] for tap in taps), len(tokens)
        tokens += [token for _, token in siblings]
        if self.lookup is not None:
            tokens, parents = joined(tokens, parents, looked, self.lookup.num_tokens)
        if len(tokens) > num_drawn:
            taps = [self._run_tree(state, tokens, [0, *parents])]
        elif num_taps <= len(tokens):  # the last one buys the bonus token
            taps.append(self._run_trunk(state, tokens[num_taps - 1 :], num_taps))
        return Draft(
            tokens=torch.tensor([tokens], dtype=torch.long, device=state.device),
            parents=torch.tensor([parents], dtype=torch.long, device=state.device),
            probs=torch.stack(probs)[None] if probs else None,
            taps=torch.cat(taps, dim=1),
        )

    def _steps(self, state: "DecodeState", tokens: list[int], taps: list[Tensor], num_drafts: int) -> Iterator[Tensor]:
        """The states [1, 1, D] that drafts are drawn from, made as they are asked for; ``tokens`` grows in between."""
        taps.append(self._run_trunk(state, state.tokens[-1:], 0))
        yield self.exit_head.states(self.target, state, taps[0], range(1, 2))
        for step in range(1, num_drafts):
            taps.append(self._run_trunk(state, tokens[-1:], step))
            yield self.exit_head.states(self.target, state, taps[-1], range(step + 1, step + 2))

    def _beside(self, found: Found, state: "DecodeState") -> tuple[int, ...]:
        """What of ``found`` may stand beside the exit's own tokens, in a tree."""
        # drawn ones that are judged by their q stand alone
        is_drawn = state.rule == "rejection" and not state.sampling.is_greedy
        return () if self.lookup is None or is_drawn or not self.lookup.joins else found.tokens

    def _in_one_call(self, state: "DecodeState", num_drafts: int, looked: Sequence[int]) -> Draft | None:
        """The same draft, by one kernel: where no penalties are in the way and nobody looks at single steps."""
        is_plain = state.sampling.repetition_penalty == 1 and len(state.tokens) >= state.min_length
        if self.is_stepwise or not is_plain or not (state.sampling.is_greedy or state.rule == "coupled"):
            return None
        if self._fused is None:
            self._fused = FusedDraft(
                self.target, self.exit_head, self.draft_len, self.min_confidence, self.draft_width, self.min_branch,
                state.eos_ids, 0 if self.lookup is None else self.lookup.num_tokens,
            )  # fmt: skip
        found = self._fused.draft(state, num_drafts, looked)
        if found is None:
            return None
        draft, self.is_broken = found
        return draft

    def guess(self, normed: Tensor, state: "DecodeState", drafted: list[int]) -> Guess | None:
        """The token behind ``drafted`` ones, from ``normed`` [1, 1, D]; None, for good, where logits are not finite."""
        is_corrected = self.exit_head.correction is not None and len(drafted) > 0
        before = torch.tensor(drafted[-1:], device=normed.device) if is_corrected else None
        logits = self.exit_head.logits(self.target, normed, before)  # [V_d]
        self.is_broken = not math.isfinite(logits.amax())
        if self.is_broken:
            return None
        if _is_plain_greedy(state, len(drafted)):
            place = int(argmax(logits))
            return Guess(self.exit_head.token_at(place), logits, None, *self._siblings(logits, place))
        q = self._distribution(logits, state, drafted)
        noise = self._noise(state, len(state.tokens) + len(drafted))
        if state.rule == "rejection":  # siblings would have to be judged by their own q each: there are none
            return Guess(self.exit_head.token_at(int(draw(q, noise))), logits, q)
        scores = q.log()
        if noise is not None:
            scores = guess_scores(q, noise, state.sampling.temperature, self.exit_head.config.noise_scale)
        place = int(argmax(scores))
        return Guess(self.exit_head.token_at(place), logits, q, *self._siblings(scores, place))

    def _siblings(self, logits: Tensor, place: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        """The share by ``logits`` [V_d] of the likeliest token, at ``place``, and the next tokens with theirs."""
        if self.draft_width == 1:
            return 1.0, ()
        found = logits.softmax(-1).topk(min(self.draft_width, len(logits)))
        pairs = zip(found.values.tolist(), found.indices.tolist(), strict=True)
        others = [(self.exit_head.token_at(i), share) for share, i in pairs if i != place]
        return float(found.values[0]), tuple(others[: self.draft_width - 1])

    def _run_trunk(self, state: "DecodeState", tokens: Sequence[int], offset: int) -> Tensor:
        """Taps [1, R, D] of ``tokens``, the first of which lies ``offset`` behind the last emitted one."""
        return self.target.run_layers(self._embed(state, tokens, offset), 0, self.exit_head.exit_layer, state.cache)

    def _run_tree(self, state: "DecodeState", tokens: Sequence[int], parents: list[int]) -> Tensor:
        """Taps [1, K + 1, D] of the last emitted token and a tree of drafted ones behind it, all anew."""
        first, depth = len(state.tokens) - 1, self.exit_head.exit_layer
        state.cache.rollback(first, range(depth))
        ids = torch.tensor([[state.tokens[-1], *tokens]], device=state.device)
        hidden = self.target.embed(ids, first, tree_shape(tuple(parents), len(parents))[0])
        return self.target.run_layers(hidden, 0, depth, state.cache, parents)

    def _embed(self, state: "DecodeState", tokens: Sequence[int], offset: int) -> Tensor:
        """Their input states, likewise."""
        return self.target.embed(torch.tensor([list(tokens)], device=state.device), len(state.tokens) - 1 + offset)

    def _distribution(self, logits: Tensor, state: "DecodeState", drafted: list[int]) -> Tensor:
        position = len(state.tokens) + len(drafted)
        forbidden = self.exit_head.narrow(state.forbidden(position))
        prefix = self.exit_head.positions_of(state.prefix(drafted)) if state.sampling.repetition_penalty != 1 else None
        return logits_to_probs(logits[None], state.sampling, None if prefix is None else [prefix], forbidden)[0]

    def _noise(self, state: "DecodeState", position: int) -> Tensor | None:
        stream = DRAFT_STREAM if state.rule == "rejection" else TARGET_STREAM  # coupled: guess with the same noise
        ids = self.exit_head.token_ids(self.target)
        return None if state.sampling.is_greedy else uniform(state.seed, stream, [position], ids)[0]


class RecursiveDrafter(ChainDrafter):
    """Drafts from the exit's own output: layers [0, N) for the last token only, the block once a token (EAGLE's form).

    A step behind the first reads the token drafted last and the exit's state before it. What is drafted passes layers
    [0, N) together, on its way to being verified.
    """

    def propose(self, state: "DecodeState") -> Draft:
        """The draft; the block's keys and values of guessed states do not stay."""
        draft = super().propose(state)
        state.cache.rollback(len(state.tokens), self.exit_head.slots(self.target))
        return draft

    def _steps(self, state: "DecodeState", tokens: list[int], taps: list[Tensor], num_drafts: int) -> Iterator[Tensor]:
        taps.append(self._run_trunk(state, state.tokens[-1:], 0))
        normed = self.exit_head.states(self.target, state, taps[0], range(1, 2))
        yield normed
        for step in range(1, num_drafts):
            embedded = self._embed(state, tokens[-1:], step)
            normed = self.exit_head.next_state(self.target, state, embedded, normed)
            yield normed


class ParallelDrafter(ChainDrafter):
    """Drafts from one pass: layers [0, N) for the last token only, the block once over a row a draft.

    A row knows the last token's tap, its own distance from it and, by a bias on its logits, the token drafted before
    it (`Correction`). What is drafted passes layers [0, N) together, on its way to being verified.
    """

    def _steps(self, state: "DecodeState", tokens: list[int], taps: list[Tensor], num_drafts: int) -> Iterator[Tensor]:
        del tokens
        taps.append(self._run_trunk(state, state.tokens[-1:], 0))
        yield from self.exit_head.states(self.target, state, taps[0], range(1, num_drafts + 1)).split(1, dim=1)


def _is_plain_greedy(state: "DecodeState", num_drafted: int) -> bool:
    """Whether the next draft is simply the argmax of the exit's logits."""
    sampling = state.sampling
    return (
        sampling.is_greedy and sampling.repetition_penalty == 1 and len(state.tokens) + num_drafted >= state.min_length
    )


def empty_draft(device: torch.device) -> Draft:
    """A draft of no tokens for one sequence."""
    none = torch.zeros(1, 0, dtype=torch.long, device=device)
    return Draft(tokens=none, parents=none)


# by name; each is built from (target, exit_head, draft_len, min_confidence, draft_width, lookup)
DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "chain": ChainDrafter,
    "recursive": RecursiveDrafter,
    "parallel": ParallelDrafter,
    "lookup": LookupDrafter,
    "off": NoDrafter,
}
