"""The compiled steps of `cpu_draft`: trunk, bridge, block, norm, vocabulary, argmax, k times or with k rows.

A draft step reads few weights, so whatever stands between two products would cost more than they do. The steps are
those of `cpu_layers`, on calls prepared for the trunk and the borrowed block.

Shapes: D hidden, n recalled layers, V_d drafted vocabulary, r rank of the correction, K drafts at most, M rows that the
block has not seen (the last is the tap; behind it a parallel draft has K - 1 more).
"""

import math
from typing import Any

import numpy as np
from numba import njit

from . import cpu_math as cm
from . import cpu_noise
from .cpu_layers import (
    ANCESTORS,
    FIRST,
    HIDDEN,
    IS_WIDE,
    NUM_LAYERS,
    NUM_ROWS,
    NUM_THREADS,
    POSITIONS,
    SCALARS,
    SIZE,
    run_layer,
)
from .cpu_team import compiled, thread_number, wait

# the words of a call: prepared calls, addresses, sizes
NUM_WORDS = 48
(TRUNKS, BLOCK_FIRST, BLOCK_NEXT, EMBEDDING, MAPS, NUM_INPUTS, NORM, VOCAB, NUM_VOCAB, VOCAB_IDS, INPUTS, TAPS,
 TOKENS, LOGITS, NORMED, NUM_DRAFTS, POSITION, SEEN, LAST_POSITION, TOPS, BEFORE, AFTER, RANK, ROOM, BIASES,
 CONFIDENCE, CHANCE, STOP, NUM_DRAWN, AGAIN, NUM_STEPS, PACKED, PACKED_SIZE, END_IDS, NUM_END_IDS, WIDTH, LEAST,
 BRANCHES, NUM_BRANCHES, SEES, SCALES, NOISE, FACTOR, LOOKED, NUM_LOOKED, MOST, PARENTS,
 NUM_NODES) = range(NUM_WORDS)  # fmt: skip


@njit
def _argmax(values: Any, count: int, tops: Any, place: int) -> int:
    """Index of the largest of ``values``, kept in tops[place]; NaN there if any is NaN."""
    best, top = 0, values[0]
    is_sound = True
    for i in range(count):
        is_sound = is_sound and values[i] == values[i]
        if values[i] > top:
            best, top = i, values[i]
    tops[place] = top if is_sound else np.float32(np.nan)
    return best


@njit
def _is_end(d: Any, token: int) -> bool:
    """Whether ``token`` ends the text."""
    found = False
    for i in range(d[NUM_END_IDS]):
        found = found or cm.words(d[END_IDS])[i] == token
    return found


@njit
def _branch(d: Any, logits: int, count: int, best: int, step: int) -> bool:
    """Note the siblings of the token at ``best``: at most WIDTH - 1, the likeliest first, each with a chance >= LEAST.

    A chance is the token's share times those of the chain before it. One stands in BRANCHES as the step and its place
    among the drafted tokens. False, and none, where behind the first step the token itself has less.
    """
    values, found, begin, chances = cm.floats(logits), cm.words(d[BRANCHES]), d[NUM_BRANCHES], cm.floats(d[LEAST])
    total, least, reach, end = cm.mass(logits, count, values[best]), chances[0], chances[1], begin
    chances[1] = reach / total
    if step and chances[1] < least:
        return False
    floor = values[best] + np.float32(math.log(least / reach * total)) if least > 0 else np.float32(-np.inf)
    for place in range(count):
        if values[place] >= floor and place != best:
            at = end
            while at > begin and values[found[2 * at - 1]] < values[place]:
                at -= 1
            if at - begin < d[WIDTH] - 1:
                end = min(end + 1, begin + d[WIDTH] - 1)
                for i in range(end - 1, at, -1):
                    found[2 * i + 1] = found[2 * i - 1]
                found[2 * at], found[2 * at + 1] = step, place
    for i in range(begin, end):
        found[2 * i] = step
    d[NUM_BRANCHES] = end
    return True


