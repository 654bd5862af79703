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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from selfspec.cache import KVCache
from selfspec.device_cycle import DeviceCycle, Held
from selfspec.drafter import ChainDrafter, Drafter, NoDrafter
from selfspec.exits import ExitHead
from selfspec.sampling import NonFiniteLogitsError, Sampling
from selfspec.target import Target

if TYPE_CHECKING:
    from selfspec.decode import DecodeState

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

    head: ExitHead | None
    draft_len: int
    min_confidence: float
    sampling: Sampling
    width: int | None
    capacity: int
    is_captured: bool


class Engine:
    """Keeps the caches and graphs of one target for the texts to come.

    ``mode`` is one of graphs, calls and off; None leaves it to SELFSPEC_ENGINE and the device.
    """

    def __init__(self, target: Target, mode: str | None = None) -> None:
        self.target, self.mode = target, mode
        self._held: OrderedDict[Key, Cycles] = OrderedDict()
        self._told: set[str] = set()

    def cycles(self, drafter: Drafter, state: "DecodeState") -> "Cycles | None":
        """The cycles of a text that is about to begin, whose cache takes the place of ``state``'s; None: plain calls.

        Captures at first use. A text that does not fit, or a step that cannot be captured, is named once in the log.
        """
        mode = self.mode or mode_for(self.target.device)
        if mode == "off":
            return None
        reason = self.problem(drafter, state)
        if reason is None:
            try:
                found = self._find(drafter, state, mode == "graphs")
                found.begin(state)
                return found
            except (NotImplementedError, RuntimeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    self._held.clear()
                reason = " ".join(str(error).split()) or type(error).__name__
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("cycles run as plain calls, slower: %s", reason)
        return None

    def takes(self, drafter: Drafter, state: "DecodeState") -> bool:
        """Whether a text would be decoded here."""
        return (self.mode or mode_for(self.target.device)) != "off" and self.problem(drafter, state) is None

    def problem(self, drafter: Drafter, state: "DecodeState") -> str | None:
        """What of a text is not for the engine, None where all of it is."""
        if type(drafter) not in (ChainDrafter, NoDrafter):
            return f"drafts of {type(drafter).__name__}"
        if state.rule != "coupled":
            return f"the acceptance rule {state.rule!r}"
        if state.processors or state.sampling.repetition_penalty != 1 or len(state.tokens) + 1 < state.min_length:
            return "settings that look at the text so far"
        if not self.target.is_plain_embed:
            return f"{self.target.family}: its embedding needs to know positions"
        if _hooked(self.target.base) is not None:
            return f"{_hooked(self.target.base)} has hooks"
        return None

    def _find(self, drafter: Drafter, state: "DecodeState", is_captured: bool) -> "Cycles":
        margin = state.cache.capacity - state.max_length  # of one pass; the one launched too many needs it again
        capacity = max(SMALLEST_TIER, 1 << (state.max_length + 2 * margin).bit_length())
        head, draft_len, stop = drafter.exit_head, 0, 0.0
        if isinstance(drafter, ChainDrafter):
            draft_len, stop = drafter.draft_len, drafter.min_confidence
        key = Key(head, draft_len, stop, state.sampling, state.cache.width, capacity, is_captured)
        if key not in self._held:
            while len(self._held) >= MOST_HELD:
                self._held.popitem(last=False)
            self._held[key] = Cycles(self.target, key, len(state.cache.lengths))
        self._held.move_to_end(key)
        return self._held[key]


def _hooked(base: nn.Module) -> str | None:
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
            self.numbers[begin : begin + len(part)].copy_(part, non_blocking=True)
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
        self.cache = KVCache(num_layers, key.capacity, key.width)
        self.held = Held.of(target, key.head, key.draft_len)
        began = time.perf_counter()
        made = {
            count: DeviceCycle(target, key.head, count, key.min_confidence, key.sampling, self.cache, self._part(count))
            for count in {0, key.draft_len}
        }
        self.steps = {count: capture(cycle) if key.is_captured else cycle for count, cycle in made.items()}
        if key.is_captured:
            logger.info("captured %d cycles in %.1f s", len(made), time.perf_counter() - began)
        self._results = [_ReadBack.at(target.device, 3 + key.draft_len + 1) for _ in range(2)]

    def _part(self, draft_len: int) -> Held:
        """The same tensors with as many emitted tokens as a cycle of ``draft_len`` drafts makes."""
        shared = {name: getattr(self.held, name) for name in Held.__dataclass_fields__}
        return Held(**shared | {"emitted": self.held.emitted[: draft_len + 1]})

    def begin(self, state: "DecodeState") -> None:
        """Have ``state`` use this cache, from its start."""
        self.cache.clear()
        state.cache = self.cache

    def run(self, drafter: Drafter, state: "DecodeState") -> Iterator[list[int]]:
        """The cycles after the prompt's pass: a launch, and then the result of the launch before."""
        self._load(state)
        launched: list[_ReadBack] = []
        turn = 0
        while not state.done:
            result = self._results[turn % 2]
            is_drafting = isinstance(drafter, ChainDrafter) and drafter.pace.pays(state.stats)
            self.steps[self.key.draft_len if is_drafting else 0]()
            result.order([self.held.counts, self.held.emitted])
            launched.append(result)
            turn += 1
            if len(launched) == 2:
                yield self._commit(state, launched.pop(0).wait())

    def _load(self, state: "DecodeState") -> None:
        """What the prompt's pass has left, to the device."""
        held = self.held
        held.first.fill_(len(state.tokens) - 1)
        held.token.fill_(state.tokens[-1])
        held.seed.fill_(state.seed)
        held.is_unseen.zero_()
        if state.recall is not None:
            held.recall.copy_(state.recall)

    def _commit(self, state: "DecodeState", numbers: list[int]) -> list[int]:
        num_drafted, num_accepted, bad, *own = numbers
        if bad >= 0:
            raise NonFiniteLogitsError(f"the target's logits at position {len(state.tokens) - 1 + bad} are not finite")
        emitted = state.emit(own[: num_accepted + 1])
        state.stats.record(num_drafted, num_accepted, len(emitted))
        return emitted


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """``step`` as a CUDA graph, after a few runs that compile and allocate what it needs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
