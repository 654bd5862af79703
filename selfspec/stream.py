"""A generation under way, cycle by cycle, with its clock."""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from selfspec.decode import DecodeState, decode
from selfspec.drafter import DRAFTERS, Drafter
from selfspec.stats import DecodeStats
from selfspec.together import decode_together

if TYPE_CHECKING:
    from selfspec.model import EarlyExitModel


@dataclass(frozen=True)
class Emission:
    """The tokens of one cycle, as they are streamed: accepted drafts first, then the target's own."""

    tokens: list[int]
    num_accepted: int  # how many of ``tokens`` were drafted


class Stream(Iterator[Emission]):
    """A generation under way: iterate, once, for `Emission`s; ``stats`` fills as it goes."""

    def __init__(self, model: "EarlyExitModel", drafter: Drafter, state: DecodeState) -> None:
        self._model, self._drafter, self._state = model, drafter, state
        self._emissions = self._run()

    @property
    def stats(self) -> DecodeStats:
        return self._state.stats

    @property
    def settings(self) -> dict[str, Any]:
        """What decides about speed and text, as it was resolved."""
        state, drafter = self._state, self._drafter
        head, lookup = drafter.exit_head, getattr(drafter, "lookup", None)
        return {
            "draft": next((n for n, kind in DRAFTERS.items() if type(drafter) is kind), type(drafter).__name__),
            "exit": None if head is None else head.name,
            "draft_len": getattr(drafter, "draft_len", 0),
            "min_confidence": getattr(drafter, "min_confidence", 0.0),
            "draft_width": getattr(drafter, "draft_width", 1),
            "prompt_lookup_num_tokens": 0 if lookup is None else lookup.num_tokens,
            "exact": state.cache.width is not None,
            "acceptance": state.rule,
            "seed": state.seed,
            "dtype": str(self._model.target.dtype).removeprefix("torch."),
            "kv_cache_dtype": "float8" if state.cache.is_float8 else None,
        }

    def __next__(self) -> Emission:
        return next(self._emissions)

    def close(self) -> None:
        """End the generation here; the model is free for another one."""
        self._emissions.close()

    def _run(self) -> Generator[Emission]:
        with self._model.alone(), _naming_what_had_no_room(self._state):
            self._model.target.notice_changes()
            yield from self._timed()

    def _timed(self) -> Generator[Emission]:
        state, stats = self._state, self._state.stats
        cycles, num_accepted = decode(self._model.target, self._drafter, state), 0
        began = time.perf_counter()
        for tokens in cycles:
            seconds = time.perf_counter() - began
            if stats.num_cycles == 0:
                stats.prefill_seconds = seconds
            else:
                stats.decode_seconds += seconds
            accepted, num_accepted = stats.num_accepted - num_accepted, stats.num_accepted
            yield Emission(tokens, min(accepted, len(tokens)))
            began = time.perf_counter()


def run_together(
    model: "EarlyExitModel", texts: Sequence[tuple[Drafter, DecodeState]], stats: DecodeStats
) -> list[list[int]]:
    """New tokens of several texts whose passes are run together; ``stats`` gets their counts and the time of all."""
    tokens: list[list[int]] = [[] for _ in texts]
    states = [state for _, state in texts]
    with model.alone(), _naming_what_had_no_room(*states):
        model.target.notice_changes()
        began = time.perf_counter()
        for number, emitted in decode_together(model.target, texts):
            seconds, began = time.perf_counter() - began, time.perf_counter()
            if tokens[number]:
                stats.decode_seconds += seconds
            else:
                stats.prefill_seconds += seconds
            tokens[number] += emitted
    for state in states:
        stats.add(state.stats)
    return tokens


@contextmanager
def _naming_what_had_no_room(*states: DecodeState) -> Iterator[None]:
    """MemoryError, in one line, in the place of what torch says at length."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        longest = max(states, key=lambda state: len(state.tokens))
        fewer = "pass fewer prompts at once, " if len(states) > 1 else ""
        size = sum(state.cache.num_bytes for state in states)
        raise MemoryError(
            f"out of memory on {longest.device} with a batch of {len(states)} and {len(longest.tokens)} of "
            f"{longest.max_length} tokens; "
            f"the cache takes {size / 2**20:.0f} MiB: {fewer}lower max_new_tokens, shorten the prompt, or "
            "load the model in fewer bits"
        ) from error
