"""Who sees whom: a family's own rule, evaluated for the rows of a pass, in chains and in trees.

Shapes: B sequences, R rows of a pass, T slots.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function


@dataclass(frozen=True, eq=False)
class MaskRule:
    """A family's rule of who sees whom (causal, sliding window, chunks), kept as the function it came as."""

    allows: Callable[..., Tensor]

    @property
    def is_causal(self) -> bool:
        return self.allows is causal_mask_function


def tree_shape(parents: tuple[int, ...] | None, num_rows: int) -> tuple[list[int], Tensor | None]:
    """Depth of each row, and who is whose ancestor [R, R] (None for a chain)."""
    if parents is None:
        return list(range(num_rows)), None
    depths, ancestors = [0], torch.eye(num_rows, dtype=torch.bool)
    for row, parent in enumerate(parents[1:], start=1):
        depths.append(depths[parent] + 1)
        ancestors[row] |= ancestors[parent]
    depths += [depths[-1]] * (num_rows - len(depths))  # padding rows: anywhere, they see themselves and the prefix
    return depths, ancestors


def row_mask(rule: MaskRule, positions: Tensor, first: int, read_end: int, ancestors: Tensor | None) -> Tensor | None:
    """Boolean [R, T]: which of the slots [0, read_end) each row may see."""
    num_rows = positions.shape[0]
    if rule.is_causal and ancestors is None and read_end == first + num_rows and (num_rows == 1 or first == 0):
        return None
    slots = torch.arange(read_end, device=positions.device)
    zero = torch.zeros((), dtype=torch.long, device=positions.device)
    if ancestors is None:
        return rule.allows(zero, zero, positions[:, None], slots[None, :])
    slots[first : first + num_rows] = positions
    visible = (torch.arange(read_end, device=positions.device) < first).repeat(num_rows, 1)
    visible[:, first : first + num_rows] = ancestors.to(positions.device)
    return visible & rule.allows(zero, zero, positions[:, None], slots[None, :])


def padded_row_mask(rule: MaskRule, positions: Tensor, pads: Tensor, read_end: int) -> Tensor:
    """Boolean [B, R, T] for rows at ``positions`` [B, R] of sequences that begin at slots ``pads`` [B]."""
    slots = torch.arange(read_end, device=positions.device) - pads[:, None]  # [B, T], as positions
    zero = torch.zeros((), dtype=torch.long, device=positions.device)
    return rule.allows(zero, zero, positions[:, :, None], slots[:, None, :]) & (slots >= 0)[:, None]