@njit
def _grow(d: Any) -> None:
    """Lay out what is drafted behind the last token: the chain, its siblings, and what was looked up, if there is room.

    What was looked up is a chain from the root on; as far as the tree has it, it stands once.
    """
    tokens, parents, found, looked = cm.words(d[TOKENS]), cm.words(d[PARENTS]), cm.words(d[BRANCHES]), d[LOOKED]
    nodes = d[NUM_DRAWN]
    for r in range(1, nodes + 1):
        parents[r] = r - 1
    for i in range(d[NUM_BRANCHES]):
        nodes += 1
        place = found[2 * i + 1]
        tokens[nodes], parents[nodes] = cm.words(d[VOCAB_IDS])[place] if d[VOCAB_IDS] else place, found[2 * i]
    row = 0
    for i in range(d[NUM_LOOKED]):
        token, twin = cm.words(looked)[i], 0
        for r in range(1, nodes + 1):
            if twin == 0 and parents[r] == row and tokens[r] == token:
                twin = r
        if twin == 0:
            if nodes >= d[MOST]:
                break
            nodes += 1
            tokens[nodes], parents[nodes], twin = token, row, nodes
        row = twin
    d[NUM_NODES] = nodes


@njit
def _run_tree(d: Any, thread: int) -> None:
    """The first layers on the last token and all drafted ones, as `_grow` laid them out; their taps are kept."""
    rows = 1 + d[NUM_NODES]
    a = cm.words(cm.words(d[TRUNKS])[rows - 1])
    size = a[SIZE]
    if thread == 0:
        a[ANCESTORS] = d[SEES]
        tokens, sees, parents = cm.words(d[TOKENS]), cm.octets(d[SEES]), cm.words(d[PARENTS])
        for r in range(rows):
            depth = 0
            for c in range(rows):
                above = r > 0 and sees[parents[r] * rows + c] == 1
                sees[r * rows + c] = c == r or above
                depth += above
            _widen(d[EMBEDDING], tokens[r] * size, a[HIDDEN] + 4 * r * size, size, a[IS_WIDE])
            cm.words(a[POSITIONS])[r] = min(d[POSITION] + depth, d[LAST_POSITION])
        a[FIRST] = d[POSITION]
    wait(a[NUM_THREADS])
    for number in range(a[NUM_LAYERS]):
        run_layer(a, number, thread)
    if thread == 0:
        cm.copy(a[HIDDEN], d[TAPS], rows * size)


@njit
def _widen(table: int, place: int, y: int, count: int, is_wide: int) -> None:
    """y = ``count`` values of ``table`` from ``place`` on, in float32."""
    if is_wide:
        cm.copy(table + 4 * place, y, count)
    else:
        short, made = cm.shorts(table + 2 * place), cm.floats(y)
        for i in range(count):
            made[i] = cm.widened(short[i])


@njit
def _multiply(
    d: Any, x: int, weight: int, scales: int, y: int, rows: int, size: int, count: int, begin: int, end: int,
    stride: int, is_wide: int, thread: int,
) -> None:  # fmt: skip
    """`product` with a weight of the model's dtype, or in eight bits where there are ``scales``."""
    if scales:
        cm.byte_product(x, weight, scales, y, rows, size, begin, end, stride, _packed(d, thread))
    else:
        cm.product(x, weight, y, rows, size, count, begin, end, stride, is_wide, _packed(d, thread))


@njit
def _add_noise(d: Any, logits: int, step: int, begin: int, end: int, team: int) -> None:
    """What guesses at the target's own token of this position, where that is drawn; then all wait."""
    if d[NOISE]:
        keys, settings = cm.words(d[NOISE] + 16 * step), cm.floats(d[FACTOR])
        filters, floor = cm.floats(d[FACTOR] + 4), np.float32(-np.inf)
        if filters[0] or filters[1] < 1 or filters[2]:
            wait(team)  # for all of the logits
            count = d[NUM_VOCAB]
            floor = cpu_noise.floor_of(logits, count, cm.largest(logits, count), settings[0], filters)
            wait(team)  # before any of them changes
        cpu_noise.add_noise(logits, d[VOCAB_IDS], begin, end, keys[0], keys[1], settings[4], floor)
    wait(team)


