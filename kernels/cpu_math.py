"""The steps of a decoder layer on a CPU, on addresses of float32 values: each is one loop that LLVM vectorises.

Values are rounded to the model's dtype wherever the family's own modules round. What one row gives depends on that row
alone. ``is_wide`` says that the model computes in float32, ``is_wide_cache`` that its cache is kept so; else bfloat16.
"""

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from .cpu_dot import (
    BLOCK,
    BYTES,
    HAS_MANY_REGISTERS,
    HAS_PAIRS,
    LANES,
    MAX_LINES,
    MAX_ROWS,
    MIXED,
    PAIRS,
    STEP,
    VECTORS,
    WIDE,
    dot_block,
    largest_of_block,
    squares_of_block,
    sum_block,
    sum_of_block,
)

# for guesses alone: what the target computes must have the same bits wherever LLVM compiles it, inlined here or there
FAST = {"reassoc", "contract", "nsz"}
PAIR_STEP = STEP[PAIRS]


def _pointer_to(kind: Any) -> Any:
    @intrinsic
    def view(typing_context: Any, address: Any) -> Any:
        del typing_context, address
        pointer = types.CPointer(kind)

        def codegen(context: Any, builder: Any, _: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(pointer))

        return pointer(types.int64), codegen

    return view


floats, shorts, words = _pointer_to(types.float32), _pointer_to(types.uint16), _pointer_to(types.int64)
octets, words_of_32 = _pointer_to(types.uint8), _pointer_to(types.uint32)


