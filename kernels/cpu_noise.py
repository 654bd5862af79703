"""Drawing a draft's tokens on a CPU: what the filters leave of the logits, plus the noise of the target's own draws
(`cpu_sample`). The numbers are `noise_reference`'s. Filters are thresholds on the logits, found by halving an interval,
so that nothing is sorted.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from . import cpu_math as cm


@njit(inline="always")
def log(x: Any) -> Any:
    """ln x for normal x > 0 in float32, near 1 as exact as elsewhere: of 2^e m with m on [sqrt .5, sqrt 2]."""
    bits = np.float32(x).view(np.int32)
    m = np.int32((bits & np.int32(0x7FFFFF)) | np.int32(0x3F800000)).view(np.float32)
    is_large = m > np.float32(1.41421356)
    f = (m * np.float32(0.5) if is_large else m) - np.float32(1)
    e = np.float32((bits >> np.int32(23)) - np.int32(126 if is_large else 127))
    p = np.float32(7.0376836292e-2)
    p = p * f - np.float32(1.1514610310e-1)
    p = p * f + np.float32(1.1676998740e-1)
    p = p * f - np.float32(1.2420140846e-1)
    p = p * f + np.float32(1.4249322787e-1)
    p = p * f - np.float32(1.6668057665e-1)
    p = p * f + np.float32(2.0000714765e-1)
    p = p * f - np.float32(2.4999993993e-1)
    p = p * f + np.float32(3.3333331174e-1)
    z = f * f
    rest = p * f * z - np.float32(2.12194440e-4) * e - np.float32(0.5) * z
    return f + rest + np.float32(0.693359375) * e


@njit(inline="always")
def _mixed(bits: Any) -> Any:
    """`noise_reference`'s rounds over a column number."""
    bits = np.uint32((bits ^ (bits >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    bits = np.uint32((bits ^ (bits >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(bits ^ (bits >> np.uint32(16)))


@njit(inline="always")
def gumbel(column: Any, low: Any, high: Any) -> Any:
    """-log(-log u) of the column's number under the keys ``low`` and ``high``, all three uint32."""
    bits = _mixed(np.uint32(_mixed(np.uint32(column ^ low)) + high))
    u = (np.float32(np.int32(bits >> np.uint32(9))) + np.float32(0.5)) * np.float32(2.0**-23)
    return -log(-log(u))


@njit(fastmath=cm.FAST)
def above(values: Any, count: int, floor: float, top: float, factor: float) -> tuple[int, Any]:
    """How many of ``values`` are at least ``floor``, and sum e^(factor * (value - top)) over them."""
    number, total = 0, np.float32(0)
    for i in range(count):
        is_in = values[i] >= floor
        number += is_in
        total += cm.exp(factor * (values[i] - top)) if is_in else np.float32(0)
    return number, total


@njit
def floor_of(logits: int, count: int, top: float, factor: float, filters: Any) -> Any:
    """The smallest logit that top-k, top-p and min-p leave, ``filters`` in this order, to a 2^20th of their span."""
    values, most, share, least = cm.floats(logits), filters[0], filters[1], filters[2]
    floor = np.float32(-np.inf)
    for which in range(2):
        if (most if which == 0 else share < 1) and top == top:
            low, high = np.float32(top - np.float32(64) / factor), np.float32(top)  # e^-64 of the top's share
            _, whole = above(values, count, floor, top, factor)
            for _ in range(20):
                middle = np.float32(0.5) * (low + high)
                number, total = above(values, count, max(middle, floor), top, factor)
                is_enough = number >= most if which == 0 else total >= share * whole
                low, high = (middle, high) if is_enough else (low, middle)
            floor = max(floor, low)
    if least > 0:
        floor = max(floor, np.float32(top + np.float32(math.log(least)) / factor))
    return floor


@njit(fastmath=cm.FAST)
def add_noise(logits: int, ids: int, begin: int, end: int, low: int, high: int, scale: float, floor: float) -> None:
    """logits = logits + scale * Gumbel noise of `noise_reference`'s numbers at columns ``ids`` (0: their places).

    Those below ``floor`` become the lowest of all.
    """
    cm.stay_apart()
    values, columns, first, second = cm.floats(logits), cm.words(ids), np.uint32(low), np.uint32(high)
    for i in range(begin, end):
        column = np.uint32(columns[i]) if ids else np.uint32(i)
        noisy = values[i] + scale * gumbel(column, first, second)
        values[i] = np.float32(-3e38) if values[i] < floor else noisy  # NaN stays