@njit
def _packed(d: Any, thread: int) -> int:
    """A thread's room for the inputs of a product."""
    return d[PACKED] + thread * d[PACKED_SIZE]


@njit
def _run_trunk(d: Any, a: Any, step: int, thread: int) -> None:
    """The first layers on the tokens from ``step`` on, as many as the call has rows; their taps are kept."""
    size, rows = a[SIZE], a[NUM_ROWS]
    if thread == 0:
        for r in range(rows):
            token = cm.words(d[TOKENS])[step + r]
            _widen(d[EMBEDDING], token * size, a[HIDDEN] + 4 * r * size, size, a[IS_WIDE])
            cm.words(a[POSITIONS])[r] = min(d[POSITION] + step + r, d[LAST_POSITION])
        a[FIRST] = d[POSITION] + step
    wait(a[NUM_THREADS])
    for number in range(a[NUM_LAYERS]):
        run_layer(a, number, thread)
    if thread == 0:
        cm.copy(a[HIDDEN], d[TAPS] + 4 * step * size, rows * size)


@njit
def _run_blocks(b: Any, thread: int) -> None:
    """The borrowed layers, on what the bridge made."""
    for number in range(b[NUM_LAYERS]):
        run_layer(b, number, thread)


@njit
def _run_block(d: Any, a: Any, step: int, thread: int) -> None:
    """Bridge, block and norm of ``step``, behind its tap or fed with its token and the state before it.

    Every thread keeps the normed state for itself.
    """
    b = cm.words(d[BLOCK_NEXT] if step else d[BLOCK_FIRST])
    rows, size, is_wide, team = b[NUM_ROWS], b[SIZE], b[IS_WIDE], b[NUM_THREADS]
    last = cm.words(d[BLOCK_FIRST])[NUM_ROWS] - 1  # of the inputs: tap and recalled states of step 1
    is_again, normed = step > 0 and d[AGAIN] != 0, d[NORMED] + 4 * thread * size
    tap = d[INPUTS] + 4 * last * d[NUM_INPUTS]
    if thread == 0:
        b[FIRST] = d[SEEN] + (last + step if step else 0)
        positions = cm.words(b[POSITIONS])
        for r in range(rows):
            positions[r] = min(b[FIRST] + r, d[LAST_POSITION])
        if is_again:
            _widen(d[EMBEDDING], cm.words(d[TOKENS])[step] * size, d[AGAIN], size, is_wide)
            cm.copy(normed, d[AGAIN] + 4 * size, size)
        else:
            cm.copy(a[HIDDEN], tap, size)
    wait(team)
    inputs, num_inputs = (d[AGAIN], 2 * size) if is_again else (tap if step else d[INPUTS], d[NUM_INPUTS])
    begin, end = cm.share(size, thread, team)
    bridge = cm.words(d[MAPS] + 24 * step)
    _multiply(d, inputs, bridge[0], bridge[2], b[HIDDEN], rows, num_inputs, size, begin, end, size, is_wide, thread)
    cm.settle(b[HIDDEN], bridge[1], rows, begin, end, size, is_wide)
    wait(team)
    _run_blocks(b, thread)
    cm.norm(b[HIDDEN] + 4 * (rows - 1) * size, d[NORM], normed, 1, size, cm.floats(b[SCALARS])[1], is_wide)
    if thread == 0:
        d[NUM_STEPS] = step + 1


