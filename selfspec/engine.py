"""The engine: cycles as captured graphs where a GPU can replay them, and the loop's own plain calls everywhere else.

`decode` asks the engine before a text begins. Where everything is as `Engine.problem` wants it, the text's cycles are
those of `DeviceCycle`: one launch each, one read-back that the next launch does not wait for, so that the end of a text
is seen one cycle late. What is emitted is the same.
"""

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.cache import KVCache
from selfspec.decode import DecodeState
from selfspec.device_cycle import DeviceCycle
from selfspec.device_steps import Held, Kind
from selfspec.drafter import DRAFTERS, ChainDrafter, Drafter, ParallelDrafter
from selfspec.exits import ExitHead
from selfspec.kernels.row_view import MAX_ROWS
from selfspec.sampling import NonFiniteLogitsError
from selfspec.target import Target

logger = logging.getLogger(__name__)

MODES = ("graphs", "calls", "off")  # captured; the same steps called one by one; the loop's own passes
SMALLEST_TIER = 512  # slots of a cache; a longer text gets the next power of two
MOST_HELD = 2  # caches with their graphs that are kept for later texts


def mode_for(device: torch.device) -> str:
    """How cycles run on ``device``; SELFSPEC_ENGINE overrides it.

    Raises ValueError for a value of SELFSPEC_ENGINE that is not one of graphs, calls and off, or not to be had.
    """
    choice = os.environ.get("SELFSPEC_ENGINE", "graphs" if device.type == "cuda" else "off")
    if choice not in MODES:
        raise ValueError(f"SELFSPEC_ENGINE={choice!r}; choose one of {', '.join(MODES)}")
    if choice == "graphs" and device.type != "cuda":
        raise ValueError(f"SELFSPEC_ENGINE=graphs: {device.type} has no graphs to capture; choose calls or off")
    return choice


@dataclass(frozen=True)
class Key:
    """What graphs are captured for."""

    kind: Kind
    width: int | None
    capacity: int
    is_captured: bool
    is_float8: bool
    is_inference: bool  # tensors made in torch's inference mode are of no use outside it


