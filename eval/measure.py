"""What a method is, and one measured run of it: when tokens came out, which, how much memory they took.

Every method hands its tokens over through `Meter.emit` as they come, so all are timed and counted by the same code.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

Clock = Callable[[], float]


class CountError(RuntimeError):
    """A method's emitted tokens are not the text that it returned."""


@dataclass
class Phases:
    """Seconds that the cycles of one run spent drafting, verifying and around both, and what each cycle drafted."""

    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    num_drafted: list[int] = field(default_factory=list)  # by cycle
    num_accepted: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """What one run emitted, and when. Prefill ends with the first emission; decoding is what follows."""

    tokens: list[int]
    emissions: list[int]  # tokens of each emission, the prefill's first
    prefill_seconds: float
    decode_seconds: float
    phases: Phases | None = None
    peak_bytes: int | None = None

    @property
    def num_cycles(self) -> int:
        return len(self.emissions) - 1

    @property
    def num_decoded(self) -> int:
        return len(self.tokens) - self.emissions[0]


class Meter:
    """Times a run. ``clock`` gives seconds; a CUDA device is waited for before every reading."""

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._tokens: list[int] = []
        self._emissions: list[int] = []
        self._times: list[float] = []

    def now(self) -> float:
        """Seconds, all work on the device done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

    def emit(self, tokens: list[int]) -> None:
        """Note new tokens as they come out."""
        if tokens:
            self._times.append(self.now())
            self._tokens += tokens
            self._emissions.append(len(tokens))

    def measure(self, run: Callable[["Meter"], list[int]], phases: Phases | None = None) -> Measured:
        """Run and check; ``run`` returns the new tokens it is to be judged by. Raises CountError where they differ."""
        peak = PeakMemory(self._device)
        began = self.now()
        returned = run(self)
        if not self._tokens:
            raise CountError("no token came out")
        if returned != self._tokens:
            raise CountError(f"{len(self._tokens)} tokens were emitted, {len(returned)} returned, or others")
        first, last = self._times[0], self._times[-1]
        return Measured(self._tokens, self._emissions, first - began, last - first, phases, peak.read())


class PeakMemory:
    """Peak memory of a stretch of work: of the device, or of the process where the system can tell (Linux)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_reset = False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
            self._is_reset = True
        except OSError:
            pass

    def read(self) -> int | None:
        """Bytes; None where nobody knows."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        if not self._is_reset:
            return None
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)


class SkippedMethodError(RuntimeError):
    """A method cannot run here; it is listed as skipped, with the reason."""


@dataclass(frozen=True)
class Request:
    """How a prompt is to be continued."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


class Method(Protocol):
    """A way to generate.

    ``is_ar``: one token a pass, nothing speculative. ``reference``: the method whose text it must give, when sampling
    only if ``is_promised``; where it is, not even a near-tie may fall differently.
    """

    is_ar: bool
    is_promised: bool
    reference: str

    def prepare(self, ids: Tensor, request: Request) -> None:
        """What may be done once and is not timed, such as compiling for a new length."""

    def run(self, ids: Tensor, request: Request, meter: Meter, phases: Phases) -> list[int]:
        """New tokens after ``ids`` [1, S], each handed to ``meter`` as it comes; those who can fill ``phases``."""
        ...