@njit
def _draw(d: Any, a: Any, step: int, thread: int) -> None:
    """The most probable token behind the normed state of ``step``; it is kept."""
    size, is_wide, team, num_vocab = a[SIZE], a[IS_WIDE], a[NUM_THREADS], d[NUM_VOCAB]
    begin, end = cm.share(num_vocab, thread, team)
    normed, scales = d[NORMED] + 4 * thread * size, d[SCALES]
    _multiply(d, normed, d[VOCAB], scales, d[LOGITS], 1, size, num_vocab, begin, end, 0, is_wide, thread)
    cm.settle(d[LOGITS], 0, 1, begin, end, 0, is_wide)
    _add_noise(d, d[LOGITS], step, begin, end, team)
    if thread == 0:
        best = _argmax(cm.floats(d[LOGITS]), num_vocab, cm.floats(d[TOPS]), step)
        cm.words(d[TOKENS])[step + 1] = cm.words(d[VOCAB_IDS])[best] if d[VOCAB_IDS] else best
        if d[WIDTH] == 1 or _branch(d, d[LOGITS], num_vocab, best, step):
            d[NUM_DRAWN] = step + 1
    wait(team)


@njit
def _run_rows(d: Any, a: Any, thread: int) -> None:
    """Bridge, block, norm and vocabulary behind the tap of step 0, a row a draft; logits [K, V_d] are kept."""
    b, count = cm.words(d[BLOCK_FIRST]), d[NUM_DRAFTS]
    size, is_wide, team, num_inputs = b[SIZE], b[IS_WIDE], b[NUM_THREADS], d[NUM_INPUTS]
    last = b[NUM_ROWS] - count  # the row of the tap, the first draft's
    tap = d[INPUTS] + 4 * last * num_inputs
    if thread == 0:
        b[FIRST] = d[SEEN]
        for r in range(b[NUM_ROWS]):
            cm.words(b[POSITIONS])[r] = min(b[FIRST] + r, d[LAST_POSITION])
        cm.copy(a[HIDDEN], tap, size)
    wait(team)
    begin, end = cm.share(size, thread, team)
    for step in range(count):
        bridge, rows = cm.words(d[MAPS] + 24 * step), 1 if step else last + 1
        x, y = tap if step else d[INPUTS], b[HIDDEN] + (4 * (last + step) * size if step else 0)
        _multiply(d, x, bridge[0], bridge[2], y, rows, num_inputs, size, begin, end, size, is_wide, thread)
        cm.settle(y, bridge[1], rows, begin, end, size, is_wide)
    wait(team)
    _run_blocks(b, thread)
    normed, num_vocab = d[NORMED] + 4 * thread * count * size, d[NUM_VOCAB]
    cm.norm(b[HIDDEN] + 4 * last * size, d[NORM], normed, count, size, cm.floats(b[SCALARS])[1], is_wide)
    begin, end = cm.share(num_vocab, thread, team)
    vocab, scales = d[VOCAB], d[SCALES]
    _multiply(d, normed, vocab, scales, d[LOGITS], count, size, num_vocab, begin, end, num_vocab, is_wide, thread)
    cm.settle(d[LOGITS], 0, count, begin, end, num_vocab, is_wide)
    wait(team)


@njit
def _chance(d: Any, state: int, size: int, is_wide: int) -> float:
    """What the exit gives a draft to stand, by its normed ``state``."""
    normed, weight = cm.floats(state), cm.floats(d[CONFIDENCE])
    total = np.float32(0)
    for i in range(size):
        total += normed[i] * weight[i]
    score = cm.rounded(total + cm.floats(d[CHANCE])[0], is_wide)
    return np.float32(1) / (np.float32(1) + cm.exp(min(-score, np.float32(88))))


