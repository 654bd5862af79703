"""One generation from the inside: what was drafted, what the target wanted instead, what became of every token.

`record` runs a generation through a drafter and a state that keep what passes through them. The text is that of
`EarlyExitModel.generate` for the same request. Probabilities are the softmax of raw logits in float32, before
temperature, filters and penalties, so that they say something of greedy texts too.

Shapes: K drafted tokens, D hidden, V vocabulary, V_d drafted vocabulary.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from selfspec.decode import DecodeState, RowScores
from selfspec.drafter import ChainDrafter, Drafter, Guess, NoDrafter, ParallelDrafter, RecursiveDrafter
from selfspec.exits import ExitHead
from selfspec.model import EarlyExitModel
from selfspec.sampling import Sampling
from selfspec.stats import DecodeStats
from selfspec.stream import Emission, Stream
from selfspec.target import Target
from selfspec.verify import Draft

FATES = ("accepted", "recovered", "bonus", "plain")
NUM_CHOICES = 5  # kept of each distribution


@dataclass(frozen=True)
class Choice:
    """A token and its probability."""

    token: int
    prob: float


@dataclass(frozen=True)
class Opinion:
    """What draft or target thought of one position."""

    chosen: Choice
    top: list[Choice]  # the likeliest tokens, in order

    @classmethod
    def of(cls, logits: Tensor, ids: Tensor | None, token: int) -> "Opinion":
        """From ``logits`` [V_d] of the tokens ``ids`` [V_d] (None: of all), of which ``token`` was chosen."""
        probs = logits.float().softmax(-1)
        top = probs.sort(descending=True, stable=True)  # ties go to the lowest id, as in `draw`
        likeliest = top.indices[:NUM_CHOICES]
        tokens = likeliest if ids is None else ids[likeliest]
        own = probs[token] if ids is None else probs[ids == token][0]
        choices = zip(tokens.tolist(), probs[likeliest].tolist(), strict=True)
        return cls(Choice(token, float(own)), [Choice(t, p) for t, p in choices])


@dataclass(frozen=True)
class Proposal:
    """A drafted token as the drafter saw it."""

    draft: Opinion
    confidence: float | None  # the exit's trained chance that it stands if those before it do; None: untrained

    @property
    def token(self) -> int:
        return self.draft.chosen.token


@dataclass(frozen=True)
class Token:
    """An emitted token."""

    fate: str  # one of FATES
    target: Opinion
    refused: Choice | None = None  # the draft that was rejected here, with the target's probability

    @property
    def id(self) -> int:
        return self.target.chosen.token


@dataclass(frozen=True)
class Cycle:
    """A cycle of the loop; the prompt's own pass is one without proposals."""

    position: int  # of its first token, in prompt and text together
    proposals: list[Proposal]  # [K]
    num_accepted: int  # proposals that were emitted, the first ones; a stop string may cut off others that stood
    tokens: list[Token]


@dataclass(frozen=True)
class Trace:
    """A generation: what the prompt's pass and every cycle did."""

    model: str
    settings: dict[str, Any]  # as resolved
    prefill: Cycle
    cycles: list[Cycle]
    stats: DecodeStats

    @property
    def tokens(self) -> list[Token]:
        return [token for cycle in [self.prefill, *self.cycles] for token in cycle.tokens]

    @property
    def fates(self) -> Counter[str]:
        """How many tokens had which fate."""
        return Counter(token.fate for token in self.tokens)


class RecordingDrafter(ChainDrafter):
    """A drafter that keeps the ``proposals`` of the last cycle."""

    is_stepwise = True

    def __init__(self, target: Target, exit_head: ExitHead, draft_len: int, min_confidence: float = 0.0) -> None:
        super().__init__(target, exit_head, draft_len, min_confidence)
        self.proposals: list[Proposal] = []

    def propose(self, state: DecodeState) -> Draft:
        """The same draft."""
        self.proposals = []
        return super().propose(state)

    def guess(self, normed: Tensor, state: DecodeState, drafted: list[int]) -> Guess | None:
        """The same guess."""
        guess = super().guess(normed, state, drafted)
        if guess is not None:
            opinion = Opinion.of(guess.logits, self.exit_head.vocab_ids, guess.token)
            is_trained = self.exit_head.adapter is not None
            self.proposals.append(Proposal(opinion, self.exit_head.chance(normed) if is_trained else None))
        return guess


class RecordingRecursiveDrafter(RecordingDrafter, RecursiveDrafter):
    """The same of a recursive draft."""


class RecordingParallelDrafter(RecordingDrafter, ParallelDrafter):
    """The same of a parallel draft."""


RECORDING: dict[type[Drafter], type[RecordingDrafter]] = {
    ChainDrafter: RecordingDrafter,
    RecursiveDrafter: RecordingRecursiveDrafter,
    ParallelDrafter: RecordingParallelDrafter,
}


@dataclass
class RecordingState(DecodeState):
    """A state that keeps the target's ``logits`` [K + 1, V] of the last pass."""

    logits: Tensor | None = None

    def scores(self, logits: Tensor, draft: Draft) -> RowScores:
        """The same scores."""
        self.logits = logits
        return super().scores(logits, draft)


def record(model: EarlyExitModel, ids: Tensor, **request: Any) -> Trace:
    """Generate from ``ids`` [1, S] with `EarlyExitModel.generate`'s arguments, and keep what happened."""
    drafter, plain_state = model.prepare(ids, **request)
    state = RecordingState(**vars(plain_state))
    settings = _settings(Stream(model, drafter, state), state)
    drafter = _recording(drafter)
    passes = [_cycle(emission, state, drafter) for emission in Stream(model, drafter, state)]
    return Trace(model.target.name, settings, passes[0], passes[1:], state.stats)


def _recording(drafter: Drafter) -> Drafter:
    if isinstance(drafter, NoDrafter):
        return drafter
    if type(drafter) not in RECORDING or not isinstance(drafter, ChainDrafter):
        raise NotImplementedError(f"a trace shows chains, not what a {type(drafter).__name__} drafts")
    made = RECORDING[type(drafter)]
    return made(drafter.target, drafter.exit_head, drafter.draft_len, drafter.min_confidence)


def _settings(stream: Stream, state: DecodeState) -> dict[str, Any]:
    """As resolved: how it drafts, how it samples, the length limit; no seed where nothing is drawn."""
    filters = {name: value for name, value in vars(state.sampling).items() if value != getattr(Sampling, name)}
    settings = {**stream.settings, "temperature": 0.0, **filters, "max_new_tokens": state.num_remaining}
    return {k: v for k, v in settings.items() if not (k == "seed" and state.sampling.is_greedy)}


def _cycle(emission: Emission, state: RecordingState, drafter: Drafter) -> Cycle:
    """What just happened; row i of a chain's pass is the target's opinion of emitted token i."""
    assert state.logits is not None
    proposals = drafter.proposals if isinstance(drafter, RecordingDrafter) else []
    own = "plain" if not proposals else "bonus" if emission.num_accepted == len(proposals) else "recovered"
    tokens = [
        Token("accepted" if i < emission.num_accepted else own, Opinion.of(state.logits[i], None, token))
        for i, token in enumerate(emission.tokens)
    ]
    if tokens[-1].fate == "recovered":  # a stop string may have cut it off
        place = emission.num_accepted
        refused = Opinion.of(state.logits[place], None, proposals[place].token).chosen
        tokens[place] = replace(tokens[place], refused=refused)
    return Cycle(len(state.tokens) - len(tokens), proposals, emission.num_accepted, tokens)
