"""The two inner loops of everything on a CPU, as LLVM vector code: a few rows against weights, keys or values.

    dot_block:   y[r, j] = sum_k w[j, k] x[r, k],     j = 0 .. 7,   r = 0 .. R - 1
    sum_block:   y[r, i] = sum_t p[r, t] v[t, i],     i = 0 .. 15 or 63,  r = 0 .. R - 1

w and v stream from memory once for all rows, so a few rows cost hardly more than one. Every sum is made in one
order, whatever R is (16 running sums over k, folded in a fixed tree; one sum over t), so a row's result does not depend
on the rows beside it: that is what makes exact decoding free on a CPU. bfloat16 is widened on the way, never copied.

Where the CPU multiplies pairs of bfloat16 (AVX512-BF16), x comes as bfloat16 too, and five rows cost what one costs:
an instruction does two products and two sums for each of 16 lanes, so that memory, not arithmetic, sets the pace.
"""

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16  # running sums; K must be a multiple
BLOCK = 8  # weight rows at once
# x and weight: float32 and bfloat16, both float32, both bfloat16, bfloat16 and eight bits
MIXED, WIDE, PAIRS, BYTES = range(4)
WIDTHS = {MIXED: 2, WIDE: 4, PAIRS: 2, BYTES: 1}  # bytes of a weight
AHEAD = {MIXED: 2048, WIDE: 2048, PAIRS: 8192, BYTES: 4096}  # bytes of the weight asked for in advance
# a model's weights are read once a pass and do not stay; an exit's, which cost least where they do, should
LOCALITY = {MIXED: 3, WIDE: 3, PAIRS: 0, BYTES: 3}
STEP = {MIXED: LANES, WIDE: LANES, PAIRS: 2 * LANES, BYTES: 2 * LANES}  # of k; K must be a multiple
VECTORS = 4  # of 16 columns that `sum_block` takes at once, where a CPU has registers for them
_is_host = config.CPU_NAME is None and config.CPU_FEATURES is None  # numba compiles for this very machine
_has = llvmlite.binding.get_host_cpu_features().get
HAS_PAIRS, HAS_MANY_REGISTERS = (bool(_is_host and _has(feature)) for feature in ("avx512bf16", "avx512f"))
MAX_ROWS = 8 if HAS_MANY_REGISTERS else 6  # rows of x at once: as many sums as a CPU has registers for
MAX_SINGLE = 6  # rows up to which one row of the weight is streamed, not two
MAX_LINES = 6  # rows of p at once

F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
SUMS, SHORTS, WORDS = (ir.VectorType(kind, LANES) for kind in (F32, I16, I32))


