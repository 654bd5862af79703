"""The closed-form start of an exit: ridge regressions from what its bridge reads to what its block expects.

Shapes: S positions of a row, D hidden, n recalled layers, A positions that carry the loss.
"""

from collections.abc import Sequence

import torch
from peft import PeftModel
from torch import Tensor, nn

from selfspec.bridge import RidgeAccumulator
from selfspec.exits import ExitConfig, active, unwrap
from selfspec.target import Target
from selfspec.training.states import RowStates

RIDGE_ROWS = 64  # training rows that a step of the accumulation takes
Solution = tuple[Tensor, Tensor]  # weight [D, inputs] and bias [D]


def start_from_ridge(
    target: Target,
    adapter: PeftModel,
    states: Sequence[RowStates],
    config: ExitConfig,
    strength: float,
    max_tokens: int,
) -> None:
    """Set the maps of the bridge to the ridge solutions of the first ``max_tokens`` tokens of ``states``."""
    bridge = active(unwrap(adapter).bridge)
    for linear, solution in zip(bridge.maps, fit_ridge(states, config, strength, max_tokens), strict=True):
        _set(linear, solution)
    if bridge.feedback is not None:
        _set(bridge.feedback, fit_feedback(target, states, strength, max_tokens))


@torch.no_grad()
def _set(linear: nn.Linear, solution: Solution) -> None:
    linear.weight.copy_(solution[0])
    linear.bias.copy_(solution[1])


@torch.no_grad()
def fit_ridge(states: Sequence[RowStates], config: ExitConfig, strength: float, max_tokens: int) -> list[Solution]:
    """Weight and bias of the closed-form bridge map of every draft step, from the first ``max_tokens`` tokens."""
    hidden_size = states[0].taps.shape[1]
    recalled = 0 if states[0].recalls is None else states[0].recalls.shape[1]
    solutions = []
    for j in range(1, config.num_maps + 1):
        behind = j - 1 if config.form == "parallel" else 0  # of the tap that is read
        accumulator, used = RidgeAccumulator(hidden_size + recalled, hidden_size), 0
        for begin in range(0, len(states), RIDGE_ROWS):
            inputs, wanted = [], []
            for row in states[begin : begin + RIDGE_ROWS]:
                # position 0 is an outlier in every model (attention sink): neither fitted nor recalled here
                first = j + 1 if recalled else 1 + behind
                parts = [row.taps[first - behind : row.num_tokens - behind]]
                if row.recalls is not None:
                    parts.append(row.recalls[first - j : row.num_tokens - j])
                inputs.append(torch.cat(parts, dim=-1)[: max(row.num_tokens - first, 0)])
                wanted.append(row.wanted[first:])
            accumulator.add(torch.cat(inputs), torch.cat(wanted))
            used = accumulator.num_rows
            if used >= max_tokens:
                break
        solutions.append(accumulator.solve(strength))
    return solutions


@torch.no_grad()
def fit_feedback(target: Target, states: Sequence[RowStates], strength: float, max_tokens: int) -> Solution:
    """The map of a recursive draft's later steps: from its token and the state before to the block's input.

    The state is the target's own, normed, which is what the exit's own comes to resemble.
    """
    accumulator = RidgeAccumulator(2 * target.hidden_size, target.hidden_size)
    for begin in range(0, len(states), RIDGE_ROWS):
        inputs, wanted = [], []
        for row in states[begin : begin + RIDGE_ROWS]:
            first = row.num_tokens - len(row.tokens)  # of the positions that carry the loss
            embedded = target.embed(row.tokens[None].to(target.device), first)[0, 1:]
            before = target.norm(row.finals[:-1].to(target.device, target.dtype))
            inputs.append(torch.cat([embedded, before], dim=-1).float().cpu())
            wanted.append(row.wanted[first + 1 :])
        accumulator.add(torch.cat(inputs), torch.cat(wanted))
        if accumulator.num_rows >= max_tokens:
            break
    return accumulator.solve(strength)
