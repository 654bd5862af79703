"""This package's engine as a method, its cycles timed in place: drafting, verifying and what is left."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from selfspec.decode import DecodeState
from selfspec.drafter import Drafter
from selfspec.eval.measure import Meter, Phases, Request, SkippedMethodError
from selfspec.exits import ExitHead
from selfspec.model import EarlyExitModel
from selfspec.stream import Stream
from selfspec.verify import Draft

AR, WIDE = "ar", "ar-wide"


class Engine:
    """This package's engine; ``options`` are those of `EarlyExitModel.generate`."""

    def __init__(self, model: EarlyExitModel, **options: Any) -> None:
        self.model, self.options = model, options
        self.is_ar = options.get("draft") == "off"
        if options.get("draft") not in ("off", "lookup") and not model.exits:
            raise SkippedMethodError("the model has no exits to draft from")
        _, state = model.prepare(torch.zeros(1, 1, dtype=torch.long), max_new_tokens=1, **options)  # all checked here
        self.width = state.cache.width  # of exact mode
        self.is_promised = state.rule == "coupled" and (self.width is not None or model.target.dtype == torch.float32)
        self.reference = AR if self.width in (None, 1) else wide_name(self.width)

    def prepare(self, ids: Tensor, request: Request) -> None:
        """Nothing."""

    def run(self, ids: Tensor, request: Request, meter: Meter, phases: Phases) -> list[int]:
        """Decode with drafting, verifying and the rest timed apart, where a cycle is more than one launch."""
        drafter, state = self.model.prepare(
            ids, max_new_tokens=request.max_new_tokens, temperature=request.temperature, seed=request.seed,
            **self.options,
        )  # fmt: skip
        if self.model.engine.takes(drafter, state):
            return _run_whole(Stream(self.model, drafter, state), meter, phases)
        timed_state = TimedState(**vars(state), meter=meter, phases=phases)
        for emission in Stream(self.model, TimedDrafter(drafter, meter, phases), timed_state):
            meter.emit(emission.tokens)
        return timed_state.tokens[ids.shape[1] :]


def _run_whole(stream: Stream, meter: Meter, phases: Phases) -> list[int]:
    """Cycles that cannot be timed in parts; what they drafted and accepted is counted all the same."""
    tokens, before = list[int](), (0, 0)
    for emission in stream:
        meter.emit(emission.tokens)
        tokens += emission.tokens
        counts = (stream.stats.num_drafted, stream.stats.num_accepted)
        if stream.stats.num_cycles:
            phases.num_drafted.append(counts[0] - before[0])
            phases.num_accepted.append(counts[1] - before[1])
        before = counts
    return tokens


class TimedDrafter:
    """A drafter whose proposals are timed and counted."""

    def __init__(self, drafter: Drafter, meter: Meter, phases: Phases) -> None:
        self._drafter, self._meter, self._phases = drafter, meter, phases

    @property
    def exit_head(self) -> ExitHead | None:
        return self._drafter.exit_head

    def propose(self, state: DecodeState) -> Draft:
        """The drafter's own proposal."""
        assert isinstance(state, TimedState)
        began = self._meter.now()
        draft = self._drafter.propose(state)
        state.verify_began = self._meter.now()
        self._phases.draft_seconds += state.verify_began - began
        self._phases.num_drafted.append(draft.num_drafted)
        return draft


@dataclass
class TimedState(DecodeState):
    """A state that notes when the verify pass has its logits, and what was accepted."""

    meter: Meter = field(kw_only=True)
    phases: Phases = field(kw_only=True)
    verify_began: float | None = None  # None until the first cycle: the prompt's pass is no verify pass

    def scores(self, logits: Tensor, draft: Draft) -> Any:
        if self.verify_began is not None:
            self.phases.verify_seconds += self.meter.now() - self.verify_began
        return super().scores(logits, draft)

    def commit(self, draft: Draft, verdict: Any, scored: Any) -> list[int]:
        self.phases.num_accepted.append(int(verdict.num_accepted[0]))
        return super().commit(draft, verdict, scored)


def ar(model: EarlyExitModel, **options: Any) -> Engine:
    """This engine without drafts, one row a pass: the fastest plain decoding it has."""
    return Engine(model, draft="off", **{"exact": False, **options})


def ar_wide(model: EarlyExitModel, width: int = 2) -> Engine:
    """This engine without drafts at a row width of exact mode: what exact text is held against.

    Held against ``ar`` itself, it gives the noise floor: how often another width flips a near-tie.
    """
    try:
        method = Engine(model, draft="off", exact=True, draft_len=width - 1)
    except ValueError as error:  # rows depend on each other: there is no exact mode, nor a method that needs this
        raise SkippedMethodError(str(error)) from error
    method.reference, method.is_promised = AR, model.target.dtype == torch.float32
    return method


def wide_name(width: int) -> str:
    """Name of plain decoding at an exact width."""
    return f"{WIDE}-{width}"
