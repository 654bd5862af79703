"""Attention in pairs of bfloat16, as LLVM vector code: an instruction makes two products a lane (see `cpu_dot`).

    turn_keys:     room[c, i] = the pair (2 c, 2 c + 1) of key t + i,                 c = 0 .. W / 2 - 1,  i = 0 .. 15
    score_block:   y[line, i] = sum_c q[line, c] . room[c, i], in this order,         line = 0 .. L - 1,   i = 0 .. 31
    sum_pairs:     y[line, i] = sum_t p[line, t] v[t, i], slots 2 m and 2 m + 1 together,                  i = 0 .. 63
    add_pair:      y[i] += p[0] v[i] + p[1] w[i]

A score is a sum in one lane: nothing has to be folded, which for keys of 64 numbers costs more than their products.
Keys are turned once for all lines. Weights p are rounded to bfloat16, as attention in half precision has them anywhere;
their sum is not. A line's slots make the same pairs whichever of them a pass has written itself, so that its bits are
the same. Only where a CPU has the instructions (`HAS_PAIRS`).
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from .cpu_dot import (
    F32,
    HAS_PAIRS,
    I16,
    I32,
    I64,
    LANES,
    MAX_LINES,
    PAIRED,
    PAIRED_BITS,
    SUMS,
    WORDS,
    add_pairs,
    pick,
    prefetch,
)
from .cpu_math import floats, octets, shorts, stay_apart

MAX_SCORED = 8  # lines at once
AHEAD = 2048  # pairs of the keys that are asked for in advance
BLOCKS = 2  # of sixteen keys at once
SLOTS = BLOCKS * LANES
COLUMNS = 64  # of values at once


@intrinsic
def turn_keys(typing_context: Any, keys: Any, first: Any, last: Any, width: Any, room: Any) -> Any:
    """Keys ``first`` .. ``first`` + 15 of the address ``keys`` (bfloat16 [T, W]); behind ``last`` that one again."""
    del typing_context, keys, first, last, width, room

    def codegen(context: Any, b: ir.IRBuilder, _: Any, args: Any) -> Any:
        keys, first, last, width, room = args
        keys, room = (b.inttoptr(place, I32.as_pointer()) for place in (keys, room))
        half = b.lshr(width, I64(1))
        rows = []
        for i in range(LANES):
            slot = b.add(first, I64(i))
            slot = b.select(b.icmp_signed("<", slot, last), slot, last)
            rows.append(b.gep(keys, [b.mul(slot, half)]))
        before, loop, done = b.block, b.append_basic_block("c"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        c = b.phi(I64)
        c.add_incoming(I64(0), before)
        held = [b.load(b.bitcast(b.gep(row, [c]), WORDS.as_pointer()), align=2) for row in rows]
        for row in rows:
            prefetch(b, b.gep(row, [b.add(c, I64(AHEAD))]))
        for step in (1, 2, 4, 8):  # squares of step x step words change places across the diagonal
            for i in (i for i in range(LANES) if not i & step):
                one, other = held[i], held[i + step]
                lanes = range(LANES)
                held[i] = pick(b, one, other, [LANES + lane - step if lane & step else lane for lane in lanes])
                held[i + step] = pick(b, one, other, [LANES + lane if lane & step else lane + step for lane in lanes])
        for i, turned in enumerate(held):
            place = b.gep(room, [b.mul(b.add(c, I64(i)), I64(LANES))])
            b.store(turned, b.bitcast(place, WORDS.as_pointer()), align=4)
        after = b.add(c, I64(LANES))
        c.add_incoming(after, loop)
        b.cbranch(b.icmp_unsigned("<", after, half), loop, done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def score_block(typing_context: Any, q: Any, room: Any, y: Any, width: Any, stride: Any, num_lines: Any) -> Any:
    """y[line * stride + i] for the addresses q (bfloat16 [L, W]), ``room`` [2, W / 2, 16] and y; L is a literal."""
    del typing_context, q, room, y, width, stride
    if not isinstance(num_lines, types.IntegerLiteral):
        return None
    lines = num_lines.literal_value

    def codegen(context: Any, b: ir.IRBuilder, _: Any, args: Any) -> Any:
        q, room, y, width, stride = args[:5]
        room = b.inttoptr(room, I32.as_pointer())
        y, half = b.inttoptr(y, F32.as_pointer()), b.lshr(width, I64(1))
        before, loop, done = b.block, b.append_basic_block("c"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        c = b.phi(I64)
        c.add_incoming(I64(0), before)
        sums = [[b.phi(SUMS) for _ in range(BLOCKS)] for _ in range(lines)]
        begins = [b.gep(room, [b.mul(b.add(c, b.mul(half, I64(i))), I64(LANES))]) for i in range(BLOCKS)]
        turned = [b.bitcast(b.load(b.bitcast(place, WORDS.as_pointer()), align=4), PAIRED) for place in begins]
        for line, row in enumerate(sums):
            spread = _spread(b, b.add(q, b.mul(b.add(c, b.mul(half, I64(line))), I64(4))))
            for held, pairs in zip(row, turned, strict=True):
                held.add_incoming(ir.Constant(SUMS, [0.0] * LANES), before)
                held.add_incoming(add_pairs(b, pairs, spread, held), loop)
        after = b.add(c, I64(1))
        c.add_incoming(after, loop)
        b.cbranch(b.icmp_unsigned("<", after, half), loop, done)
        b.position_at_end(done)
        for line, row in enumerate(sums):
            for i, held in enumerate(row):
                place = b.gep(y, [b.add(b.mul(stride, I64(line)), I64(LANES * i))])
                b.store(held.incomings[1][0], b.bitcast(place, SUMS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, num_lines), codegen


@intrinsic
def shorten(typing_context: Any, values: Any, count: Any) -> Any:
    """``count`` float32 values, rounded up to 32 of them, become bfloat16 from the same address on."""
    del typing_context, values, count

    def codegen(context: Any, b: ir.IRBuilder, _: Any, args: Any) -> Any:
        wide, short = (b.inttoptr(args[0], kind.as_pointer()) for kind in (F32, I16))
        before, loop, done = b.block, b.append_basic_block("t"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        t = b.phi(I64)
        t.add_incoming(I64(0), before)
        held = b.load(b.bitcast(b.gep(wide, [t]), ir.VectorType(F32, 2 * LANES).as_pointer()), align=4)
        made = b.bitcast(b.fptrunc(held, PAIRED), PAIRED_BITS)
        b.store(made, b.bitcast(b.gep(short, [t]), PAIRED_BITS.as_pointer()), align=2)
        after = b.add(t, I64(2 * LANES))
        t.add_incoming(after, loop)
        b.cbranch(b.icmp_unsigned("<", after, args[1]), loop, done)
        b.position_at_end(done)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def sum_pairs(
    typing_context: Any, p: Any, values: Any, y: Any, count: Any, stride: Any, width: Any, num_lines: Any
) -> Any:
    """y[line * width + i] for the addresses p (bfloat16, a line every ``stride`` bytes), values (bfloat16 [T, width])
    and y (float32).

    ``count`` is even and not 0; ``num_lines``, up to MAX_LINES, is a literal.
    """
    del typing_context, p, values, y, count, stride, width
    if not isinstance(num_lines, types.IntegerLiteral):
        return None
    lines = num_lines.literal_value

    def codegen(context: Any, b: ir.IRBuilder, _: Any, args: Any) -> Any:
        p, values, y, count, stride, width = args[:6]
        values, y = b.inttoptr(values, I16.as_pointer()), b.inttoptr(y, F32.as_pointer())
        before, loop, done = b.block, b.append_basic_block("t"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        t = b.phi(I64)
        t.add_incoming(I64(0), before)
        sums = [[b.phi(SUMS) for _ in range(COLUMNS // LANES)] for _ in range(lines)]
        place = b.gep(values, [b.mul(t, width)])
        following = b.gep(place, [width])
        for slot in (place, following):
            for line in range(0, COLUMNS, 2 * LANES):
                prefetch(b, b.gep(slot, [I64(AHEAD + line)]))
        pairs = [v for i in range(0, COLUMNS, 2 * LANES) for v in _braided(b, place, following, i)]
        for line, row in enumerate(sums):
            weights = _spread(b, b.add(p, b.add(b.mul(stride, I64(line)), b.mul(t, I64(2)))))
            for held, v in zip(row, pairs, strict=True):
                held.add_incoming(ir.Constant(SUMS, [0.0] * LANES), before)
                held.add_incoming(add_pairs(b, v, weights, held), loop)
        after = b.add(t, I64(2))
        t.add_incoming(after, loop)
        b.cbranch(b.icmp_unsigned("<", after, count), loop, done)
        b.position_at_end(done)
        for line, row in enumerate(sums):
            for i, held in enumerate(row):
                place = b.gep(y, [b.add(b.mul(width, I64(line)), I64(LANES * i))])
                b.store(held.incomings[1][0], b.bitcast(place, SUMS.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 6, num_lines), codegen


@intrinsic
def add_pair(typing_context: Any, y: Any, p: Any, first: Any, second: Any) -> Any:
    """32 columns of two values, bfloat16 at ``first`` and ``second``, by their weights at ``p`` (bfloat16 [2])."""
    del typing_context, y, p, first, second

    def codegen(context: Any, b: ir.IRBuilder, _: Any, args: Any) -> Any:
        y, p, first, second = args
        first, second = (b.inttoptr(place, I16.as_pointer()) for place in (first, second))
        weights = _spread(b, p)
        for i, v in enumerate(_braided(b, first, second, 0)):
            place = b.inttoptr(b.add(y, I64(4 * LANES * i)), SUMS.as_pointer())
            b.store(add_pairs(b, v, weights, b.load(place, align=4)), place, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), codegen


def _braided(b: ir.IRBuilder, first: Any, second: Any, column: int) -> list[Any]:
    """Columns ``column`` .. + 31 of two values, each column's two numbers side by side: two vectors of 16 pairs."""
    places = (b.bitcast(b.gep(v, [I64(column)]), PAIRED_BITS.as_pointer()) for v in (first, second))
    one, other = (b.load(place, align=2) for place in places)
    lanes = [place for i in range(2 * LANES) for place in (i, i + 2 * LANES)]
    return [b.bitcast(pick(b, one, other, part), PAIRED) for part in (lanes[: 2 * LANES], lanes[2 * LANES :])]


