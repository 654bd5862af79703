"""Attention of a row or two a sequence over many sequences' caches on a CPU: `attention_reference` in one call.

A batched matrix product of three rows (the query heads of a group) by each of hundreds of caches runs at a fraction of
the memory's speed. Here every key and value is read once, by the loops of `cpu_dot`, and what a whole group may not see
at its start, its sequence's padding, is not read at all.

Shapes: B sequences, H query heads, G key/value heads, R rows, T slots, W head width; a line is a row of one query head.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from . import cpu_math as cm
from .cpu_dot import BLOCK, LANES, MAX_ROWS, MIXED, WIDE
from .cpu_team import call, compiled, num_threads, thread_number

MAX_LINES = 64  # of a group; with more, matrix products are quicker
# the words of a call: addresses, sizes, strides in elements
(Q, KEYS, VALUES, MASK, MADE, SCORES, SCALE, NUM_SEQUENCES, HEADS, GROUPS, ROWS, SLOTS, WIDTH, KEY_STRIDE, KEY_GROUP,
 VALUE_STRIDE, VALUE_GROUP, IS_WIDE, NUM_THREADS) = range(19)  # fmt: skip


@njit
def _first_seen(mask: int, rows: int, slots: int) -> int:
    """The first slot that any of ``rows`` sees, rounded down to a multiple of 8."""
    sees, begin = cm.octets(mask), slots
    for r in range(rows):
        t = 0
        while t < begin and not sees[r * slots + t]:
            t += 1
        begin = t
    return begin // BLOCK * BLOCK


@njit
def _attend(a: Any, sequence: int, group: int, scores: int) -> None:
    """All lines of one group of one sequence."""
    rows, slots, width, is_wide, heads = a[ROWS], a[SLOTS], a[WIDTH], a[IS_WIDE], a[HEADS]
    per_group, element = heads // a[GROUPS], 4 if is_wide else 2
    lines, mask = per_group * rows, a[MASK] + sequence * rows * slots
    keys = a[KEYS] + element * (sequence * a[KEY_STRIDE] + group * a[KEY_GROUP])
    values = a[VALUES] + element * (sequence * a[VALUE_STRIDE] + group * a[VALUE_GROUP])
    place = 4 * (sequence * heads + group * per_group) * rows * width
    q, made = a[Q] + place, a[MADE] + place
    begin = _first_seen(mask, rows, slots)
    longest = (slots - begin + BLOCK - 1) // BLOCK * BLOCK
    if not longest:  # nothing to see
        out = cm.floats(made)
        for i in range(lines * width):
            out[i] = np.float32(np.nan)
        return
    for t in range(0, longest, BLOCK):
        for line in range(0, lines, MAX_ROWS):
            cm.dots(q + 4 * line * width, keys + element * (begin + t) * width, scores + 4 * (line * longest + t),
                    width, longest, min(lines - line, MAX_ROWS), WIDE if is_wide else MIXED)  # fmt: skip
    s, sees, scale = cm.floats(scores), cm.octets(mask), cm.floats(a[SCALE])[0]
    totals = cm.floats(scores + 4 * lines * longest)
    for line in range(lines):
        seen, at = (line % rows) * slots + begin, line * longest
        for t in range(slots - begin):
            s[at + t] = s[at + t] if sees[seen + t] else np.float32(-np.inf)
        totals[line] = cm.powers(scores + 4 * at, slots - begin, scale)
    cm.weigh(scores, values + element * begin * width, made, slots - begin, longest, width, lines, is_wide)
    for line in range(lines):
        cm.multiply(made + 4 * line * width, np.float32(1) / totals[line], width)


@compiled
def _run_attention(address: int) -> None:
    a = cm.words(address)
    team = a[NUM_THREADS]
    thread = thread_number() if team > 1 else 0
    own = a[SCORES] + 4 * thread * a[HEADS] // a[GROUPS] * a[ROWS] * (a[SLOTS] + BLOCK)
    for unit in range(thread, a[NUM_SEQUENCES] * a[GROUPS], team):
        _attend(a, unit // a[GROUPS], unit % a[GROUPS], own)


def takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether `attention` answers for these: few lines a group, caches with room for blocks of 8 slots."""
    _, heads, rows, width = q.shape
    room = -(-k.shape[2] // BLOCK) * BLOCK * width
    return (
        mask is not None
        and mask.dim() == 3
        and heads // k.shape[1] * rows <= MAX_LINES
        and q.dtype in (torch.float32, torch.bfloat16)
        and k.dtype == v.dtype
        and k.dtype in (torch.float32, torch.bfloat16)
        and width % LANES == 0
        and v.shape[3] == width
        and all(t.stride()[2:] == (width, 1) and t.stride(1) >= room for t in (k, v))
    )


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """See `attention_reference.attention`; ``mask`` is [B, R, T]. A row that sees nothing is NaN."""
    batch, heads, rows, width = q.shape
    groups, slots, threads = k.shape[1], k.shape[2], num_threads()
    dtype, q, mask = q.dtype, q.float().contiguous(), mask.contiguous()
    made = torch.empty(batch, heads, rows, width, dtype=torch.float32)
    scores = torch.empty(threads, heads // groups * rows, slots + BLOCK, dtype=torch.float32)
    scales = np.array([scale], dtype=np.float32)
    record = np.array([
        q.data_ptr(), k.data_ptr(), v.data_ptr(), mask.data_ptr(), made.data_ptr(), scores.data_ptr(),
        scales.ctypes.data, batch, heads, groups, rows, slots, width, k.stride(0), k.stride(1), v.stride(0),
        v.stride(1), k.dtype == torch.float32, threads,
    ], dtype=np.int64)  # fmt: skip
    call(_run_attention, record.ctypes.data, threads)
    return made.transpose(1, 2).to(dtype)
