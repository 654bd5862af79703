"""Residual sum and RMSNorm of a row in registers: see `add_rms_norm_reference` for the formula.

The row is read once and its float32 form never leaves the registers. The sum is bitwise the reference's; so is every
rounding of the norm, but the mean is added up in another order and the root may be an ulp off: the norm is the
reference's to a few float32 ulps, which in half precision is one rounding at a tie.
"""

# mypy: allow-incomplete-defs
import triton
import triton.language as tl
from torch import Tensor

from .add_rms_norm_reference import check
from .checks import require_device

WARPS = {1024: 4, 4096: 8, 16384: 16}  # by the widest block; a thread holds at most 32 numbers


@triton.jit
def norm_row(residual, delta, weight, total, normed, width, eps, IS_OFFSET: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    begin = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    is_inside = column < width
    dtype = total.dtype.element_ty
    x = tl.load(residual + begin + column, mask=is_inside, other=0.0).to(tl.float32)
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
    check(residual, delta, weight)
    require_device(residual=residual, delta=delta, weight=weight)
    width = residual.shape[-1]
    block = triton.next_power_of_2(width)
    num_warps = next((warps for widest, warps in WARPS.items() if block <= widest), None)
    if num_warps is None:
        raise ValueError(f"rows of at most {max(WARPS)} numbers, got {width}")
    residual, delta = residual.contiguous(), delta.contiguous()
    total, normed = residual.new_empty(residual.shape), residual.new_empty(residual.shape)
    norm_row[(residual.numel() // width,)](
        residual, delta, weight.contiguous(), total, normed, width, eps,
        IS_OFFSET=is_offset, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
    return total, normed
