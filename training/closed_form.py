"""The closed-form start of an exit: ridge regressions from what its bridge reads to what its block expects.

Shapes: S positions of a row, D hidden, n recalled layers, A positions that carry the loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from selfspec.bridge import RidgeAccumulator
from selfspec.exit_module import ExitConfig, active, unwrap
from selfspec.target import Target
from selfspec.training.on_disk import load
from selfspec.training.states import RowStates

RIDGE_ROWS = 64  # training rows that a step of the accumulation takes
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)  # of the ridge, that are tried
Solution = tuple[Tensor, Tensor]  # weight [D, inputs] and bias [D]


@torch.no_grad()
def start_from_chance(adapter: PeftModel, seed: int) -> None:
    """Give the linear maps of blocks and bridge random weights, as a drafter that is trained from nothing has them."""
    generator, module = torch.Generator().manual_seed(seed), unwrap(adapter)
    for part in (active(module.bridge), active(module.blocks)):
        for linear in (m for m in part.modules() if isinstance(m, nn.Linear | Conv1D)):
            num_inputs = linear.weight.shape[0 if isinstance(linear, Conv1D) else 1]
            linear.weight.copy_(num_inputs**-0.5 * torch.randn(linear.weight.shape, generator=generator))
            if linear.bias is not None:
                linear.bias.zero_()


def start_from_ridge(
    target: Target,
    adapter: PeftModel,
    config: ExitConfig,
    states: Sequence[RowStates],
    held_out: Sequence[RowStates],
    strength: float | None,
    max_tokens: int,
) -> None:
    """Set the maps of the bridge to the ridge solutions of the first ``max_tokens`` tokens of ``states``.

    ``strength`` None: for every map the one that serves the ``held_out`` states best.
    """
    bridge = active(unwrap(adapter).bridge)
    fit = Fit(states, held_out, strength, max_tokens)
    for linear, solution in zip(bridge.maps, fit_maps(config, fit), strict=True):
        _set(linear, solution)
    if bridge.feedback is not None:
        _set(bridge.feedback, fit_feedback(target, fit))


@torch.no_grad()
def _set(linear: nn.Linear, solution: Solution) -> None:
    linear.weight.copy_(solution[0])
    linear.bias.copy_(solution[1])


@dataclass(frozen=True)
class Fit:
    """What ridge regressions are fitted on, and how."""

    states: Sequence[RowStates]
    held_out: Sequence[RowStates] = ()
    strength: float | None = None  # relative; None: chosen on ``held_out``
    max_tokens: int = 100_000

    def solve(self, pairs: Callable[[RowStates], tuple[Tensor, Tensor]]) -> Solution:
        """From the inputs [n, P] and aims [n, D] that ``pairs`` reads off a row."""
        fitted = _accumulate(self.states, pairs, self.max_tokens)
        if self.strength is not None:
            return fitted.solve(self.strength)
        judge = _accumulate(self.held_out, pairs, self.max_tokens)
        return min((fitted.solve(strength) for strength in STRENGTHS), key=lambda found: judge.error(*found))


def _accumulate(
    states: Sequence[RowStates], pairs: Callable[[RowStates], tuple[Tensor, Tensor]], max_tokens: int
) -> RidgeAccumulator:
    accumulator: RidgeAccumulator | None = None
    for begin in range(0, len(states), RIDGE_ROWS):
        inputs, aims = zip(*(pairs(row) for row in states[begin : begin + RIDGE_ROWS]), strict=True)
        if accumulator is None:
            accumulator = RidgeAccumulator(inputs[0].shape[1], aims[0].shape[1])
        accumulator.add(torch.cat(inputs), torch.cat(aims))
        if accumulator.num_rows >= max_tokens:
            break
    assert accumulator is not None
    return accumulator


@torch.no_grad()
def fit_maps(config: ExitConfig, fit: Fit) -> list[Solution]:
    """The closed-form bridge map of every draft step."""

    def pairs(row: RowStates, step: int) -> tuple[Tensor, Tensor]:
        behind = step - 1 if config.form == "parallel" else 0  # of the tap that is read
        # position 0 is an outlier in every model (attention sink): neither fitted nor recalled here
        recalls = row.recalls
        first = 1 + behind if recalls is None else step + 1
        parts = [load(row.taps)[first - behind : row.num_tokens - behind]]
        if recalls is not None:
            parts.append(recalls[first - step : row.num_tokens - step])
        return torch.cat(parts, dim=-1)[: max(row.num_tokens - first, 0)], load(row.wanted)[first:]

    return [fit.solve(partial(pairs, step=step)) for step in range(1, config.num_maps + 1)]


@torch.no_grad()
def fit_feedback(target: Target, fit: Fit) -> Solution:
    """The map of a recursive draft's later steps: from its token and the state before to the block's input.

    The state is the target's own, normed, which is what the exit's own comes to resemble.
    """

    def pairs(row: RowStates) -> tuple[Tensor, Tensor]:
        first = row.num_tokens - len(row.tokens)  # of the positions that carry the loss
        embedded = target.embed(row.tokens[None].to(target.device), first)[0, 1:]
        before = target.norm(load(row.finals)[:-1].to(target.device, target.dtype))
        return torch.cat([embedded, before], dim=-1).float().cpu(), load(row.wanted)[first + 1 :]

    return fit.solve(pairs)
