"""What happened during decoding, in the field's terms."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class DecodeStats:
    """Counts of one generation.

    ``tau`` is tokens emitted per cycle, after truncation by end of text, stop strings and budget, the token that the
    prompt's pass gives left out; ``acceptance_rate`` is accepted over drafted tokens.
    """

    num_tokens: int = 0  # all new tokens, the prompt pass's included
    num_cycles: int = 0
    num_emitted: int = 0  # tokens the cycles emitted
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_histogram: list[int] = field(default_factory=list)  # [n] = cycles that accepted n drafts
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def record(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Count one cycle."""
        self.num_cycles += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_emitted += num_emitted
        missing = num_accepted + 1 - len(self.accepted_histogram)
        self.accepted_histogram.extend([0] * missing)
        self.accepted_histogram[num_accepted] += 1

    def add(self, other: "DecodeStats") -> None:
        """Count another generation's cycles, too."""
        size = max(len(self.accepted_histogram), len(other.accepted_histogram))
        padded = [stats.accepted_histogram + [0] * (size - len(stats.accepted_histogram)) for stats in (self, other)]
        for name in (f.name for f in fields(self) if f.name != "accepted_histogram"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.accepted_histogram = [a + b for a, b in zip(*padded, strict=True)]

    @property
    def tau(self) -> float:
        return self.num_emitted / self.num_cycles if self.num_cycles else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of decoding, prefill apart: what the cycles emitted over the time they took."""
        return self.num_emitted / self.decode_seconds if self.decode_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The counts as `selfspec generate --json` prints them."""
        return {
            "num_cycles": self.num_cycles,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
            "acceptance_rate": self.acceptance_rate,
            "tau": self.tau,
            "accepted_histogram": self.accepted_histogram,
        }