def _spread(b: ir.IRBuilder, place: Any) -> Any:
    """The pair at an address, in every lane."""
    pair = b.load(b.inttoptr(place, I32.as_pointer()), align=2)
    single = b.insert_element(ir.Constant(WORDS, ir.Undefined), pair, I32(0))
    return b.bitcast(b.shuffle_vector(single, single, ir.Constant(WORDS, [0] * LANES)), PAIRED)


@njit
def _score_lines(q: int, room: int, y: int, width: int, stride: int, lines: int) -> None:
    """`score_block` of 1 to MAX_SCORED lines."""
    stay_apart()
    if lines == 1:
        score_block(q, room, y, width, stride, 1)
    elif lines == 2:
        score_block(q, room, y, width, stride, 2)
    elif lines == 3:
        score_block(q, room, y, width, stride, 3)
    elif lines == 4:
        score_block(q, room, y, width, stride, 4)
    elif lines == 5:
        score_block(q, room, y, width, stride, 5)
    elif lines == 6:
        score_block(q, room, y, width, stride, 6)
    elif lines == 7:
        score_block(q, room, y, width, stride, 7)
    else:
        score_block(q, room, y, width, stride, 8)


@njit
def _score(q: int, keys: int, scores: int, lines: int, count: int, width: int, stride: int, room: int) -> None:
    """scores[line, t] = q[line] . keys[t] of the first ``count`` slots; what follows up to the next 32 is overwritten.

    ``room`` holds 16 W floats.
    """
    stay_apart()
    for t in range(0, count, SLOTS):
        for i in range(BLOCKS):
            turn_keys(keys, t + i * LANES, count - 1, width, room + 2 * i * LANES * width)
        for line in range(0, lines, MAX_SCORED):
            y = scores + 4 * (line * stride + t)
            _score_lines(q + 2 * line * width, room, y, width, stride, min(lines - line, MAX_SCORED))


