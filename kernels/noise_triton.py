"""The noise of `noise_reference` inside kernels: the same bits from the same integers, made where they are used.

Nothing is materialised: the key of a row is two registers, the number of a column comes from its id.
"""

# mypy: allow-incomplete-defs
import triton
import triton.language as tl

from . import noise_reference as reference

SEED_STEP, COUNTER_STEP = tl.constexpr(reference.SEED_STEP), tl.constexpr(reference.COUNTER_STEP)
OFFSET = tl.constexpr(reference.OFFSET)
KEY_SHIFT_1, KEY_FACTOR_1 = map(tl.constexpr, reference.KEY_ROUNDS[0])
KEY_SHIFT_2, KEY_FACTOR_2 = map(tl.constexpr, reference.KEY_ROUNDS[1])
SHIFT_1, FACTOR_1 = map(tl.constexpr, reference.COLUMN_ROUNDS[0])
SHIFT_2, FACTOR_2 = map(tl.constexpr, reference.COLUMN_ROUNDS[1])


@triton.jit
def keys(seed, stream: tl.constexpr, position):
    """Two uint32 words from int64 ``seed`` and ``position``; see `noise_reference.keys`."""
    state = seed.to(tl.uint64) * SEED_STEP + (position.to(tl.uint64) * 4 + stream) * COUNTER_STEP + OFFSET
    state = (state ^ (state >> KEY_SHIFT_1)) * KEY_FACTOR_1
    state = (state ^ (state >> KEY_SHIFT_2)) * KEY_FACTOR_2
    state = state ^ (state >> 31)
    return state.to(tl.uint32), (state >> 32).to(tl.uint32)


@triton.jit
def uniform(low, high, columns):
    """float32 numbers in (0, 1), one a column; see `noise_reference.uniform`."""
    bits = columns.to(tl.uint32) ^ low
    bits = (bits ^ (bits >> SHIFT_1)) * FACTOR_1
    bits = (bits ^ (bits >> SHIFT_2)) * FACTOR_2
    bits = (bits ^ (bits >> 16)) + high
    bits = (bits ^ (bits >> SHIFT_1)) * FACTOR_1
    bits = (bits ^ (bits >> SHIFT_2)) * FACTOR_2
    bits = bits ^ (bits >> 16)
    return ((bits >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608)
