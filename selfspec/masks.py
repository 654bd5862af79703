"""Who sees whom: a family's own rule, evaluated for the rows of a pass, in chains and in trees.

Shapes: B sequences, R rows of a pass, T slots.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from selfspec.kernels.row_view import RowView, words_of


@dataclass(frozen=True, eq=False)
class MaskRule:
    """A family's rule of who sees whom (causal, sliding window, chunks), kept as the function it came as."""

    allows: Callable[..., Tensor]

    @property
    def is_causal(self) -> bool:
        return self.allows is causal_mask_function


@dataclass(frozen=True, eq=False)
class Tree:
    """How the rows of a pass hang together, for passes that cannot ask the host."""

    parents: Tensor  # [R], rows
    depths: Tensor  # [R]
    ancestors: Tensor  # [R, R]

    @classmethod
    def of(cls, parents: Sequence[int], device: torch.device) -> "Tree":
        """Of rows that hang on ``parents``, as `row_depths` reads them."""
        depths, ancestors = tree_shape(tuple(parents), len(parents))
        assert ancestors is not None
        return cls(torch.tensor(parents, device=device), torch.tensor(depths, device=device), ancestors.to(device))


@functools.lru_cache(maxsize=64)
def sliding_window(rule: MaskRule, size: int) -> int | None:
    """Positions that a row among ``size`` sees, its own the last of them: 0 for all, None if that is not the rule.

    Found out by asking: of most rules only the function is known.
    """
    if rule.is_causal:
        return 0
    slots, zero = torch.arange(size), torch.zeros((), dtype=torch.long)
    seen = int(rule.allows(zero, zero, slots[-1], slots).sum())
    edges = torch.tensor([seen - 2, seen - 1, seen, seen + 1, size - 2]).clamp(0, size - 1)
    rows = torch.cat([torch.linspace(0, size - 1, 64).long(), edges])[:, None]
    expected = (slots <= rows) & (slots > rows - seen)
    if not torch.equal(rule.allows(zero, zero, rows, slots[None]).expand_as(expected), expected):
        return None
    return 0 if seen == size else seen


def row_depths(parents: Sequence[int]) -> list[int]:
    """How far each row lies behind its root; a row whose parent is -1 is a root, as row 0 is."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


@functools.lru_cache(maxsize=1024)
def tree_shape(parents: tuple[int, ...] | None, num_rows: int) -> tuple[list[int], Tensor | None]:
    """Depth of each row, and who is whose ancestor [R, R] (None for a chain); both are to be read only."""
    if parents is None:
        return list(range(num_rows)), None
    depths, ancestors = row_depths(parents), torch.eye(num_rows, dtype=torch.bool)
    for row, parent in enumerate(parents[1:], start=1):
        ancestors[row] |= ancestors[parent] & (parent >= 0)
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


def row_view(
    window: int, positions: Tensor, first: int | Tensor, ancestors: Tensor | None, pads: Tensor | None,
    width: int | None,
) -> RowView:  # fmt: skip
    """What `row_mask` and `padded_row_mask` say, of rows at ``positions`` [R] or [B, R] in slots from ``first`` on,
    which may be a tensor [1] on the device.
    """
    positions = positions if positions.dim() == 2 else positions[None]
    num_sequences, num_rows = positions.shape
    if ancestors is None:
        ancestors = torch.ones(num_rows, num_rows, dtype=torch.bool, device=positions.device).tril()
    words = words_of(ancestors).to(positions.device).repeat(num_sequences, 1)
    if not isinstance(first, Tensor):
        first = torch.full((num_sequences,), first, device=positions.device)
    return RowView(first.expand(num_sequences), words, positions, window, pads, width)
