"""Noise as a counter-based hash: a pure function of (seed, stream, position, column), in whole tensors.

Two 32-bit words are made from (seed, stream, position) by splitmix64 over a packed counter. Keyed by them, a 32-bit
finaliser (the multiply-xorshift of MurmurHash3) is applied to the column number twice. Integers alone are hashed, so
every device makes the same bits; 23 of them are kept, so that all make the same float32 and none is rounded to 1.
"""

from typing import TypeVar

import torch
from torch import Tensor

# disjoint streams: sharing noise between drafting, acceptance and recovery would bias the output
STREAMS = TARGET_STREAM, DRAFT_STREAM, ACCEPT_STREAM, RECOVER_STREAM = range(4)

SEED_STEP, COUNTER_STEP, OFFSET = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0x632BE59BD9B4E019
KEY_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # (shift, multiplier) of splitmix64
COLUMN_ROUNDS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))  # of MurmurHash3

Number = TypeVar("Number", int, Tensor)


def keys(seed: Number, stream: int, position: Number) -> tuple[Number, Number]:
    """Two words within [-2**31, 2**31), of integers or of int64 tensors that broadcast.

    The lowest 64 bits of every intermediate are all that counts: tensors wrap around there, Python's integers grow.
    """
    state = seed * _signed(SEED_STEP, 64) + (position * 4 + stream) * _signed(COUNTER_STEP, 64) + OFFSET
    for shift, multiplier in KEY_ROUNDS:
        state = (state ^ _shifted(state, shift, 64)) * _signed(multiplier, 64)
    state = state ^ _shifted(state, 31, 64)
    return _word(state), _word(state >> 32)


def uniform(low: Tensor, high: Tensor, columns: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), [..., C], from `keys` as int32 [..., 1] and ``columns`` [C], integers."""
    bits = _mix(_mix(columns.int() ^ low) + high)
    return (_shifted(bits, 9, 32).float() + 0.5) * 2.0**-23


def row_noise(seeds: Tensor, stream: int, positions: Tensor, columns: Tensor) -> Tensor:
    """Uniform numbers [B, R, C] of ``seeds`` [B] and ``positions`` [B, R], both int64, at ``columns`` [C]."""
    low, high = (word.to(torch.int32)[..., None] for word in keys(seeds[:, None], stream, positions))  # [B, R, 1]
    return uniform(low, high, columns)


def _mix(bits: Tensor) -> Tensor:
    for shift, multiplier in COLUMN_ROUNDS:
        bits = (bits ^ _shifted(bits, shift, 32)) * _signed(multiplier, 32)
    return bits ^ _shifted(bits, 16, 32)


def _shifted(bits: Number, shift: int, width: int) -> Number:
    """``bits`` of ``width``, signed, shifted right with zeros coming in."""
    return (bits >> shift) & ((1 << (width - shift)) - 1)


def _signed(value: int, width: int) -> int:
    """The signed number that has the bits of ``value``."""
    return value - (value >> (width - 1) << width)


def _word(state: Number) -> Number:
    """The lowest 32 bits as a signed number."""
    return ((state & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
