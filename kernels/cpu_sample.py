"""Drawing the target's own token of a row on a CPU, in one call.

    token = argmax_v (logit / temperature - log(-log u))     over the columns v that top-k, top-p and min-p leave

u is `noise_reference`'s number of the column, made for those columns alone, which are mostly few. Its logarithms are
`cpu_noise`'s, as in drafts: a draft from the target's own logits is the target's own token.

The k largest are found without sorting. Columns fall into V / 16 classes, by what a division leaves of their number;
the k-th largest of the classes' maxima is a bound that k columns reach and few others, and those few are put in order.
"""

from typing import Any

import numpy as np
from numba import njit
from torch import Tensor

from . import cpu_math as cm
from .cpu_noise import above, gumbel
from .cpu_team import call, compiled, num_threads, thread_number

MEMBERS = 16  # columns of a class
MAX_TOP_K = 256
MAX_KEPT = MEMBERS * MAX_TOP_K  # columns put in order; where more are equal, the reference draws
CHUNK = 1024  # columns drawn from at once where no filter leaves few

# the words of a call: addresses and sizes
NUM_WORDS = 9
LOGITS, COUNT, LOW, HIGH, SETTINGS, ROOM, SCORES, TOKENS, NUM_THREADS = range(NUM_WORDS)


@njit
def _as_integer(x: Any) -> Any:
    """Integers in the order of the numbers ``x``; the same again leads back."""
    word = np.int32(x)
    return np.int32(word ^ ((word >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit
def _kth(values: Any, count: int, k: int) -> Any:
    """The k-th largest of ``values``, bit by bit from the highest."""
    found = np.int64(-(2**31))
    for bit in range(31, -1, -1):
        more, number = np.int32(found + (np.int64(1) << bit)), 0
        for i in range(count):
            number += _as_integer(np.float32(values[i]).view(np.int32)) >= more
        found = np.int64(more) if number >= k else found
    return np.int32(_as_integer(found)).view(np.float32)


@njit
def _make_maxima(values: Any, count: int, most: Any, classes: int) -> None:
    """The largest of each class: column v is of class v % ``classes``."""
    for c in range(classes):
        most[c] = values[c]
    for begin in range(classes, count, classes):
        for c in range(min(classes, count - begin)):
            value = values[begin + c]
            most[c] = value if value > most[c] else most[c]


@njit
def _keep(values: Any, kept: Any, number: int, column: int) -> None:
    """Put ``column`` to ``number`` others in their order: the largest value first, of equals the first column."""
    while number and (
        values[kept[number - 1]] < values[column]
        or (values[kept[number - 1]] == values[column] and kept[number - 1] > column)
    ):
        kept[number] = kept[number - 1]
        number -= 1
    kept[number] = column


@njit
def _keep_largest(values: Any, count: int, k: int, room: int, kept: Any) -> int:
    """Keep the columns of the k largest and of what equals the last of them; -inf has no mass and is left out.

    Returns how many, 0 where they do not fit.
    """
    classes, most, number = -(-count // MEMBERS), cm.floats(room), 0
    _make_maxima(values, count, most, classes)
    floor = _kth(most, classes, k) if k <= classes else np.float32(-np.inf)
    for c in range(classes):
        if most[c] >= floor:
            for column in range(c, count, classes):
                if values[column] >= floor and values[column] > -np.inf:
                    if number == MAX_KEPT:
                        return 0
                    _keep(values, kept, number, column)
                    number += 1
    while number > k and values[kept[number - 1]] < values[kept[k - 1]]:
        number -= 1
    return number


@njit(error_model="numpy")
def _nucleus(values: Any, kept: Any, number: int, total: float, temperature: float, top_p: float, min_p: float) -> int:
    """How many of the ``kept`` columns, in order, top-p and min-p leave of a mass of ``total`` largest ones."""
    before, count = np.float32(0), 0
    while count < number and (top_p == 1 or before < top_p * total):
        share = cm.exp((values[kept[count]] - values[kept[0]]) / temperature)
        if share < min_p:  # of the largest's, which is 1
            break
        before += share
        count += 1
    return count


@njit(error_model="numpy")
def _draw_kept(a: Any, values: Any, settings: Any) -> int:
    """The token drawn from what the filters leave, where they leave few columns; else -1."""
    kept, low, high, temperature = cm.words(a[ROOM]), np.uint32(a[LOW]), np.uint32(a[HIGH]), settings[0]
    top_k, top_p, min_p = np.int64(settings[1]), settings[2], settings[3]
    number = _keep_largest(values, a[COUNT], top_k or MAX_TOP_K, a[ROOM] + 8 * MAX_KEPT, kept)
    if number and (top_p < 1 or min_p > 0):
        top, total, most = values[kept[0]], np.float32(0), number
        if top_k:
            for i in range(number):
                total += cm.exp((values[kept[i]] - top) / temperature)
        elif top_p < 1:
            total = above(values, a[COUNT], np.float32(-np.inf), top, np.float32(1) / temperature)[1]
        number = _nucleus(values, kept, number, total, temperature, top_p, min_p)
        if not top_k and number == most >= MAX_TOP_K:
            return -1  # there may be more
    best, token = np.float32(-np.inf), -1
    for i in range(number):
        score = (values[kept[i]] - values[kept[0]]) / temperature + gumbel(np.uint32(kept[i]), low, high)
        if score > best:
            best, token = score, kept[i]
    return token


@njit(fastmath=cm.FAST, error_model="numpy")
def _make_scores(
    values: Any, begin: int, count: int, top: float, temperature: float, low: Any, high: Any, scores: int
) -> None:
    """How far the logits of ``count`` columns from ``begin`` on are from the largest, with their noise."""
    cm.stay_apart()
    made = cm.floats(scores)
    for i in range(count):
        made[i] = (values[begin + i] - top) / temperature + gumbel(np.uint32(begin + i), low, high)


@njit
def _draw_all(a: Any, values: Any, temperature: float, thread: int) -> None:
    """A thread's best of all columns."""
    low, high, room = np.uint32(a[LOW]), np.uint32(a[HIGH]), a[ROOM] + 4 * CHUNK * thread
    best, token, made = np.float32(-np.inf), -1, cm.floats(room)
    top = cm.largest(a[LOGITS], a[COUNT])  # taken off, or a large logit would swallow its noise
    begin, stop = a[COUNT] * thread // a[NUM_THREADS], a[COUNT] * (thread + 1) // a[NUM_THREADS]
    while begin < stop:
        count = min(CHUNK, stop - begin)
        _make_scores(values, begin, count, top, temperature, low, high, room)
        if cm.largest(room, count) > best:
            best = cm.largest(room, count)
            for i in range(count - 1, -1, -1):
                token = begin + i if made[i] == best else token
        begin += count
    cm.floats(a[SCORES])[thread], cm.words(a[TOKENS])[thread] = best, token


@compiled
def _run_draw(address: int) -> None:
    a = cm.words(address)
    settings, values = cm.floats(a[SETTINGS]), cm.floats(a[LOGITS])
    if settings[1] or settings[2] < 1 or settings[3] > 0:
        cm.words(a[TOKENS])[0] = _draw_kept(a, values, settings)
    else:
        _draw_all(a, values, settings[0], thread_number() if a[NUM_THREADS] > 1 else 0)


def sample(
    logits: Tensor, keys: tuple[int, int], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> int | None:
    """The token drawn from ``logits`` [V] at a ``temperature`` > 0, with the noise of `noise_reference`'s ``keys``.

    None where it takes the reference: the filters leave too many columns, or none has a finite logit.
    """
    logits, count = logits.float().contiguous(), len(logits)
    top_k = top_k if top_k < count else 0
    if top_k > MAX_TOP_K:
        return None
    is_filtered = top_k > 0 or top_p < 1 or min_p > 0
    threads = 1 if is_filtered else num_threads()
    room = np.empty(2 * MAX_KEPT + -(-count // MEMBERS) if is_filtered else CHUNK * threads, dtype=np.float32)
    settings = np.array([temperature, top_k, top_p, min_p], dtype=np.float32)
    scores, tokens = np.empty(threads, dtype=np.float32), np.empty(threads, dtype=np.int64)
    record = np.array([
        logits.data_ptr(), count, *keys, settings.ctypes.data, room.ctypes.data, scores.ctypes.data,
        tokens.ctypes.data, threads,
    ], dtype=np.int64)  # fmt: skip
    call(_run_draw, record.ctypes.data, threads)
    token = int(tokens[scores.argmax() if threads > 1 else 0])
    return None if token < 0 else token