@njit
def _draw_rows(d: Any, a: Any, thread: int) -> None:
    """The drafts, one after another, each told the one before by a bias; how many is kept."""
    num_vocab, rank, team, is_wide, place = d[NUM_VOCAB], d[RANK], a[NUM_THREADS], a[IS_WIDE], 0
    begin, end = cm.share(num_vocab, thread, team)
    own, survival = d[ROOM] + 4 * thread * rank, np.float32(1)
    for step in range(d[NUM_DRAFTS]):
        if d[STOP]:
            survival *= _chance(d, d[NORMED] + 4 * step * a[SIZE], a[SIZE], is_wide)
            if survival < cm.floats(d[CHANCE])[1]:
                break
        logits = d[LOGITS] + 4 * step * num_vocab
        if step and rank:
            _widen(d[BEFORE], place * rank, own, rank, is_wide)
            cm.product(own, d[AFTER], d[BIASES], 1, rank, num_vocab, begin, end, 0, is_wide, _packed(d, thread))
            cm.settle(d[BIASES], 0, 1, begin, end, 0, is_wide)
            values, biases = cm.floats(logits), cm.floats(d[BIASES])
            for i in range(begin, end):
                values[i] += biases[i]
        _add_noise(d, logits, step, begin, end, team)
        place = _argmax(cm.floats(logits), num_vocab, cm.floats(d[TOPS]), step)  # by each thread: it is soon done
        if thread == 0:
            cm.words(d[TOKENS])[step + 1] = cm.words(d[VOCAB_IDS])[place] if d[VOCAB_IDS] else place
            if d[WIDTH] == 1 or _branch(d, logits, num_vocab, place, step):
                d[NUM_DRAWN] = step + 1
        wait(team)
        if d[NUM_DRAWN] == step or _is_end(d, cm.words(d[TOKENS])[step + 1]):
            break


@compiled
def run_one_pass(address: int) -> None:
    """A draft from one pass of the block over a row a draft."""
    d = cm.words(address)
    a = cm.words(cm.words(d[TRUNKS])[0])
    thread = thread_number() if a[NUM_THREADS] > 1 else 0
    _run_trunk(d, a, 0, thread)
    _run_rows(d, a, thread)
    _draw_rows(d, a, thread)
    wait(a[NUM_THREADS])
    if thread == 0:
        _grow(d)
    wait(a[NUM_THREADS])
    if d[NUM_NODES] > d[NUM_DRAWN]:
        _run_tree(d, thread)
    elif d[NUM_DRAWN]:
        _run_trunk(d, cm.words(cm.words(d[TRUNKS])[d[NUM_DRAWN] - 1]), 1, thread)
    wait(a[NUM_THREADS])


@compiled
def run_steps(address: int) -> None:
    """A chain, or a recursive draft: the block once a token."""
    d = cm.words(address)
    a = cm.words(cm.words(d[TRUNKS])[0])
    thread, survival = thread_number() if a[NUM_THREADS] > 1 else 0, np.float32(1)
    for step in range(d[NUM_DRAFTS]):
        if step == 0 or d[AGAIN] == 0:
            _run_trunk(d, a, step, thread)
        _run_block(d, a, step, thread)
        if d[STOP]:
            survival *= _chance(d, d[NORMED] + 4 * thread * a[SIZE], a[SIZE], a[IS_WIDE])
            if survival < cm.floats(d[CHANCE])[1]:
                break
        _draw(d, a, step, thread)
        if d[NUM_DRAWN] == step or _is_end(d, cm.words(d[TOKENS])[step + 1]):
            break
    wait(a[NUM_THREADS])
    if thread == 0:
        _grow(d)
    wait(a[NUM_THREADS])
    count = d[NUM_DRAWN]
    if d[NUM_NODES] > count:
        _run_tree(d, thread)
    elif d[AGAIN] == 0 and count == d[NUM_STEPS]:
        _run_trunk(d, a, count, thread)  # the last draft's tap, which buys the bonus token
    elif d[AGAIN] != 0 and count:
        _run_trunk(d, cm.words(cm.words(d[TRUNKS])[count - 1]), 1, thread)
    wait(a[NUM_THREADS])
