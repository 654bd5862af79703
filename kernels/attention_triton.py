"""Attention of a few query rows over a static cache, for decoding, drafting, chain and tree verification alike.

    out[r, h] = sum_s softmax_s(cap(q[h, r] . k[g, s] * scale)) v[g, s]  over the slots s that row r sees,  g = h // G

Split-KV ("flash decoding"): the G query heads of a key/value head and the R rows are packed as the M = G R rows of one
matrix product, so that K and V are read once; splits of the slots run side by side, and a second kernel joins them by
their log-sums. Tiles that lie wholly in the prefix need no mask; the one or two behind them hold the prefix's rest and
the pass's own rows, whose visibility is one word of 64 bits a row. Scores and masks are never written to memory, slots
that were never written are never read.

Tiles lie at fixed positions, whatever the padding, and a tile of which a row sees nothing does not change a bit of it.
In exact mode splits do too, and the launch goes by the widest pass of the text: then a row's result depends neither on
its neighbours nor on how many there are.

Shapes: B sequences, H query heads, Hkv key/value heads, G = H / Hkv, R <= 64 rows, S slots, D head width.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .row_view import MAX_ROWS, RowView
from .splits import fixed_split_slots, num_splits

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
LOG2E = tl.constexpr(math.log2(math.e))
FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Config:
    """How a shape is launched, and how many blocks should fit on a processor at once."""

    block_n: int  # slots of a tile
    num_warps: int
    num_stages: int
    blocks: int


# by (width of a head, packed rows), both rounded up to what the table has; chosen by what they compile to (kernels/aot)
SMALL_MEMORY = {
    (64, 16): Config(64, 4, 2, 2), (64, 32): Config(64, 4, 2, 2), (64, 64): Config(64, 4, 2, 2),
    (64, 128): Config(64, 8, 2, 1), (128, 16): Config(64, 4, 2, 1), (128, 32): Config(64, 4, 2, 1),
    (128, 64): Config(64, 4, 2, 1), (128, 128): Config(32, 8, 2, 1), (256, 16): Config(32, 4, 2, 1),
    (256, 32): Config(32, 4, 2, 1), (256, 64): Config(32, 8, 2, 1),
}  # fmt: skip
LARGE_MEMORY = {
    (64, 16): Config(64, 4, 3, 2), (64, 32): Config(64, 4, 3, 2), (64, 64): Config(64, 4, 3, 2),
    (64, 128): Config(64, 8, 3, 1), (128, 16): Config(64, 4, 3, 2), (128, 32): Config(64, 4, 3, 2),
    (128, 64): Config(64, 4, 3, 2), (128, 128): Config(64, 8, 3, 1), (256, 16): Config(32, 4, 3, 2),
    (256, 32): Config(32, 4, 3, 2), (256, 64): Config(32, 8, 3, 1),
}  # fmt: skip
JOIN = Config(16, 4, 2, 4)  # of the second kernel, whose tile is so many splits
# sm_80 has less shared memory and keeps the operands of products in registers: with a third stage, or whole tiles, some
# shapes spill or leave room for one block alone
SM_80 = {(128, 64): Config(64, 4, 2, 2), (128, 128): Config(32, 8, 3, 1), (256, 32): Config(32, 4, 2, 2)}
CONFIGS = {
    "sm_80": LARGE_MEMORY | SM_80, "sm_90": LARGE_MEMORY, "sm_100": LARGE_MEMORY, "gfx942": SMALL_MEMORY,
}  # fmt: skip


def config_for(arch: str, head_dim: int, lines: int, kv_bytes: int = 2) -> tuple[int, Config]:
    """Packed rows of a block, and how it is launched, for ``lines`` rows over heads of ``head_dim``."""
    width = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    block_m = next((m for m in (16, 32, 64) if lines <= m), 128 if width <= 128 else 64)
    if kv_bytes == 4:  # float32 has no matrix instructions, and wider tiles spill
        return 16, Config(16, 8, 2, 1)
    config = CONFIGS[arch][width, block_m]
    return block_m, replace(config, num_warps=8) if kv_bytes == 1 and block_m == 16 else config  # four spill


@triton.jit
def _tanh(x):
    # near zero the quotient would lose what the polynomial keeps
    square = x * x
    inner = -17.0 / 315.0 + square * (62.0 / 2835.0 - square * (1382.0 / 155925.0))
    series = x + x * square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * inner))
    return tl.where(tl.abs(x) < 0.3, series, 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E))))


@triton.jit
def _load(pointers, is_slot, is_d, like, IS_TAIL: tl.constexpr, IS_NARROW: tl.constexpr):
    """A tile [N, D] in the dtype of ``like``; zeros behind the written slots and behind the head's own width."""
    if IS_TAIL:
        tile = tl.load(pointers, mask=is_slot[:, None] & is_d[None, :], other=0.0)
    elif IS_NARROW:
        tile = tl.load(pointers, mask=is_d[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile.to(like.dtype)


@triton.jit
def _sees(slots, prefix, num_rows, word, position, positions, WINDOW: tl.constexpr, IS_TAIL: tl.constexpr):
    """Boolean [M, N]: which slots of a tile each packed row sees."""
    place = slots
    sees = slots[None, :] >= 0
    if IS_TAIL:
        row = slots - prefix
        is_own = (row >= 0) & (row < num_rows)
        bit = tl.where(is_own, row, 0)
        is_ancestor = ((word[:, None] >> bit[None, :].to(tl.int64)) & 1) != 0
        sees = (slots < prefix)[None, :] | (is_own[None, :] & is_ancestor)
        if WINDOW > 0:
            place = tl.where(is_own, tl.load(positions + bit, mask=is_own, other=0).to(tl.int32), slots)
    if WINDOW > 0:
        sees = sees & (place[None, :] > position[:, None] - WINDOW)
    return sees


@triton.jit
def _step(
    tile, keys, values, key_offsets, value_offsets, key_step, value_step, positions, query, word, position, is_d,
    prefix, num_rows, factor, inner, top, total, acc,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, IS_TAIL: tl.constexpr, IS_NARROW: tl.constexpr,
):  # fmt: skip
    """Take one tile in: ``top`` [M] is the largest product so far, ``total`` [M] and ``acc`` [M, D] are relative to it.

    The same operations with and without a mask: a tile that moves from the tail into the prefix gives the same bits.
    """
    slots = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_written = slots < prefix + num_rows
    key = _load(keys + tile * key_step + key_offsets, is_written, is_d, query, IS_TAIL, IS_NARROW)
    products = tl.dot(query, tl.trans(key), input_precision="ieee")  # [M, N]
    if HAS_CAP:
        products = _tanh(products * inner)
    if IS_TAIL or WINDOW > 0:
        sees = _sees(slots, prefix, num_rows, word, position, positions, WINDOW, IS_TAIL)
        products = tl.where(sees, products, float("-inf"))
    peak = tl.maximum(top, tl.max(products, 1))
    safe = tl.where(peak == float("-inf"), 0.0, peak)  # a row that saw nothing yet: no inf - inf
    weights = tl.exp2(tl.fma(products, factor, (safe * -factor)[:, None]))
    decay = tl.exp2((top - safe) * factor)  # 1 to the bit where a tile is masked; a fused product would not be
    value = _load(values + tile * value_step + value_offsets, is_written, is_d, query, IS_TAIL, IS_NARROW)
    acc = tl.dot(weights.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return peak, tl.fma(total, decay, tl.sum(weights, 1)), acc


@triton.jit
def _split_kernel(
    q, keys, values, lengths, pads, words, positions, partial, sums,
    q_b, q_h, q_r, k_b, k_h, k_s, v_b, v_h, v_s, view_b, kv_heads, num_rows, factor, inner,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_TILES: tl.constexpr, WINDOW: tl.constexpr, HAS_PADS: tl.constexpr, HAS_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Attention over one split's slots: ``partial`` [B Hkv, splits, G R, D], ``sums`` [B Hkv, splits, G R] (log2)."""
    split, pair = tl.program_id(1), tl.program_id(2)
    b, g = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    view = b * view_b
    prefix = tl.load(lengths + view).to(tl.int32)  # slots in front of the pass's own rows
    keys += b * k_b + g * k_h
    values += b * v_b + g * v_h
    words += view * num_rows
    positions += view * num_rows
    if HAS_PADS:  # from here on slots count from the sequence's start
        pad = tl.load(pads + view).to(tl.int64)
        prefix -= pad.to(tl.int32)
        keys += pad * k_s
        values += pad * v_s

    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # packed: head of the group * R + row
    is_row = m < GROUP * num_rows
    row, head = m % num_rows, g * GROUP + m // num_rows
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    is_d = d < HEAD_DIM
    query = tl.load(
        q + b * q_b + head[:, None] * q_h + row[:, None].to(tl.int64) * q_r + d[None, :],
        mask=is_row[:, None] & is_d[None, :], other=0.0,
    )  # fmt: skip
    if UPCAST:
        query = query.to(tl.float32)
    word = tl.load(words + row, mask=is_row, other=0)
    position = tl.load(positions + row, mask=is_row, other=0).to(tl.int32)

    begin = 0
    if WINDOW > 0:  # what lies in front no row sees
        begin = tl.maximum(prefix - WINDOW + 1, 0) // BLOCK_N
    num_tiles = tl.cdiv(prefix + num_rows, BLOCK_N)
    if SPLIT_TILES > 0:
        first = tl.maximum(split * SPLIT_TILES, begin)
        last = tl.minimum((split + 1) * SPLIT_TILES, num_tiles)
    else:
        share = tl.cdiv(num_tiles - begin, tl.num_programs(1))
        first = begin + split * share
        last = tl.minimum(first + share, num_tiles)
    whole = tl.minimum(tl.maximum(prefix // BLOCK_N, first), last)  # tiles in front of it are the prefix's alone

    key_offsets, value_offsets = n[:, None] * k_s + d[None, :], n[:, None] * v_s + d[None, :]
    key_step, value_step = tl.full([], BLOCK_N, tl.int64) * k_s, tl.full([], BLOCK_N, tl.int64) * v_s
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in tl.range(first, whole):
        top, total, acc = _step(
            tile, keys, values, key_offsets, value_offsets, key_step, value_step, positions, query, word, position,
            is_d, prefix, num_rows, factor, inner, top, total, acc,
            BLOCK_N, WINDOW, HAS_CAP, False, HEAD_DIM < BLOCK_D,
        )  # fmt: skip
    for tile in tl.range(whole, last, num_stages=1):
        top, total, acc = _step(
            tile, keys, values, key_offsets, value_offsets, key_step, value_step, positions, query, word, position,
            is_d, prefix, num_rows, factor, inner, top, total, acc,
            BLOCK_N, WINDOW, HAS_CAP, True, HEAD_DIM < BLOCK_D,
        )  # fmt: skip

    saw = total > 0
    safe = tl.where(saw, total, 1.0)
    line = (pair.to(tl.int64) * tl.num_programs(1) + split) * GROUP * num_rows + m
    tl.store(sums + line, top * factor + tl.log2(safe), mask=is_row)  # -inf where the row saw nothing
    tl.store(
        partial + line[:, None] * HEAD_DIM + d[None, :], acc / safe[:, None],
        mask=(is_row & saw)[:, None] & is_d[None, :],
    )  # fmt: skip


@triton.jit
def _join_kernel(
    partial, sums, sinks, out, num_splits, num_rows, kv_heads, out_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """``out`` [B, R, H, D]: the splits of one row, weighted by their sums. Empty splits change no bit."""
    m, pair = tl.program_id(0), tl.program_id(1)
    lines = GROUP * num_rows
    b, head, row = (pair // kv_heads).to(tl.int64), pair % kv_heads * GROUP + m // num_rows, m % num_rows
    n, d = tl.arange(0, CHUNK), tl.arange(0, BLOCK_D)
    is_d = d < HEAD_DIM
    first_line = pair.to(tl.int64) * num_splits * lines + m
    top = tl.max(tl.full([CHUNK], float("-inf"), tl.float32), 0)
    for first in tl.range(0, num_splits, CHUNK):
        here = sums + first_line + (first + n) * lines
        top = tl.maximum(top, tl.max(tl.load(here, mask=first + n < num_splits, other=float("-inf")), 0))
    total = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in tl.range(0, num_splits, CHUNK):
        line = first_line + (first + n) * lines
        held = tl.load(sums + line, mask=first + n < num_splits, other=float("-inf"))
        weights = tl.exp2(held - anchor)
        is_part = (held > float("-inf"))[:, None] & is_d[None, :]  # nobody wrote the others
        part = tl.load(partial + line[:, None] * HEAD_DIM + d[None, :], mask=is_part, other=0.0)
        total += tl.sum(weights, 0)
        acc += tl.sum(weights[:, None] * part, 0)
    at = ((b * num_rows + row) * (kv_heads * GROUP) + head) * HEAD_DIM + d
    total = tl.where(total > 0, total, 1.0)  # a row of padding sees nothing: zeros
    tl.store(out + at, (acc / total * out_scale).to(out.dtype.element_ty), mask=is_d)


def problem(q: Tensor, keys: Tensor, values: Tensor) -> str | None:
    """What keeps `attention_over_cache` from taking these, None if nothing does."""
    (_, heads, rows, width), kv_heads = q.shape, keys.shape[1]
    if q.device.type == "cpu" and not IS_INTERPRETED:
        return "a CPU needs TRITON_INTERPRET=1"
    if q.dtype not in DTYPES or keys.dtype != values.dtype or keys.dtype not in (q.dtype, FP8):
        return f"dtypes {q.dtype}, {keys.dtype}, {values.dtype}"
    if keys.dtype == FP8 and arch_of(q.device) == "sm_80":
        return "e4m3 keys on sm_80"
    if keys.shape != values.shape or keys.shape[::3] != q.shape[::3] or heads % kv_heads or not 1 <= width <= 256:
        return f"shapes {list(q.shape)}, {list(keys.shape)}, {list(values.shape)}"
    if q.is_cuda and keys.dtype == torch.float32 and width > 128:
        return f"float32 heads of {width}"
    if rows > MAX_ROWS:
        return f"{rows} rows, more than {MAX_ROWS}"
    if any(t.stride(-1) != 1 for t in (q, keys, values)):
        return "rows that do not lie side by side"
    return None


@functools.cache
def arch_of(device: torch.device) -> str:
    """The entry of CONFIGS for a device; what is not in it gets the one with the least shared memory."""
    if device.type != "cuda":
        return "sm_90"
    capability = (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)
    return {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}.get(capability, "gfx942")


def constants(
    head_dim: int, group: int, block_m: int, block_n: int, is_exact: bool, slots: int, window: int, has_pads: bool,
    has_cap: bool,
) -> dict[str, Any]:  # fmt: skip
    """What the first kernel is compiled for."""
    return {
        "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim)), "BLOCK_M": block_m,
        "BLOCK_N": block_n, "SPLIT_TILES": fixed_split_slots(slots) // block_n if is_exact else 0, "WINDOW": window,
        "HAS_PADS": has_pads, "HAS_CAP": has_cap,
    }  # fmt: skip


def attention_over_cache(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    view: RowView,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """See `attention_reference.attention_over_cache`. Raises ValueError for what `problem` names."""
    reason = problem(q, keys, values)
    if reason is not None or scale <= 0:
        raise ValueError(f"attention_over_cache does not take {reason or f'a scale of {scale}'}")
    (batch, heads, rows, width), (kv_heads, slots) = q.shape, keys.shape[1:3]
    if view.words.shape[1] != rows or len(view.lengths) not in (1, batch):
        raise ValueError(f"a view of {list(view.words.shape)} rows for {batch} sequences of {rows}")
    group, is_exact, upcast = heads // kv_heads, view.width is not None, IS_INTERPRETED and q.dtype == torch.bfloat16
    block_m, config = config_for(arch_of(q.device), width, group * (view.width or rows), keys.element_size())
    fixed = constants(width, group, block_m, config.block_n, is_exact, slots, view.window, view.pads is not None,
                      softcap is not None)  # fmt: skip
    lines, pairs = group * rows, batch * kv_heads
    splits = num_splits(slots, kv_heads, batch, 4 * pairs * lines * width)
    if is_exact:
        splits = triton.cdiv(slots, fixed_split_slots(slots))
    partial = torch.empty(pairs, splits, lines, width, dtype=torch.float32, device=q.device)
    sums = torch.empty(pairs, splits, lines, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, rows, heads, width, dtype=torch.float32 if upcast else q.dtype, device=q.device)
    scale *= kv_scales[0]
    factor, inner = (scale, 1.0) if softcap is None else (softcap, scale / softcap)
    words, positions = view.words.contiguous(), view.positions.contiguous()
    with torch.cuda.device_of(q):
        _split_kernel[triton.cdiv(lines, block_m), splits, pairs](
            q, keys, values, view.lengths, view.lengths if view.pads is None else view.pads, words, positions,
            partial, sums, *q.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
            int(len(view.lengths) > 1), kv_heads, rows, factor * LOG2E.value, inner, **fixed, UPCAST=upcast,
            num_warps=config.num_warps, num_stages=config.num_stages,
            enable_fp_fusion=not is_exact,  # both loops must round alike
        )  # fmt: skip
        _join_kernel[lines, pairs](
            partial, sums, partial if sinks is None else sinks, out, splits, rows, kv_heads, kv_scales[1],
            GROUP=group, HEAD_DIM=width, BLOCK_D=fixed["BLOCK_D"], CHUNK=JOIN.block_n,
            HAS_SINKS=sinks is not None, num_warps=JOIN.num_warps, num_stages=JOIN.num_stages,
        )  # fmt: skip
    return out.to(q.dtype)