@intrinsic
def stay_apart(typing_context: Any) -> Any:
    """Keeps LLVM from inlining the function that calls it, which would multiply compile time."""
    del typing_context

    def codegen(context: Any, builder: Any, *_: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


@njit(inline="always")
def widened(short: Any) -> Any:
    """A bfloat16, given as its bits, as float32."""
    return np.uint32(np.uint32(short) << np.uint32(16)).view(np.float32)


@njit(inline="always")
def rounded(x: Any, is_wide: Any) -> Any:
    """``x`` rounded to bfloat16, to even, unless the model computes in float32."""
    bits = np.float32(x).view(np.uint32)
    short = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.uint32(bits if is_wide else short).view(np.float32)


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32, rounded once: said, not left to what LLVM contracts."""
    del typing_context, a, b, c

    def codegen(_context: Any, builder: Any, _: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@njit(inline="always")
def exp(x: Any) -> Any:
    """e^x for x <= 88 in float32, to 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else np.float32(x)  # NaN stays NaN
    n = np.floor(fma(x, np.float32(1.4426950408889634), np.float32(0.5)))
    r = fma(n, np.float32(2.12194440e-4), fma(n, np.float32(-0.693359375), x))
    p = fma(np.float32(1.9875691500e-4), r, np.float32(1.3981999507e-3))
    p = fma(p, r, np.float32(8.3334519073e-3))
    p = fma(p, r, np.float32(4.1665795894e-2))
    p = fma(p, r, np.float32(1.6666665459e-1))
    p = fma(p, r, np.float32(5.0000001201e-1))
    p = fma(p * r, r, r) + np.float32(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit
def share(count: int, thread: int, num_threads: int) -> tuple[int, int]:
    """The part [begin, end) of ``count`` outputs, 8 or more, that a thread makes, in blocks of 8."""
    blocks = max(count // BLOCK, 1)
    begin, end = blocks * thread // num_threads, blocks * (thread + 1) // num_threads
    # what is left of an odd count goes with the block before it, some of whose outputs are made again
    return begin * BLOCK, count if thread == num_threads - 1 else end * BLOCK


def named(function: Any, name: str) -> Any:
    """``function`` compiled under a ``name`` of its own: by name alone do kernels from disk, each compiled in another
    process, know their parts from each other's.
    """
    function.__qualname__ = name
    return njit(function)


def _dots_of(kind: int) -> Any:
    """`dot_block` for 1 to MAX_ROWS rows."""

    def dots(x: int, w: int, y: int, size: int, stride: int, rows: int) -> None:
        stay_apart()
        if rows == 1:
            dot_block(x, w, y, size, stride, 1, kind)
        elif rows == 2:
            dot_block(x, w, y, size, stride, 2, kind)
        elif rows == 3:
            dot_block(x, w, y, size, stride, 3, kind)
        elif rows == 4:
            dot_block(x, w, y, size, stride, 4, kind)
        elif rows == 5:
            dot_block(x, w, y, size, stride, 5, kind)
        elif rows == 6:
            dot_block(x, w, y, size, stride, 6, kind)
        elif rows == 7:
            dot_block(x, w, y, size, stride, 7, kind)
        else:
            dot_block(x, w, y, size, stride, 8, kind)

    return named(dots, f"dots_{kind}")


_mixed_dots, _wide_dots = _dots_of(MIXED), _dots_of(WIDE)
# where there are no pairs, these are never called
_paired_dots, _byte_dots = (_dots_of(PAIRS), _dots_of(BYTES)) if HAS_PAIRS else (_mixed_dots, _mixed_dots)


@njit
def dots(x: int, w: int, y: int, size: int, stride: int, rows: int, kind: int) -> None:
    """y[r * stride + j] = x[r] . w[j], j = 0 .. 7, for 1 to MAX_ROWS rows of dtypes ``kind``."""
    if kind == PAIRS:
        _paired_dots(x, w, y, size, stride, rows)
    elif kind == BYTES:
        _byte_dots(x, w, y, size, stride, rows)
    elif kind == WIDE:
        _wide_dots(x, w, y, size, stride, rows)
    else:
        _mixed_dots(x, w, y, size, stride, rows)


@njit
def kind_of(size: int, is_wide: int) -> int:
    """How products over ``size`` inputs are made: `pack` comes before them where this is PAIRS."""
    if is_wide:
        return WIDE
    return PAIRS if HAS_PAIRS and size % PAIR_STEP == 0 else MIXED


@njit
def pack(x: int, room: int, count: int) -> None:
    """``count`` values that bfloat16 holds, from float32 to their upper halves."""
    stay_apart()
    values, made = words_of_32(x), shorts(room)
    for i in range(count):
        made[i] = values[i] >> np.uint32(16)


@njit
def product(
    x: int, weight: int, y: int, rows: int, size: int, count: int, begin: int, end: int, stride: int, is_wide: int,
    room: int,
) -> None:  # fmt: skip
    """y[r, o] = x[r] . weight[o] for the outputs [begin, end) of ``count``, in float32, not rounded.

    ``room`` holds rows * size numbers of two bytes, this thread's own.
    """
    stay_apart()
    kind, wide = kind_of(size, is_wide), 4 if is_wide else 2
    element = 4
    if kind == PAIRS:
        pack(x, room, rows * size)
        x, element = room, 2
    for o in range(begin, end, BLOCK):
        place = min(o, count - BLOCK)  # the last block of an odd count makes some outputs twice
        for r in range(0, rows, MAX_ROWS):
            dots(x + element * r * size, weight + wide * place * size, y + 4 * (r * stride + place), size, stride,
                 min(rows - r, MAX_ROWS), kind)  # fmt: skip


@njit
def byte_product(
    x: int, weight: int, scales: int, y: int, rows: int, size: int, begin: int, end: int, stride: int, room: int
) -> None:
    """`product` with a weight in eight bits times ``scales`` [O]; the outputs are a multiple of 8."""
    stay_apart()
    made, factors = floats(y), floats(scales)
    pack(x, room, rows * size)
    for o in range(begin, end, BLOCK):
        for r in range(0, rows, MAX_ROWS):
            dots(room + 2 * r * size, weight + o * size, y + 4 * (r * stride + o), size, stride,
                 min(rows - r, MAX_ROWS), BYTES)  # fmt: skip
    for r in range(rows):
        for o in range(begin, end):
            made[r * stride + o] *= factors[o]


@njit
def settle(y: int, bias: int, rows: int, begin: int, end: int, stride: int, is_wide: int) -> None:
    """Add the bias, if any, and round."""
    stay_apart()
    values = floats(y)
    added = floats(bias)
    for r in range(rows):
        for o in range(begin, end):
            value = values[r * stride + o]
            if bias:
                value += added[o]
            values[r * stride + o] = rounded(value, is_wide)


@njit
def add(hidden: int, y: int, rows: int, begin: int, end: int, size: int, is_wide: int) -> None:
    """hidden += y, both of R rows, outputs [begin, end)."""
    stay_apart()
    h, made = floats(hidden), floats(y)
    for r in range(rows):
        for o in range(r * size + begin, r * size + end):
            h[o] = rounded(h[o] + rounded(made[o], is_wide), is_wide)


@njit(error_model="numpy")
def norm(x: int, weight: int, y: int, rows: int, size: int, eps: float, is_wide: int) -> None:
    """y = x / sqrt(mean(x^2) + eps) * weight, row by row."""
    stay_apart()
    for r in range(rows):
        source, made, w = floats(x + 4 * r * size), floats(y + 4 * r * size), floats(weight)
        whole = size // LANES * LANES
        total = squares_of_block(x + 4 * r * size, whole) if whole else np.float32(0)
        for i in range(whole, size):
            total = fma(source[i], source[i], total)
        inverse = np.float32(1) / np.float32(math.sqrt(total / np.float32(size) + eps))
        for i in range(size):
            made[i] = rounded(rounded(source[i] * inverse, is_wide) * w[i], is_wide)


@njit
def rotate(x: int, cos: int, sin: int, width: int, is_wide: int) -> None:
    """x * cos + (-x2, x1) * sin, in place: the rotary embedding of one head at one position."""
    stay_apart()
    v, c, s = floats(x), floats(cos), floats(sin)
    half = width // 2
    for i in range(half):
        a, b = v[i], v[i + half]
        v[i] = rounded(rounded(a * c[i], is_wide) + rounded(-b * s[i], is_wide), is_wide)
        v[i + half] = rounded(rounded(b * c[i + half], is_wide) + rounded(a * s[i + half], is_wide), is_wide)


@njit
def copy(x: int, y: int, count: int) -> None:
    """y = x."""
    source, made = floats(x), floats(y)
    for i in range(count):
        made[i] = source[i]


@njit
def keep(x: int, cache: int, place: int, width: int, is_wide_cache: int) -> None:
    """Write one head's key or value into slot ``place`` (a count of elements)."""
    values, wide, short = floats(x), floats(cache), shorts(cache)
    for i in range(width):
        if is_wide_cache:
            wide[place + i] = values[i]
        else:
            short[place + i] = np.uint16(np.float32(values[i]).view(np.uint32) >> np.uint32(16))


def _sums_of(is_wide: int, num_vectors: int) -> Any:
    """`sum_block` for 1 to 6 rows."""

    def sums(p: int, values: int, y: int, count: int, p_stride: int, width: int, rows: int) -> None:
        stay_apart()
        if rows == 1:
            sum_block(p, values, y, count, p_stride, width, 1, is_wide, num_vectors)
        elif rows == 2:
            sum_block(p, values, y, count, p_stride, width, 2, is_wide, num_vectors)
        elif rows == 3:
            sum_block(p, values, y, count, p_stride, width, 3, is_wide, num_vectors)
        elif rows == 4:
            sum_block(p, values, y, count, p_stride, width, 4, is_wide, num_vectors)
        elif rows == 5:
            sum_block(p, values, y, count, p_stride, width, 5, is_wide, num_vectors)
        else:
            sum_block(p, values, y, count, p_stride, width, 6, is_wide, num_vectors)

    return named(sums, f"sums_{is_wide}_{num_vectors}")


_sums, _wide_sums = _sums_of(0, 1), _sums_of(1, 1)
_broad_sums = _sums_of(0, VECTORS) if HAS_MANY_REGISTERS else _sums


@njit
def weigh(p: int, values: int, y: int, count: int, p_stride: int, width: int, lines: int, is_wide: int) -> None:
    """y[line] = sum_t p[line, t] values[t] over ``count`` slots, for any number of ``lines``."""
    broad = not is_wide and HAS_MANY_REGISTERS and width % (VECTORS * LANES) == 0
    element, columns = 4 if is_wide else 2, VECTORS * LANES if broad else LANES
    for line in range(0, lines, MAX_LINES):
        rows = min(lines - line, MAX_LINES)
        for i in range(0, width, columns):
            x, v, made = p + 4 * line * p_stride, values + element * i, y + 4 * (line * width + i)
            if broad:
                _broad_sums(x, v, made, count, p_stride, width, rows)
            elif is_wide:
                _wide_sums(x, v, made, count, p_stride, width, rows)
            else:
                _sums(x, v, made, count, p_stride, width, rows)


@njit
def add_slot(y: int, weight: float, values: int, width: int, is_wide_cache: int) -> None:
    """y += weight * value of one slot."""
    made, wide, short = floats(y), floats(values), shorts(values)
    for i in range(width):
        made[i] = fma(weight, wide[i] if is_wide_cache else widened(short[i]), made[i])


@njit
def largest(values: int, count: int) -> float:
    """Of ``count`` values; with NaN among them anything may come out: what is made with it is NaN all the same."""
    v, whole = floats(values), count // LANES * LANES
    top = largest_of_block(values, whole) if whole else v[0]
    for t in range(whole, count):
        top = max(top, v[t])
    return top


@njit(fastmath=FAST)
def mass(logits: int, count: int, top: float) -> Any:
    """sum e^(logits - top): where top is the largest of them, 1 over its share of a softmax."""
    values, total = floats(logits), np.float32(0)
    for i in range(count):
        total += exp(values[i] - top)
    return total


@njit
def powers(scores: int, count: int, scale: float) -> Any:
    """scores = e^(scale * (scores - their largest)), in place; returns their sum: a softmax, but for a division."""
    s = floats(scores)
    top, whole = largest(scores, count), count // LANES * LANES
    for t in range(count):
        s[t] = exp(scale * (s[t] - top))
    total = sum_of_block(scores, whole) if whole else np.float32(0)
    for t in range(whole, count):
        total += s[t]
    return total


@njit
def multiply(y: int, factor: float, count: int) -> None:
    """y *= factor."""
    made = floats(y)
    for i in range(count):
        made[i] *= factor


@njit(error_model="numpy")  # a test for a zero divisor would keep the loop scalar
def activate(made: int, active: int, rows: int, begin: int, end: int, mlp: int, is_wide: int) -> None:
    """silu(gate) * up, from gate and up side by side in ``made``."""
    stay_apart()
    both, out = floats(made), floats(active)
    for r in range(rows):
        for o in range(begin, end):
            gate = rounded(both[2 * r * mlp + o], is_wide)
            up = rounded(both[2 * r * mlp + mlp + o], is_wide)
            swish = rounded(gate / (np.float32(1) + exp(min(-gate, np.float32(88)))), is_wide)
            out[r * mlp + o] = rounded(swish * up, is_wide)
