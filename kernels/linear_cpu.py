"""Linear maps of a few rows on a CPU, over a copy of the weight in a layout made for them.

    y = x W' + b

Decoding reads the whole of W for a handful of rows, so a product of few rows should cost hardly more than one row's.
torch's general products do not do that: in float32 two rows cost two passes over W, and bfloat16 costs a pass a row
where the machine has no instructions for it. Two copies do better:

* float32: oneDNN's blocked layout, for 2 to 16 rows;
* bfloat16 on x86 without bfloat16 instructions: FBGEMM's half-precision layout, for any number of rows. The weight,
  times a power of two where needed, is kept in float16 if that holds every bit of it; products and sums are float32.

The copy doubles the memory of the weights; none is made where memory is short.

Shapes: R rows, I inputs, O outputs.
"""

import functools
import math
import platform
from collections.abc import Callable

import psutil
import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor | None], Tensor]
"""From x [..., R, I] and bias [O], or None, to y [..., R, O]; what `pack` makes of a weight."""

FEW_ROWS = range(2, 17)  # of the blocked float32 layout
TYPICAL_ROWS = 4  # what that layout is made for
HAS_BLOCKED = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
HALF_TILE = 6  # rows of FBGEMM's largest tile on AVX2
FREE_SHARE = 1 / 8  # of the machine's memory that copies leave free
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


@functools.cache
def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 natively (AVX512-BF16, AMX, Arm BF16); emulation does not count."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return not IS_X86 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@functools.cache
def has_half() -> bool:
    """Whether bfloat16 products gain from the half-precision copy on this machine."""
    is_fbgemm = torch.backends.quantized.engine in ("x86", "fbgemm")
    return IS_X86 and is_fbgemm and hasattr(torch.ops.quantized, "linear_dynamic_fp16") and not has_bfloat16()


def profits_from_packing(x: Tensor, weight: Tensor) -> bool:
    """Whether rows ``x`` [..., R, I] are worth a copy of ``weight`` on this machine."""
    if x.device.type != "cpu" or x.dtype != weight.dtype or torch.is_grad_enabled():
        return False
    if x.dtype == torch.bfloat16:
        return has_half()
    return x.dtype == torch.float32 and HAS_BLOCKED and x.numel() // x.shape[-1] in FEW_ROWS


def pack(weight: Tensor) -> Product | None:
    """The product with ``weight`` [O, I] over a copy of it; None where it cannot be had."""
    memory = psutil.virtual_memory()
    if memory.available - weight.nbytes < memory.total * FREE_SHARE:
        return None
    return _half(weight.detach()) if weight.dtype == torch.bfloat16 else _blocked(weight.detach())


def _blocked(weight: Tensor) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    return product


def _half(weight: Tensor) -> Product | None:
    wide, scale = weight.float(), 1.0
    if not _fits_half(wide):
        largest = float(wide.abs().max())
        scale = 2.0 ** (14 - math.frexp(largest)[1]) if math.isfinite(largest) else 1.0  # largest to [2^13, 2^14)
        wide = wide * scale
        if not _fits_half(wide):
            return None
    packed = torch.ops.quantized.linear_prepack_fp16(wide, None)
    multiply = torch.ops.quantized.linear_dynamic_fp16.default

    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        rows, count = x.float(), x.numel() // x.shape[-1]
        if count > HALF_TILE and count % HALF_TILE in (1, 2):
            # FBGEMM sums a tile of one or two rows in another order: no tile may be left with so few of many rows,
            # or a row's value would depend on its index
            rows = rows.reshape(count, -1)
            y = multiply(torch.nn.functional.pad(rows, (0, 0, 0, 3 - count % HALF_TILE)), packed)[:count]
            y = y.view(*x.shape[:-1], -1)
        else:
            y = multiply(rows, packed)
        if scale != 1.0:
            y = y.mul_(1 / scale)
        if bias is not None:
            y = y.add_(bias)
        return y.to(x.dtype)

    return product


def _fits_half(wide: Tensor) -> bool:
    half = wide.half()
    return bool(half.isfinite().all()) and torch.equal(half.float(), wide)