@njit
def _sum_lines(p: int, values: int, y: int, count: int, stride: int, width: int, lines: int) -> None:
    """`sum_pairs` of 1 to MAX_LINES lines."""
    stay_apart()
    if lines == 1:
        sum_pairs(p, values, y, count, stride, width, 1)
    elif lines == 2:
        sum_pairs(p, values, y, count, stride, width, 2)
    elif lines == 3:
        sum_pairs(p, values, y, count, stride, width, 3)
    elif lines == 4:
        sum_pairs(p, values, y, count, stride, width, 4)
    elif lines == 5:
        sum_pairs(p, values, y, count, stride, width, 5)
    else:
        sum_pairs(p, values, y, count, stride, width, 6)


@njit
def _weigh(p: int, values: int, y: int, lines: int, first: int, rows: int, sees: int, width: int, stride: int) -> None:
    """y[line] = sum of p[line] v over what row line % rows sees: ``first`` slots, then rows as ``sees`` [R, R] says.

    p is float32 [lines, stride], in the order of what each line sees, and becomes bfloat16 in its place.
    """
    stay_apart()
    even, is_seen = first // 2 * 2, octets(sees)
    for line in range(lines):
        row, count = line % rows, first
        for j in range(row + 1):
            count += is_seen[row * rows + j]
        shorten(p + 4 * line * stride, count)
        shorts(p + 4 * line * stride)[count] = 0  # what an odd number of slots is paired with
    for line in range(0, lines if even else 0, MAX_LINES):
        for i in range(0, width, COLUMNS):
            _sum_lines(p + 4 * line * stride, values + 2 * i, y + 4 * (line * width + i), even, 4 * stride, width,
                       min(lines - line, MAX_LINES))  # fmt: skip
    made = floats(y)
    for i in range(0 if even else lines * width):
        made[i] = np.float32(0)
    for line in range(lines):
        row, at, held = line % rows, even, even  # `held` waits for its partner
        for j in range(-1 if even < first else 0, row + 1):
            if j < 0 or is_seen[row * rows + j]:
                slot = first + j
                if at % 2:
                    _add(y, p, values, line, at - 1, held, slot, width, stride)
                at, held = at + 1, slot
        if at % 2:
            _add(y, p, values, line, at - 1, held, held, width, stride)


@njit
def _add(y: int, p: int, values: int, line: int, place: int, one: int, other: int, width: int, stride: int) -> None:
    """`add_pair` of two slots, whose weights stand at ``place`` of a line."""
    for i in range(0, width, 2 * LANES):
        add_pair(y + 4 * (line * width + i), p + 4 * line * stride + 2 * place, values + 2 * (one * width + i),
                 values + 2 * (other * width + i))  # fmt: skip


@njit
def _no_score(q: int, keys: int, scores: int, lines: int, count: int, width: int, stride: int, room: int) -> None:
    """Never called."""


@njit
def _no_weigh(
    p: int, values: int, y: int, lines: int, first: int, rows: int, sees: int, width: int, stride: int
) -> None:
    """Never called."""


score, weigh = (_score, _weigh) if HAS_PAIRS else (_no_score, _no_weigh)