class Engine:
    """Keeps the caches and graphs of one target for the texts to come.

    ``mode`` is one of graphs, calls and off; None leaves it to SELFSPEC_ENGINE and the device.
    """

    def __init__(self, target: Target, mode: str | None = None) -> None:
        self.target, self.mode = target, mode
        self._held: OrderedDict[Key, Cycles] = OrderedDict()
        self._refused: dict[Key, str] = {}  # why their steps could not be captured
        self._addresses: dict[ExitHead | None, list[int]] = {}  # of the weights of base and exits, known by graphs
        self._told: set[str] = set()

    def cycles(self, drafter: Drafter, state: DecodeState) -> "Cycles | None":
        """The cycles of a text that is about to begin, whose cache takes the place of ``state``'s; None: plain calls.

        Captures at first use. A text that does not fit, or a step that cannot be captured, is named once in the log.
        """
        mode = self.mode or mode_for(self.target.device)
        if mode == "off":
            return None
        reason = self.problem(drafter, state)
        if reason is None:
            self._notice_moved_weights(drafter.exit_head)
            key = self._key(drafter, state, mode == "graphs")
            reason = self._refused.get(key) or self._make(key, len(state.cache.lengths))
            if reason is None and self._held[key].is_in_use:
                reason = "another text is under way"
            if reason is None:
                self._held[key].begin(state)
                return self._held[key]
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("cycles run as plain calls, slower: %s", reason)
        return None

    @property
    def is_on(self) -> bool:
        """Whether any text is decoded here."""
        return (self.mode or mode_for(self.target.device)) != "off"

    def takes(self, drafter: Drafter, state: DecodeState) -> bool:
        """Whether a text would be decoded here."""
        return self.is_on and self.problem(drafter, state) is None

    def problem(self, drafter: Drafter, state: DecodeState) -> str | None:
        """What of a text is not for the engine, None where all of it is."""
        if type(drafter) not in DRAFTERS.values():
            return f"drafts of {type(drafter).__name__}"
        if type(drafter) is ParallelDrafter and 2 * drafter.draft_len > MAX_ROWS:
            return f"parallel drafts of {drafter.draft_len} tokens"  # which go along with as many that were accepted
        if type(state) is not DecodeState:
            return f"{type(state).__name__}, which looks into the cycle"
        if state.processors or state.sampling.repetition_penalty != 1 or len(state.tokens) + 1 < state.min_length:
            return "settings that look at the text so far"
        if getattr(drafter, "lookup", None) is not None:
            return "tokens looked up in the text"
        if getattr(drafter, "draft_width", 1) > 1 and state.cache.width is not None:
            return "a tree of drafts in exact mode"  # its rows lie elsewhere than a chain's, so their sums differ
        if state.cache.width == 1:
            return "exact mode as the CPU's kernels have it"
        if self.target.device.type == "cuda" and self.target.device.index != torch.cuda.current_device():
            return f"the model is on {self.target.device}, which is not the current device"
        if self.target.is_split:
            return "a model that several processes hold together"
        if not self.target.is_plain_embed:
            return f"{self.target.family}: its embedding needs to know positions"
        if hooked(self.target.base) is not None:
            return f"{hooked(self.target.base)} has hooks"
        return None

    def _key(self, drafter: Drafter, state: DecodeState, is_captured: bool) -> Key:
        rule = "coupled" if state.sampling.is_greedy else state.rule  # which is then the same
        kind, width = Kind(drafter.exit_head, 0, sampling=state.sampling, rule=rule), state.cache.width
        if isinstance(drafter, ChainDrafter):
            branches = drafter.draft_width if rule == "coupled" else 1  # siblings would be judged by a q each
            kind = replace(
                kind, draft_len=drafter.draft_len, min_confidence=drafter.min_confidence, draft_width=branches
            )
        # the cycle launched too many begins up to draft_len behind the end, and its last step has a pass's rows again;
        # in exact mode by the width, which a text without drafts has too: the same room, hence the same bits
        needed = state.max_length + 3 * (width or kind.num_rows) + 1  # and a slot to spare
        capacity = max(SMALLEST_TIER, 1 << (needed - 1).bit_length())
        is_float8, is_inference = state.cache.is_float8, torch.is_inference_mode_enabled()
        return Key(kind, width, capacity, is_captured, is_float8, is_inference)

    def _make(self, key: Key, num_layers: int) -> str | None:
        """Have cycles of that kind; what is in the way of it, None where nothing is."""
        if key not in self._held:
            while len(self._held) >= MOST_HELD:
                self._held.popitem(last=False)
            try:
                self._held[key] = Cycles(self.target, key, num_layers)
            except RuntimeError as error:  # whatever an operation that cannot be captured raises
                cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
                reason = " ".join(str(cause).split()) or type(cause).__name__
                if not isinstance(cause, torch.OutOfMemoryError):
                    self._refused[key] = reason
                return reason
        self._held.move_to_end(key)
        return None

    def _notice_moved_weights(self, head: ExitHead | None) -> None:
        """Forget all graphs where weights lie elsewhere than when they were captured."""
        parts = {None: [self.target.base]} | ({} if head is None else {head: head.modules})
        found = {key: [p.data_ptr() for m in modules for p in m.parameters()] for key, modules in parts.items()}
        if any(self._addresses.get(key, held) != held for key, held in found.items()):
            self._held.clear()
            self._refused.clear()
        self._addresses |= found


def hooked(base: nn.Module) -> str | None:
    """A module of the model that calls others whenever it runs, which a replayed graph would not."""
    for name, module in base.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"):
            return name or type(module).__name__
    return None


