"""How far and how wide to draft: number of drafts, confidence stop and siblings, from costs and held-out text."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch

from selfspec.costs import pass_costs
from selfspec.decode import exact_width, is_exact_by_default
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.kernels import dispatch
from selfspec.model import EarlyExitModel
from selfspec.pretrained import resolve_dtype
from selfspec.target import Target
from selfspec.training.metrics import WIDEST, RowScores, walk_cycles

COST_CONTEXT, COST_ROUNDS = 256, 9  # tokens of context and repetitions with which passes are timed
STOPS = tuple(i / 20 for i in range(13))  # 0, .05, ... .6
NUM_ROWS = range(1, 10)  # of the passes that are timed


@dataclass(frozen=True)
class Costs:
    """Times in units of an ordinary pass over one row."""

    draft_step: float  # of a chain
    rows: tuple[float, ...]  # of a pass over 1, 2, ... rows; the first is 1
    is_padded: bool = False  # passes are padded to one width, as exact mode needs where rows are not exact as they come
    drafts: tuple[float, ...] = ()  # of whole drafts of 1, 2, ... tokens; none: it is a chain
    is_one_pass: bool = False  # a parallel draft makes all its steps, however many of them count
    min_branch: float | None = None  # chance that a sibling needs; None: there are none

    def draft(self, draft_len: int, num_steps: int) -> float:
        """A draft of at most ``draft_len`` tokens that took ``num_steps`` steps."""
        made = draft_len if self.is_one_pass else num_steps
        return self.drafts[made - 1] if self.drafts and made else self.draft_step * num_steps

    def verify(self, draft_len: int, num_drafted: int) -> float:
        """A verify pass over ``num_drafted`` drafts of at most ``draft_len``."""
        return self.rows[(exact_width(draft_len) if self.is_padded else num_drafted + 1) - 1]

    def draft_lens(self) -> list[int]:
        """Lengths whose verify passes were timed."""
        return [k for k in range(1, len(self.rows)) if not self.is_padded or exact_width(k) <= len(self.rows)]

    def draft_widths(self, draft_len: int) -> list[int]:
        """Candidates a step, more than one, whose largest verify passes were timed."""
        most = 0 if self.min_branch is None else min(WIDEST, (len(self.rows) - 1) // draft_len)
        return list(range(2, most + 1))


@dataclass(frozen=True)
class Plan:
    """Settings of drafting, and the speed over ordinary decoding that they promise."""

    draft_len: int
    min_confidence: float
    speedup: float
    draft_width: int = 1


def predict(
    rows: Sequence[RowScores], costs: Costs, draft_len: int, min_confidence: float, draft_width: int = 1
) -> float:
    """Tokens over time of walking ``rows``, where ordinary decoding takes one unit a token.

    A cycle of n drafts costs its draft steps and one pass over n + 1 rows; a step that stops before it draws counts as
    a whole one.
    """
    walks = [walk_cycles(row, draft_len, min_confidence, draft_width, costs.min_branch or 0.0) for row in rows]
    time = sum(
        costs.draft(draft_len, steps) + costs.verify(draft_len, drafted)
        for walk in walks
        for steps, drafted in zip(walk.num_steps, walk.num_drafted, strict=True)
    )
    return sum(walk.num_tokens for walk in walks) / time


def choose(rows: Sequence[RowScores], costs: Costs) -> Plan:
    """The fastest setting on ``rows``, among the lengths that were scored and timed; the simplest of equals.

    Where there are siblings, the chance that a row needs is the stop.
    """
    lengths = [k for k in costs.draft_lens() if k <= len(rows[0].is_right)]  # later steps guess worse than scored ones
    plans = [Plan(k, stop, predict(rows, costs, k, stop)) for k, stop in product(lengths, STOPS)]
    plans += [Plan(k, 0.0, predict(rows, costs, k, 0.0, w), w) for k in lengths for w in costs.draft_widths(k)]
    return max(plans, key=lambda plan: round(plan.speedup, 3))


def measure_costs(target: Target, exit_config: ExitConfig) -> Costs:
    """Time passes and a draft step on this machine, in the dtype that decodes by default; the weights do not matter.

    The draft step is timed unpadded; padding, where exact mode needs it, adds a little to it.
    """
    dtype = resolve_dtype(None, target.device)
    if isinstance(dtype, torch.dtype) and dtype != target.dtype and not target.is_split:  # parts cannot be copied
        target = Target(copy.deepcopy(target.base).to(dtype), check=False)
    head = ExitHead(target, "timed", exit_config, build_adapter(target, exit_config))
    context = min(COST_CONTEXT, getattr(target.config, "max_position_embeddings", COST_CONTEXT) // 2)
    found = pass_costs(EarlyExitModel(target, {"timed": head}), COST_ROUNDS, (context,), NUM_ROWS)[str(context)]
    rows = tuple(round(found[f"pass_{n}_ms"] / found["pass_1_ms"], 4) for n in NUM_ROWS)
    lengths = range(1, exit_config.num_steps + 1) if exit_config.form != "chain" else ()
    worth = dispatch.worth_of_a_row(target.device) if exit_config.min_branch is None else exit_config.min_branch
    return Costs(
        round(found["draft_step_over_pass"], 4), rows, is_exact_by_default(target.dtype) and not target.fused.is_in_use,
        tuple(round(found[f"draft_{k}_ms"] / found["pass_1_ms"], 4) for k in lengths), exit_config.form == "parallel",
        worth if target.fused.is_in_use else None,
    )  # fmt: skip
