"""Drafting a greedy chain on a CPU, in one call: k times trunk, bridge, block, norm, vocabulary, argmax.

A draft step reads few weights, so whatever stands between two products would cost more than they do. The steps are
those of `cpu_layers`, on calls prepared for the trunk (one row) and the borrowed block.

Shapes: D hidden, n recalled layers, V_d drafted vocabulary, M rows that the block has not seen (the last is the tap).
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from . import cpu_math as cm
from .cpu_layers import (
    FIRST,
    HIDDEN,
    IS_WIDE,
    LAYER_WORDS,
    LAYERS,
    NUM_LAYERS,
    NUM_ROWS,
    NUM_THREADS,
    POSITIONS,
    SCALARS,
    SIZE,
    LayerCall,
    call,
    compiled,
    run_layer,
    thread_number,
    wait,
)

# the words of a call: prepared calls, addresses, sizes
(TRUNK, BLOCK_FIRST, BLOCK_NEXT, EMBEDDING, MAPS, NUM_INPUTS, NORM, VOCAB, NUM_VOCAB, VOCAB_IDS, INPUTS, TAPS, TOKENS,
 LOGITS, NORMED, NUM_DRAFTS, POSITION, SEEN, LAST_POSITION, TOPS) = range(20)  # fmt: skip


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
def _run_trunk(d: Any, a: Any, step: int, thread: int) -> None:
    """The first layers on token ``step``, at its position; its tap is kept."""
    size, embedding = a[SIZE], d[EMBEDDING]
    if thread == 0:
        states, token = cm.floats(a[HIDDEN]), cm.words(d[TOKENS])[step]
        if a[IS_WIDE]:
            cm.copy(embedding + 4 * token * size, a[HIDDEN], size)
        else:
            row = cm.shorts(embedding + 2 * token * size)
            for i in range(size):
                states[i] = cm.widened(row[i])
        a[FIRST] = d[POSITION] + step
        cm.words(a[POSITIONS])[0] = min(d[POSITION] + step, d[LAST_POSITION])
    wait(a[NUM_THREADS])
    for number in range(a[NUM_LAYERS]):
        run_layer(a, cm.words(a[LAYERS] + 8 * LAYER_WORDS * number), thread)
    if thread == 0:
        cm.copy(a[HIDDEN], d[TAPS] + 4 * step * size, size)


@njit
def _run_head(d: Any, a: Any, step: int, thread: int) -> None:
    """Bridge, block, norm and vocabulary behind the tap of ``step``; the next token is kept."""
    b = cm.words(d[BLOCK_NEXT] if step else d[BLOCK_FIRST])
    rows, size, is_wide, team, num_inputs = b[NUM_ROWS], b[SIZE], b[IS_WIDE], b[NUM_THREADS], d[NUM_INPUTS]
    inputs = d[INPUTS]
    if thread == 0:
        last = cm.words(d[BLOCK_FIRST])[NUM_ROWS] - 1  # of the inputs: tap and recalled states of step 1
        if step:
            inputs += 4 * last * num_inputs
        b[FIRST] = d[SEEN] + (last + step if step else 0)
        positions = cm.words(b[POSITIONS])
        for r in range(rows):
            positions[r] = min(b[FIRST] + r, d[LAST_POSITION])
        cm.copy(a[HIDDEN], d[INPUTS] + 4 * last * num_inputs, size)
    elif step:
        inputs += 4 * (cm.words(d[BLOCK_FIRST])[NUM_ROWS] - 1) * num_inputs
    wait(team)
    begin, end = cm.share(size, thread, team)
    bridge = cm.words(d[MAPS] + 16 * step)
    cm.product(inputs, bridge[0], b[HIDDEN], rows, num_inputs, size, begin, end, size, is_wide)
    cm.settle(b[HIDDEN], bridge[1], rows, begin, end, size, is_wide)
    wait(team)
    run_layer(b, cm.words(b[LAYERS]), thread)
    normed = d[NORMED] + 4 * thread * size
    cm.norm(b[HIDDEN] + 4 * (rows - 1) * size, d[NORM], normed, 1, size, cm.floats(b[SCALARS])[1], is_wide)
    begin, end = cm.share(d[NUM_VOCAB], thread, team)
    cm.product(normed, d[VOCAB], d[LOGITS], 1, size, d[NUM_VOCAB], begin, end, 0, is_wide)
    cm.settle(d[LOGITS], 0, 1, begin, end, 0, is_wide)
    wait(team)
    if thread == 0:
        best = _argmax(cm.floats(d[LOGITS]), d[NUM_VOCAB], cm.floats(d[TOPS]), step)
        cm.words(d[TOKENS])[step + 1] = cm.words(d[VOCAB_IDS])[best] if d[VOCAB_IDS] else best
    wait(team)


@compiled
def _run_draft(address: int) -> None:
    d = cm.words(address)
    a = cm.words(d[TRUNK])
    thread = thread_number() if a[NUM_THREADS] > 1 else 0
    for step in range(d[NUM_DRAFTS]):
        _run_trunk(d, a, step, thread)
        _run_head(d, a, step, thread)
    _run_trunk(d, a, d[NUM_DRAFTS], thread)  # the last draft's tap, which buys the bonus token
    wait(a[NUM_THREADS])


class DraftCall:
    """A head's weights and the room that its drafts need.

    ``embedding`` [V, D], ``maps`` a bridge per step (weight [D, (1 + n) D], bias [D] in float32), ``norm`` [D] in
    float32, ``vocabulary`` [V_d, D] and ``vocab_ids`` [V_d] (None: all of them), ``draft_len`` k at most.
    """

    def __init__(
        self,
        embedding: Tensor,
        maps: list[tuple[Tensor, Tensor]],
        norm: Tensor,
        vocabulary: Tensor,
        vocab_ids: Tensor | None,
        draft_len: int,
        threads: int,
    ) -> None:
        size, num_inputs = embedding.shape[1], maps[0][0].shape[1]
        self.num_inputs, self.threads, self.draft_len = num_inputs, threads, draft_len
        self._kept = (embedding, maps, norm, vocabulary, vocab_ids)
        steps = [maps[min(step, len(maps) - 1)] for step in range(draft_len)]
        self._maps = np.array([[w.data_ptr(), b.data_ptr()] for w, b in steps], dtype=np.int64)
        self._taps, self._logits = torch.empty(1, draft_len + 1, size), torch.empty(len(vocabulary))
        self._normed, self._inputs = torch.empty(threads, size), torch.empty(0, num_inputs)
        self._tokens, self._tops = np.zeros(draft_len + 1, dtype=np.int64), np.zeros(draft_len, dtype=np.float32)
        self._record = np.zeros(20, dtype=np.int64)
        for word, value in {
            EMBEDDING: embedding.data_ptr(), MAPS: self._maps.ctypes.data, NUM_INPUTS: num_inputs,
            NORM: norm.data_ptr(), VOCAB: vocabulary.data_ptr(), NUM_VOCAB: len(vocabulary),
            TAPS: self._taps.data_ptr(),
            VOCAB_IDS: 0 if vocab_ids is None else vocab_ids.data_ptr(), TOKENS: self._tokens.ctypes.data,
            LOGITS: self._logits.data_ptr(), NORMED: self._normed.data_ptr(), TOPS: self._tops.ctypes.data,
        }.items():  # fmt: skip
            self._record[word] = value
        self._address = self._record.ctypes.data

    def inputs(self, rows: int) -> Tensor:
        """Room for the bridge's inputs, [rows, (1 + n) D] in float32; the tap's part of the last row is filled in."""
        if len(self._inputs) < rows:
            self._inputs = torch.empty(rows, self.num_inputs)
            self._record[INPUTS] = self._inputs.data_ptr()
        return self._inputs[:rows]

    def __call__(
        self, trunk: LayerCall, block: LayerCall, block_next: LayerCall, token: int, position: int, seen: int,
        last_position: int, num_drafts: int,
    ) -> tuple[list[int], list[float], Tensor]:  # fmt: skip
        """Draft behind ``token`` at ``position``; the block has seen ``seen`` positions.

        Returns the drafted tokens, the largest logit of each step (NaN where one was), and taps [1, k + 1, D], which
        the next call overwrites.
        """
        record = self._record
        record[TRUNK], record[BLOCK_FIRST], record[BLOCK_NEXT] = trunk.address, block.address, block_next.address
        record[NUM_DRAFTS], record[POSITION], record[SEEN] = num_drafts, position, seen
        record[LAST_POSITION], self._tokens[0] = last_position, token
        call(_run_draft, self._address, self.threads)
        return (
            self._tokens[1 : num_drafts + 1].tolist(),
            self._tops[:num_drafts].tolist(),
            self._taps[:, : num_drafts + 1],
        )
