"""What the rows of a pass may see of a cache, as a few numbers a row: what kernels take instead of a mask.

Shapes: B sequences, R <= 64 rows of a pass, S slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_ROWS = 64  # bits of a word


@dataclass(frozen=True, eq=False)
class RowView:
    """Row r sees the slots in front of the pass that are no padding, and of the pass's own rows its ancestors.

    The pass's rows lie in the slots behind the first ``lengths`` [B], which count padding; bit j of ``words`` [B, R]
    (int64) is set where row j is an ancestor of row r, or r itself. ``positions`` [B, R] count no padding and are at
    least ``lengths - pads``; behind ``window`` positions (0: no limit), its own included, a row sees nothing. Where B
    is 1 here, all sequences of the pass look alike.

    ``width`` is exact mode: as many rows as any pass of this text has at most. A row's bits then depend neither on how
    many rows there are nor on what they hold.
    """

    lengths: Tensor  # [B]
    words: Tensor  # [B, R]
    positions: Tensor  # [B, R]
    window: int = 0
    pads: Tensor | None = None  # [B], slots
    width: int | None = None

    def __post_init__(self) -> None:
        shape = (len(self.lengths), self.words.shape[-1])
        shapes = [tuple(t.shape) for t in (self.words, self.positions)]
        if shapes != [shape, shape] or (self.pads is not None and self.pads.shape != self.lengths.shape):
            raise ValueError(f"words and positions need shape {shape}, pads as many as lengths, got {shapes}")
        if shape[1] > (self.width or MAX_ROWS) or (self.width or 0) > MAX_ROWS:
            raise ValueError(f"a pass has at most {self.width or MAX_ROWS} rows, {MAX_ROWS} in all, got {shape[1]}")

    def mask(self, num_slots: int) -> Tensor:
        """Boolean [B, R, S]: which of the first ``num_slots`` slots each row sees."""
        num_rows = self.words.shape[1]
        slots = torch.arange(num_slots, device=self.words.device)
        own = slots - self.lengths[:, None]  # [B, S], as rows of the pass
        row = own.clamp(0, num_rows - 1)
        is_ancestor = ((self.words[:, :, None] >> row[:, None]) & 1).bool()  # [B, R, S]
        is_own = ((own >= 0) & (own < num_rows))[:, None]
        first = torch.zeros_like(self.lengths) if self.pads is None else self.pads
        sees = torch.where(is_own, is_ancestor, (own < 0)[:, None]) & (slots >= first[:, None])[:, None]
        if self.window:
            position = torch.where(own < 0, slots - first[:, None], self.positions.gather(1, row))  # [B, S]
            sees &= position[:, None] > self.positions[:, :, None] - self.window
        return sees


def words_of(ancestors: Tensor) -> Tensor:
    """Words [R] of who is whose ancestor, boolean [R, R]."""
    bits = torch.arange(ancestors.shape[1], device=ancestors.device)
    return (ancestors.long() << bits).sum(-1)  # bit 63 is the sign