class _BFloat16(ir.types.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


PAIRED, PAIRED_BITS = ir.VectorType(_BFloat16(), 2 * LANES), ir.VectorType(I16, 2 * LANES)


@intrinsic
def dot_block(
    typing_context: Any, x: Any, weight: Any, y: Any, num_inputs: Any, stride: Any, num_rows: Any, kind: Any
) -> Any:
    """y[r * stride + j] for the addresses x ([R, K]), weight ([8, K]) and y (float32).

    ``num_rows`` (1 to 8) and ``kind`` (MIXED, WIDE, PAIRS or BYTES: the dtypes of x and weight) are literals.
    """
    del typing_context
    if not isinstance(num_rows, types.IntegerLiteral) or not isinstance(kind, types.IntegerLiteral):
        return None
    rows, dtypes = num_rows.literal_value, kind.literal_value

    def codegen(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        x, weight, y, num_inputs, stride = args[:5]
        _emit(builder, x, weight, y, num_inputs, stride, rows, dtypes)
        return context.get_dummy_value()

    address = types.int64
    return types.void(address, address, address, types.int64, types.int64, num_rows, kind), codegen


@intrinsic
def sum_block(
    typing_context: Any, p: Any, values: Any, y: Any, count: Any, stride: Any, width: Any, num_rows: Any, is_wide: Any,
    num_vectors: Any,
) -> Any:  # fmt: skip
    """y[r * width + i] for the addresses p (float32 [R, stride]), values ([count, width]) and y (float32).

    There must be one slot at least.
    ``num_rows`` (1 to 6), ``is_wide`` (1: the values are float32, 0: bfloat16) and ``num_vectors`` of 16 columns are
    literals.
    """
    del typing_context
    if not all(isinstance(literal, types.IntegerLiteral) for literal in (num_rows, is_wide, num_vectors)):
        return None
    rows, kind = num_rows.literal_value, WIDE if is_wide.literal_value else MIXED

    def codegen(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        p, values, y, count, stride, width = args[:6]
        _emit_sum(builder, p, values, y, count, stride, width, rows, kind, num_vectors.literal_value)
        return context.get_dummy_value()

    number = types.int64
    return types.void(number, number, number, number, number, number, num_rows, is_wide, num_vectors), codegen


def _emit_sum(
    b: ir.IRBuilder, p: Any, values: Any, y: Any, count: Any, p_stride: Any, width: Any, rows: int, kind: int,
    num_vectors: int,
) -> None:  # fmt: skip
    p, y = b.inttoptr(p, F32.as_pointer()), b.inttoptr(y, F32.as_pointer())
    values = b.inttoptr(values, (F32 if kind == WIDE else I16).as_pointer())
    before, loop, done = b.block, b.append_basic_block("t"), b.append_basic_block("done")
    b.branch(loop)
    b.position_at_end(loop)
    t = b.phi(I64)
    t.add_incoming(I64(0), before)
    sums = [[b.phi(SUMS) for _ in range(num_vectors)] for _ in range(rows)]
    slot = b.mul(t, width)
    vectors = [_streamed(b, b.gep(values, [b.add(slot, I64(LANES * i))]), kind) for i in range(num_vectors)]
    spread = ir.Constant(WORDS, [0] * LANES)
    for r, row in enumerate(sums):
        weight = b.load(b.gep(p, [b.add(t, b.mul(p_stride, I64(r)))]))
        single = b.insert_element(ir.Constant(SUMS, ir.Undefined), weight, I32(0))
        weights = b.shuffle_vector(single, single, spread)
        for held, v in zip(row, vectors, strict=True):
            held.add_incoming(ir.Constant(SUMS, [0.0] * LANES), before)
            held.add_incoming(_fma(b, v, weights, held), loop)
    after = b.add(t, I64(1))
    t.add_incoming(after, loop)
    b.cbranch(b.icmp_unsigned("<", after, count), loop, done)
    b.position_at_end(done)
    for r, row in enumerate(sums):
        for i, held in enumerate(row):
            place = b.gep(y, [b.add(b.mul(width, I64(r)), I64(LANES * i))])
            b.store(held.incomings[1][0], b.bitcast(place, SUMS.as_pointer()), align=4)


def _over_blocks(step: Any, join: Any, start: Any) -> Any:
    """An intrinsic that goes over values sixteen at a time and folds what it has of every lane, always in one order."""

    @intrinsic
    def reduce(typing_context: Any, values: Any, count: Any) -> Any:
        del typing_context, values, count

        def codegen(context: Any, b: ir.IRBuilder, _: Any, args: Any) -> Any:
            place, before, loop = b.inttoptr(args[0], F32.as_pointer()), b.block, b.append_basic_block("t")
            done = b.append_basic_block("done")
            b.branch(loop)
            b.position_at_end(loop)
            t, held = b.phi(I64), b.phi(SUMS)
            t.add_incoming(I64(0), before)
            held.add_incoming(ir.Constant(SUMS, [start] * LANES), before)
            more = step(b, b.load(b.bitcast(b.gep(place, [t]), SUMS.as_pointer()), align=4), held)
            after = b.add(t, I64(LANES))
            t.add_incoming(after, loop)
            held.add_incoming(more, loop)
            b.cbranch(b.icmp_unsigned("<", after, args[1]), loop, done)
            b.position_at_end(done)
            return _folded(b, more, join)

        return types.float32(types.int64, types.int64), codegen

    return reduce


def _larger(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _emit(b: ir.IRBuilder, x: Any, weight: Any, y: Any, num_inputs: Any, stride: Any, rows: int, kind: int) -> None:
    is_paired, element = kind in (PAIRS, BYTES), {WIDE: F32, BYTES: I8}.get(kind, I16)
    x = b.inttoptr(x, (I16 if is_paired else F32).as_pointer())
    y, weight = b.inttoptr(y, F32.as_pointer()), b.inttoptr(weight, element.as_pointer())
    tile = 2 if rows > MAX_SINGLE else 1  # weight rows at once, which share each load of x
    before, outer = b.block, b.append_basic_block("weight_row")
    inner, folded, done = b.append_basic_block("k"), b.append_basic_block("fold"), b.append_basic_block("done")
    b.branch(outer)

    b.position_at_end(outer)
    j = b.phi(I64)
    j.add_incoming(I64(0), before)
    places = [b.gep(weight, [b.mul(b.add(j, I64(i)), num_inputs)]) for i in range(tile)]
    b.branch(inner)

    b.position_at_end(inner)
    k = b.phi(I64)
    k.add_incoming(I64(0), outer)
    sums = [[b.phi(SUMS) for _ in range(tile)] for _ in range(rows)]
    weights = [_streamed(b, b.gep(place, [k]), kind) for place in places]
    for r, row in enumerate(sums):
        place = b.gep(x, [b.add(k, b.mul(num_inputs, I64(r)))])
        values = _load_pairs(b, place) if is_paired else b.load(b.bitcast(place, SUMS.as_pointer()), align=4)
        for held, w in zip(row, weights, strict=True):
            held.add_incoming(ir.Constant(SUMS, [0.0] * LANES), outer)
            held.add_incoming((add_pairs if is_paired else _fma)(b, w, values, held), inner)
    after = b.add(k, I64(STEP[kind]))
    k.add_incoming(after, inner)
    b.cbranch(b.icmp_unsigned("<", after, num_inputs), inner, folded)

    b.position_at_end(folded)
    for r, row in enumerate(sums):
        for i, held in enumerate(row):
            place = b.gep(y, [b.add(b.add(j, I64(i)), b.mul(stride, I64(r)))])
            b.store(_folded(b, held.incomings[1][0]), place)
    following = b.add(j, I64(tile))
    j.add_incoming(following, folded)
    b.cbranch(b.icmp_unsigned("<", following, I64(BLOCK)), outer, done)
    b.position_at_end(done)


def _streamed(b: ir.IRBuilder, place: Any, kind: int) -> Any:
    """16 weights as float32, or 32 in bfloat16; those some kB further on their way into the cache."""
    for line in range(2 if kind == WIDE else 1):  # of 64 bytes
        prefetch(b, b.gep(place, [I64((AHEAD[kind] + 64 * line) // WIDTHS[kind])]), LOCALITY[kind])
    if kind == PAIRS:
        return _load_pairs(b, place)
    if kind == BYTES:
        signed = b.load(b.bitcast(place, ir.VectorType(I8, 2 * LANES).as_pointer()), align=1)
        return b.fptrunc(b.sitofp(signed, ir.VectorType(F32, 2 * LANES)), PAIRED)
    if kind == WIDE:
        return b.load(b.bitcast(place, SUMS.as_pointer()), align=4)
    shorts = b.load(b.bitcast(place, SHORTS.as_pointer()), align=2)
    return b.bitcast(b.shl(b.zext(shorts, WORDS), ir.Constant(WORDS, [16] * LANES)), SUMS)


def prefetch(b: ir.IRBuilder, place: Any, locality: int = 3) -> None:
    """Ask for what lies at ``place``, which need not exist; at ``locality`` 0 for this once, past the outer caches."""
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(ir.IntType(8)), I32, I32, I32])
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [b.bitcast(place, ir.IntType(8).as_pointer()), I32(0), I32(locality), I32(1)])


def _load_pairs(b: ir.IRBuilder, place: Any) -> Any:
    return b.bitcast(b.load(b.bitcast(place, PAIRED_BITS.as_pointer()), align=2), PAIRED)


def add_pairs(b: ir.IRBuilder, w: Any, x: Any, total: Any) -> Any:
    """total[i] + w[2 i] x[2 i] + w[2 i + 1] x[2 i + 1]."""
    kind = ir.FunctionType(SUMS, [SUMS, PAIRED, PAIRED])
    return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512"), [total, w, x])


def _fma(b: ir.IRBuilder, a: Any, c: Any, total: Any) -> Any:
    kind = ir.FunctionType(SUMS, [SUMS] * 3)
    return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fma.v{LANES}f32"), [a, c, total])


def pick(b: ir.IRBuilder, first: Any, second: Any, lanes: Any) -> Any:
    """Lanes of two vectors, put together."""
    picked = list(lanes)
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(picked)), picked))


def _folded(b: ir.IRBuilder, total: Any, join: Any = ir.IRBuilder.fadd) -> Any:
    """The sum of all lanes, halves added to halves; or what else ``join`` makes of two."""
    width = LANES
    while width > 1:
        width //= 2
        total = join(b, pick(b, total, total, range(width)), pick(b, total, total, range(width, 2 * width)))
    return b.extract_element(total, I32(0))


# of the float32 values at an address, whose count is a multiple of 16 and no less: LLVM leaves a maximum scalar, and
# sums, too, unless it may choose their order, which then hangs on what is compiled beside them
largest_of_block = _over_blocks(_larger, _larger, float("-inf"))
sum_of_block = _over_blocks(ir.IRBuilder.fadd, ir.IRBuilder.fadd, 0.0)
squares_of_block = _over_blocks(lambda b, x, total: _fma(b, x, x, total), ir.IRBuilder.fadd, 0.0)
