"""What an exit is worth on held-out text: numbers, and cycles of decoding walked on paper."""

from collections.abc import Sequence
from dataclasses import dataclass, field

NUM_BINS = 10  # of confidence
WIDEST = 4  # guesses a draft step that are looked at


@dataclass(frozen=True)
class Metrics:
    """Held-out quality of an exit; lists are indexed by draft step - 1."""

    loss: float
    agreement: list[float]  # exit argmax equals the target's
    accepted_mass: list[float]  # sum min(p, q) at temperature 1
    acceptance: list[float]  # a_j: right at step j, given that all before were
    tau: list[float]  # tokens per cycle with k = 1, 2, ... greedy drafts
    calibration_error: float | None = None  # of the confidence, once it is fitted
    speedup: float | None = None  # predicted over ordinary decoding, from measured costs and the chosen drafting

    def flat(self) -> dict[str, float]:
        """One name for every number, for logs and sidecars."""
        values = {"loss": self.loss}
        for name in ("calibration_error", "speedup"):
            if getattr(self, name) is not None:
                values[name] = round(getattr(self, name), 3)
        for name in ("agreement", "accepted_mass", "acceptance", "tau"):
            values |= {f"{name}_{i}": round(v, 4) for i, v in enumerate(getattr(self, name), start=1)}
        return values


@dataclass(frozen=True)
class RowScores:
    """An exit on one held-out row, every draft step at every answer position; lists [J][A], or [J][A][W]."""

    is_right: list[list[bool]]  # exit argmax equals the target's
    confidence: list[list[float]]  # what the exit thinks its chance is
    shares: list[list[list[float]]] = field(default_factory=list)  # of its first guesses, the likeliest first
    ranks: list[list[int]] = field(default_factory=list)  # of the target's token among them; their number: it is none


@dataclass(frozen=True)
class Walk:
    """Cycles of decoding held-out text, counted."""

    num_tokens: int
    num_drafted: list[int]  # of each cycle, siblings included
    num_steps: list[int]  # draft steps of each cycle; one more than drafted where a step stopped before drawing
    tried: list[int]  # by step: cycles that reached it with all before it right
    accepted: list[int]  # by step
    is_drafted: list[bool]  # of each token, whether it was an accepted draft

    @property
    def num_cycles(self) -> int:
        return len(self.num_drafted)


def walk_cycles(
    row: RowScores, draft_len: int, min_confidence: float = 0.0, draft_width: int = 1, min_branch: float = 0.0
) -> Walk:
    """Decode one row as `ChainDrafter` would. Steps beyond those scored count as the last one scored."""
    size, at, last = len(row.is_right[0]), 0, len(row.is_right) - 1
    drafted, steps, tried, accepted = list[int](), list[int](), [0] * draft_len, [0] * draft_len
    is_drafted = [False] * size
    while at < size:
        most = min(draft_len, size - 1 - at)  # the last token needs no draft behind it
        siblings = _siblings(row, at, most, min_confidence, draft_width, min_branch)
        num = len(siblings)
        drafted.append(num + sum(siblings))
        steps.append(num + (num < most))
        for step in range(num):
            tried[step] += 1
            is_right = row.is_right[min(step, last)][at]
            if not is_right and (not siblings[step] or row.ranks[min(step, last)][at] > siblings[step]):
                break
            is_drafted[at] = True
            at += 1
            if not is_right:  # a sibling stands, behind which nothing was drafted
                break
            accepted[step] += 1
        at += 1
    return Walk(size, drafted, steps, tried, accepted, is_drafted)


def _siblings(
    row: RowScores, at: int, most: int, min_confidence: float, draft_width: int, min_branch: float
) -> list[int]:
    """How many siblings each token of a draft of at most ``most`` tokens from position ``at`` on has."""
    last, survival, reach, found = len(row.is_right) - 1, 1.0, 1.0, list[int]()
    for num in range(most):
        survival *= row.confidence[min(num, last)][at + num]
        if survival < min_confidence:
            break
        shares = row.shares[min(num, last)][at + num][:draft_width] if draft_width > 1 else [1.0]
        if num and shares[0] * reach < min_branch and draft_width > 1:
            break
        found.append(sum(share * reach >= min_branch for share in shares[1:]))
        reach *= shares[0]
    return found


def calibration_error(rows: Sequence[RowScores]) -> float:
    """Expected calibration error: how far, on average, a confidence lies from how often such guesses are right.

    By bins of a tenth, weighted by what falls into them (Naeini et al. 2015).
    """
    counts, sure, right = [0] * NUM_BINS, [0.0] * NUM_BINS, [0] * NUM_BINS
    for row in rows:
        for hits, chances in zip(row.is_right, row.confidence, strict=True):
            for hit, chance in zip(hits, chances, strict=True):
                place = min(int(chance * NUM_BINS), NUM_BINS - 1)
                counts[place] += 1
                sure[place] += chance
                right[place] += hit
    return sum(abs(s - r) for s, r in zip(sure, right, strict=True)) / max(sum(counts), 1)
