"""Residual sum and RMSNorm of a row in registers: see `add_rms_norm_reference` for the formula.

The row is read once and its float32 form never leaves the registers. The sum is bitwise the reference's; so is every
rounding of the norm, but the mean is added up in another order and the root may be an ulp off: the norm is the
reference's to a few float32 ulps, which in half precision is one rounding at a tie.
"""

# mypy: allow-incomplete-defs
import triton
import triton.language as tl
from torch import Tensor

from .add_rms_norm_reference import MOST_COLUMNS, check
from .checks import require_device

WARPS = {1024: 4, 4096: 8, MOST_COLUMNS: 16}  # by the widest block; a thread holds at most 32 numbers

EXACT = {"enable_fp_fusion": False}  # with a sum to make and without, a row rounds alike


@triton.jit
def norm_row(
    residual, delta, weight, total, normed, width, eps,
    HAS_DELTA: tl.constexpr, IS_OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row."""
    begin = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    is_inside = column < width
    dtype = normed.dtype.element_ty
    x = tl.load(residual + begin + column, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta + begin + column, mask=is_inside, other=0.0).to(tl.float32)
        rounded = x.to(dtype)
        tl.store(total + begin + column, rounded, mask=is_inside)
        x = rounded.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    w = tl.load(weight + column, mask=is_inside, other=0.0).to(tl.float32)
    y = x * (1.0 + w) if IS_OFFSET else x.to(dtype).to(tl.float32) * w
    tl.store(normed + begin + column, y.to(dtype), mask=is_inside)


def add_rms_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, eps: float, is_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """See `add_rms_norm_reference.add_rms_norm`. Raises ValueError for rows that registers cannot hold."""
    return _launch(residual, delta, weight, eps, is_offset)


def rms_norm(total: Tensor, weight: Tensor, eps: float, is_offset: bool = False) -> Tensor:
    """See `add_rms_norm_reference.rms_norm`: the bits that `add_rms_norm` gives of the same sum."""
    return _launch(total, None, weight, eps, is_offset)[1]


def _launch(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, is_offset: bool
) -> tuple[Tensor, Tensor]:
    check(residual, delta, weight)
    require_device(residual=residual, delta=delta, weight=weight)
    width = residual.shape[-1]
    if width > MOST_COLUMNS:
        raise ValueError(f"rows of at most {MOST_COLUMNS} numbers, got {width}")
    block = triton.next_power_of_2(width)
    num_warps = next(warps for widest, warps in WARPS.items() if block <= widest)
    residual, normed = residual.contiguous(), residual.new_empty(residual.shape)
    total = residual if delta is None else residual.new_empty(residual.shape)
    norm_row[(residual.numel() // width,)](
        residual, residual if delta is None else delta.contiguous(), weight.contiguous(), total, normed, width, eps,
        HAS_DELTA=delta is not None, IS_OFFSET=is_offset, BLOCK=block, num_warps=num_warps, **EXACT,
    )  # fmt: skip
    return total, normed