@dataclass(eq=False)
class _ReadBack:
    """Where the host finds what a cycle has made, once it is there."""

    numbers: Tensor
    arrived: Any = field(default=None)

    @classmethod
    def at(cls, device: torch.device, size: int) -> "_ReadBack":
        if device.type != "cuda":
            return cls(torch.zeros(size, dtype=torch.long))
        return cls(torch.zeros(size, dtype=torch.long, pin_memory=True), torch.cuda.Event())

    def order(self, parts: list[Tensor]) -> None:
        """Have ``parts`` copied here when the device gets there."""
        begin = 0
        for part in parts:
            self.numbers[begin : begin + len(part)].copy_(part, non_blocking=self.arrived is not None)
            begin += len(part)
        if self.arrived is not None:
            self.arrived.record()

    def wait(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.numbers.tolist()


class Cycles:
    """The cycles of texts of one kind: with drafts, and without where drafting pauses."""

    def __init__(self, target: Target, key: Key, num_layers: int) -> None:
        self.target, self.key = target, key
        self.cache = KVCache(num_layers, key.capacity, key.width, is_float8=key.is_float8)
        self.held, self.is_in_use = Held.of(target, key.kind), False
        target.calls_for(self.cache).require_windows()
        began = time.perf_counter()
        kinds = {count: replace(key.kind, draft_len=count) for count in {0, key.kind.draft_len}}
        made = {count: DeviceCycle(target, kind, self.cache, self._part(count)) for count, kind in kinds.items()}
        self.steps = {count: capture(cycle) if key.is_captured else cycle for count, cycle in made.items()}
        if key.is_captured:
            logger.info("captured %d cycles in %.1f s", len(made), time.perf_counter() - began)
        self._results = [_ReadBack.at(target.device, 3 + key.kind.draft_len + 1) for _ in range(2)]

    def _part(self, draft_len: int) -> Held:
        """The same tensors with as many emitted tokens as a cycle of ``draft_len`` drafts makes."""
        return replace(self.held, emitted=self.held.emitted[: draft_len + 1])

    def begin(self, state: DecodeState) -> None:
        """Have ``state`` use this cache, from its start."""
        self.cache.clear()
        state.cache, self.is_in_use = self.cache, True

    def text(self, start: Callable[[], list[int]], drafter: Drafter, state: DecodeState) -> Iterator[list[int]]:
        """The whole text: what ``start`` emits of the prompt's pass, then the cycles."""
        try:
            yield start()
            yield from self.run(drafter, state)
        except Exception:
            self.cache.forget()  # what an error leaves in it may not be finite, and masks do not stop that everywhere
            raise
        finally:
            self.is_in_use = False

    def run(self, drafter: Drafter, state: DecodeState) -> Iterator[list[int]]:
        """The cycles after the prompt's pass: a launch, and then the result of the launch before."""
        self._load(state)
        launched: list[_ReadBack] = []
        turn = 0
        while not state.done:
            result = self._results[turn % 2]
            is_drafting = isinstance(drafter, ChainDrafter) and drafter.pace.pays(state.stats)
            self.steps[self.key.kind.draft_len if is_drafting else 0]()
            result.order([self.held.counts, self.held.emitted])
            launched.append(result)
            turn += 1
            if len(launched) == 2:
                yield self._commit(state, launched.pop(0).wait())

    def _load(self, state: DecodeState) -> None:
        """What the prompt's pass has left, to the device."""
        held = self.held
        held.first.fill_(len(state.tokens) - 1)
        held.seen.fill_(len(state.tokens) - 1)
        held.end.fill_(state.max_length)
        held.token.fill_(state.tokens[-1])
        held.seed.fill_(state.seed)
        if state.recall is not None:
            held.recall.copy_(state.recall)

    def _commit(self, state: DecodeState, numbers: list[int]) -> list[int]:
        num_drafted, num_accepted, bad, *own = numbers
        if bad >= 0:
            raise NonFiniteLogitsError(f"the target's logits at position {len(state.tokens) - 1 + bad} are not finite")
        emitted = state.emit(own[: num_accepted + 1])
        state.stats.record(num_drafted, num_accepted, len(emitted))
        return emitted


def capture(step: Callable[[], Any]) -> Callable[[], None]:
    """``step`` as a CUDA graph, after a few runs that compile and allocate what it needs.

    The graph knows the tensors of ``step`` by address alone: what is returned keeps hold of them.
    """
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.cuda.stream(current):  # which a capture that fails does not always give back
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
    return _Graph(step, graph)


@dataclass(frozen=True)
class _Graph:
    step: Callable[[], Any]
    graph: Any

    def __call__(self) -> None:
        self.graph.replay()
