"""Rotary embedding and cache write in one launch: see `rope_append_reference` for the formula.

A program turns one head of one row. Neither rotated halves nor the keys and values of the pass are materialised: they
go from the projection's output straight to their slots. Sums are not fused with products, so that every rounding is the
modules' own.
"""

# mypy: allow-incomplete-defs
import triton
import triton.language as tl
from torch import Tensor

from .checks import require_device
from .rope_append_reference import check

NUM_WARPS = 1
EXACT = {"enable_fp_fusion": False}


@triton.jit
def turn_head(
    qkv, cos, sin, positions, slots, query_norm, key_norm, queries, keys, values, num_rows, num_queries, num_groups,
    width, rotary_width, eps, key_sequence, key_head, key_slot, value_sequence, value_head, value_slot,
    HAS_NORMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Head `program 1` of row `program 0`: a query, a key or a value."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    sequence = row // num_rows
    column = tl.arange(0, BLOCK)
    is_inside = column < width
    own = qkv + (row * (num_queries + 2 * num_groups) + head) * width
    at = tl.load(positions + row) * rotary_width
    slot = tl.load(slots + row)
    is_kept = column < tl.where(slot >= 0, width, 0)
    if head < num_queries:
        x = _turned(own, cos + at, sin + at, query_norm, column, width, rotary_width, eps, HAS_NORMS)
        place = queries + ((sequence * num_queries + head) * num_rows + row % num_rows) * width
        tl.store(place + column, x, mask=is_inside)
    elif head < num_queries + num_groups:
        x = _turned(own, cos + at, sin + at, key_norm, column, width, rotary_width, eps, HAS_NORMS)
        place = keys + sequence * key_sequence + (head - num_queries) * key_head + slot * key_slot
        tl.store(place + column, x.to(keys.dtype.element_ty), mask=is_kept)
    else:
        x = tl.load(own + column, mask=is_inside, other=0.0)
        group = head - num_queries - num_groups
        place = values + sequence * value_sequence + group * value_head + slot * value_slot
        tl.store(place + column, x.to(values.dtype.element_ty), mask=is_kept)


@triton.jit
def _turned(own, cos, sin, norm, column, width, rotary_width, eps, HAS_NORM: tl.constexpr):
    """One head, rounded as torch rounds: after every product and after the sum."""
    half = rotary_width // 2
    is_inside, is_turned, is_left = column < width, column < rotary_width, column < half
    opposite = tl.where(is_left, column + half, column - half)
    x = tl.load(own + column, mask=is_inside, other=0.0)
    other = tl.load(own + opposite, mask=is_turned, other=0.0)
    if HAS_NORM:
        wide = x.to(tl.float32)
        root = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
        scaled = (wide * root).to(x.dtype).to(tl.float32)
        x = (scaled * tl.load(norm + column, mask=is_inside, other=0.0).to(tl.float32)).to(x.dtype)
        scaled = (other.to(tl.float32) * root).to(x.dtype).to(tl.float32)
        other = (scaled * tl.load(norm + opposite, mask=is_turned, other=0.0).to(tl.float32)).to(x.dtype)
    along = x.to(tl.float32) * tl.load(cos + column, mask=is_turned, other=0.0).to(tl.float32)
    across = tl.where(is_left, -other.to(tl.float32), other.to(tl.float32))
    across *= tl.load(sin + column, mask=is_turned, other=0.0).to(tl.float32)
    whole = along.to(x.dtype).to(tl.float32) + across.to(x.dtype).to(tl.float32)
    return tl.where(is_turned, whole.to(x.dtype), x)


def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """See `rope_append_reference.rope_append`."""
    num_queries = check(qkv, cos, sin, positions, keys, values, slots, norms)
    query_norm, key_norm = norms or (qkv, qkv)
    require_device(
        qkv=qkv, cos=cos, sin=sin, positions=positions, keys=keys, values=values, slots=slots,
        query_norm=query_norm, key_norm=key_norm,
    )  # fmt: skip
    if keys.stride(3) != 1 or values.stride(3) != 1:
        raise ValueError(f"cache rows must lie in one piece, strides are {keys.stride()} and {values.stride()}")
    (batch, rows, _), (groups, width) = qkv.shape, (keys.shape[1], keys.shape[3])
    queries = qkv.new_empty(batch, num_queries, rows, width)
    turn_head[(batch * rows, num_queries + 2 * groups)](
        qkv.contiguous(), cos.contiguous(), sin.contiguous(), positions.contiguous(), slots.contiguous(),
        query_norm.contiguous(), key_norm.contiguous(), queries, keys, values, rows, num_queries, groups, width,
        cos.shape[1], eps, *keys.stride()[:3], *values.stride()[:3],
        HAS_NORMS=norms is not None, BLOCK=triton.next_power_of_2(width), num_warps=NUM_WARPS, **EXACT,
    )  # fmt: skip
    return queries
