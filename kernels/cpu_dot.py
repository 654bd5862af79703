"""The two inner loops of everything on a CPU, as LLVM vector code: a few rows against weights, keys or values.

    dot_block:   y[r, j] = sum_k w[j, k] x[r, k],     j = 0 .. 7,   r = 0 .. R - 1
    sum_block:   y[r, i] = sum_t p[r, t] v[t, i],     i = 0 .. 15,  r = 0 .. R - 1

w and v stream from memory once for all rows, so up to six rows cost hardly more than one. Every sum is made in one
order, whatever R is (16 running sums over k, folded in a fixed tree; one sum over t), so a row's result does not depend
on the rows beside it: that is what makes exact decoding free on a CPU. bfloat16 is widened on the way, never copied.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16  # running sums; K must be a multiple
BLOCK = 8  # weight rows at once
MAX_ROWS = 6  # rows of x at once: as many sums as a CPU has registers for
AHEAD = 2048  # bytes of the weight asked for in advance

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_SUMS, _HALF, _SHORTS = ir.VectorType(_F32, LANES), ir.VectorType(_F32, 8), ir.VectorType(_I16, LANES)
_WORDS = ir.VectorType(_I32, LANES)


@intrinsic
def dot_block(
    typing_context: Any, x: Any, weight: Any, y: Any, num_inputs: Any, stride: Any, num_rows: Any, is_wide: Any
) -> Any:
    """y[r * stride + j] for the addresses x (float32 [R, K]), weight ([8, K]) and y (float32).

    ``num_rows`` (1 to 6) and ``is_wide`` (1: the weight is float32, 0: bfloat16) are literals.
    """
    del typing_context
    if not isinstance(num_rows, types.IntegerLiteral) or not isinstance(is_wide, types.IntegerLiteral):
        return None
    rows, wide = num_rows.literal_value, bool(is_wide.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        x, weight, y, num_inputs, stride = args[:5]
        _emit(builder, x, weight, y, num_inputs, stride, rows, wide)
        return context.get_dummy_value()

    address = types.int64
    return types.void(address, address, address, types.int64, types.int64, num_rows, is_wide), codegen


@intrinsic
def sum_block(
    typing_context: Any, p: Any, values: Any, y: Any, count: Any, stride: Any, width: Any, num_rows: Any, is_wide: Any
) -> Any:
    """y[r * width + i] for the addresses p (float32 [R, stride]), values ([count, width]) and y (float32).

    There must be one slot at least.
    ``num_rows`` (1 to 6) and ``is_wide`` (1: the values are float32, 0: bfloat16) are literals.
    """
    del typing_context
    if not isinstance(num_rows, types.IntegerLiteral) or not isinstance(is_wide, types.IntegerLiteral):
        return None
    rows, wide = num_rows.literal_value, bool(is_wide.literal_value)

    def codegen(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        p, values, y, count, stride, width = args[:6]
        _emit_sum(builder, p, values, y, count, stride, width, rows, wide)
        return context.get_dummy_value()

    number = types.int64
    return types.void(number, number, number, number, number, number, num_rows, is_wide), codegen


def _emit_sum(
    b: ir.IRBuilder, p: Any, values: Any, y: Any, count: Any, p_stride: Any, width: Any, rows: int, wide: bool
) -> None:
    p, y = b.inttoptr(p, _F32.as_pointer()), b.inttoptr(y, _F32.as_pointer())
    values = b.inttoptr(values, (_F32 if wide else _I16).as_pointer())
    before, loop, done = b.block, b.append_basic_block("t"), b.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    t = b.phi(_I64)
    t.add_incoming(_I64(0), before)
    sums = [b.phi(_SUMS) for _ in range(rows)]
    v = _widened(b, b.gep(values, [b.mul(t, width)]), wide)
    spread = ir.Constant(_WORDS, [0] * LANES)
    for r, held in enumerate(sums):
        weight = b.load(b.gep(p, [b.add(t, b.mul(p_stride, _I64(r)))]))
        single = b.insert_element(ir.Constant(_SUMS, ir.Undefined), weight, _I32(0))
        held.add_incoming(ir.Constant(_SUMS, [0.0] * LANES), before)
        held.add_incoming(_fma(b, v, b.shuffle_vector(single, single, spread), held), loop)
    after = b.add(t, _I64(1))
    t.add_incoming(after, loop)
    b.cbranch(b.icmp_unsigned("<", after, count), loop, done)
    b.position_at_end(done)
    for r, held in enumerate(sums):
        place = b.gep(y, [b.mul(width, _I64(r))])
        b.store(held.incomings[1][0], b.bitcast(place, _SUMS.as_pointer()), align=4)


def _emit(b: ir.IRBuilder, x: Any, weight: Any, y: Any, num_inputs: Any, stride: Any, rows: int, wide: bool) -> None:
    element = _F32 if wide else _I16
    x, y = b.inttoptr(x, _F32.as_pointer()), b.inttoptr(y, _F32.as_pointer())
    weight = b.inttoptr(weight, element.as_pointer())
    held = cgutils.alloca_once(b, _HALF, size=BLOCK * rows)
    zero = ir.Constant(_SUMS, [0.0] * LANES)
    before, outer = b.block, b.append_basic_block("weight_row")
    inner, folded, done = b.append_basic_block("k"), b.append_basic_block("fold"), b.append_basic_block("done")
    b.branch(outer)

    b.position_at_end(outer)
    j = b.phi(_I64)
    j.add_incoming(_I64(0), before)
    row = b.gep(weight, [b.mul(j, num_inputs)])
    b.branch(inner)

    b.position_at_end(inner)
    k = b.phi(_I64)
    k.add_incoming(_I64(0), outer)
    sums = [b.phi(_SUMS) for _ in range(rows)]
    w = _widened(b, b.gep(row, [k]), wide)
    for r, held_sum in enumerate(sums):
        place = b.gep(x, [b.add(k, b.mul(num_inputs, _I64(r)))])
        held_sum.add_incoming(zero, outer)
        held_sum.add_incoming(_fma(b, w, b.load(b.bitcast(place, _SUMS.as_pointer()), align=4), held_sum), inner)
    after = b.add(k, _I64(LANES))
    k.add_incoming(after, inner)
    b.cbranch(b.icmp_unsigned("<", after, num_inputs), inner, folded)

    b.position_at_end(folded)
    for r, held_sum in enumerate(sums):
        total = held_sum.incomings[1][0]
        b.store(b.fadd(_pick(b, total, zero, range(8)), _pick(b, total, zero, range(8, 16))),
                b.gep(held, [b.add(j, _I64(BLOCK * r))]))  # fmt: skip
    following = b.add(j, _I64(1))
    j.add_incoming(following, folded)
    b.cbranch(b.icmp_unsigned("<", following, _I64(BLOCK)), outer, done)

    b.position_at_end(done)
    for r in range(rows):
        parts = [b.load(b.gep(held, [_I64(BLOCK * r + i)])) for i in range(BLOCK)]
        out = b.bitcast(b.gep(y, [b.mul(stride, _I64(r))]), _HALF.as_pointer())
        b.store(_transposed_sum(b, parts), out, align=4)


def _widened(b: ir.IRBuilder, place: Any, wide: bool) -> Any:
    """16 weights as float32, those 2 kB further on their way into the cache."""
    prefetch_type = ir.FunctionType(ir.VoidType(), [ir.PointerType(ir.IntType(8)), _I32, _I32, _I32])
    prefetch = cgutils.get_or_insert_function(b.module, prefetch_type, "llvm.prefetch.p0")
    for line in range(2 if wide else 1):  # of 64 bytes
        ahead = b.gep(place, [_I64((AHEAD + 64 * line) // (4 if wide else 2))])
        b.call(prefetch, [b.bitcast(ahead, ir.IntType(8).as_pointer()), _I32(0), _I32(3), _I32(1)])
    if wide:
        return b.load(b.bitcast(place, _SUMS.as_pointer()), align=4)
    shorts = b.load(b.bitcast(place, _SHORTS.as_pointer()), align=2)
    return b.bitcast(b.shl(b.zext(shorts, _WORDS), ir.Constant(_WORDS, [16] * LANES)), _SUMS)


def _fma(b: ir.IRBuilder, a: Any, c: Any, total: Any) -> Any:
    kind = ir.FunctionType(_SUMS, [_SUMS] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32"), [a, c, total])


def _pick(b: ir.IRBuilder, first: Any, second: Any, lanes: Any) -> Any:
    picked = list(lanes)
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(_I32, len(picked)), picked))


def _transposed_sum(b: ir.IRBuilder, parts: list[Any]) -> Any:
    """Eight vectors of eight lanes -> the eight sums, each over its lanes in the same tree."""

    def pairs(first: Any, second: Any) -> Any:
        evens = _pick(b, first, second, (0, 2, 8, 10, 4, 6, 12, 14))
        return b.fadd(evens, _pick(b, first, second, (1, 3, 9, 11, 5, 7, 13, 15)))

    twos = [pairs(parts[i], parts[i + 1]) for i in range(0, BLOCK, 2)]
    low, high = pairs(twos[0], twos[1]), pairs(twos[2], twos[3])  # lanes 0-3 sum the lower halves, 4-7 the upper
    lower = _pick(b, low, high, (0, 1, 2, 3, 8, 9, 10, 11))
    return b.fadd(lower, _pick(b, low, high, (4, 5, 6, 7, 12, 13, 14, 15)))
