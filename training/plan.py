"""How far to draft: the largest number of drafts and the confidence stop, from measured costs and held-out text."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from selfspec.training.losses import RowScores, walk_cycles

STOPS = tuple(i / 20 for i in range(13))  # 0, .05, ... .6


@dataclass(frozen=True)
class Costs:
    """Times in units of an ordinary pass over one row."""

    draft_step: float
    rows: tuple[float, ...]  # of a pass over 1, 2, ... rows; the first is 1


@dataclass(frozen=True)
class Plan:
    """Settings of drafting, and the speed over ordinary decoding that they promise."""

    draft_len: int
    min_confidence: float
    speedup: float


def predict(rows: Sequence[RowScores], costs: Costs, draft_len: int, min_confidence: float) -> float:
    """Tokens over time of walking ``rows``, where ordinary decoding takes one unit a token.

    A cycle of n drafts costs its draft steps and one pass over n + 1 rows; a step that stops before it draws counts as
    a whole one.
    """
    walks = [walk_cycles(row, draft_len, min_confidence) for row in rows]
    time = sum(
        costs.draft_step * steps + costs.rows[drafted]
        for walk in walks
        for steps, drafted in zip(walk.num_steps, walk.num_drafted, strict=True)
    )
    return sum(walk.num_tokens for walk in walks) / time


def choose(rows: Sequence[RowScores], costs: Costs) -> Plan:
    """The fastest setting on ``rows``, among all lengths whose passes were timed; the simplest of equals."""
    lengths = range(1, len(costs.rows))
    plans = [Plan(k, stop, predict(rows, costs, k, stop)) for k, stop in product(lengths, STOPS)]
    return max(plans, key=lambda plan: round(plan.speedup, 3))
