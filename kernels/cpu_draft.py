"""Drafting on a CPU, in one call: trunk, bridge, block, norm, vocabulary, argmax, k times or with k rows.

A draft step reads few weights, so whatever stands between two products would cost more than they do. The steps are
those of `cpu_layers`, on calls prepared for the trunk and the borrowed block.

Shapes: D hidden, n recalled layers, V_d drafted vocabulary, r rank of the correction, K drafts at most, M rows that the
block has not seen (the last is the tap; behind it a parallel draft has K - 1 more).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import cpu_draft_steps as w
from .cpu_dot import BLOCK, BYTES, HAS_PAIRS, STEP
from .cpu_layers import LayerCall
from .cpu_team import call

_floats = functools.partial(torch.empty, dtype=torch.float32)  # whatever torch's default is: kernels go by addresses


@dataclass(frozen=True)
class Compressed:
    """A weight [O, I] in eight bits times ``scales`` [O], or as it was."""

    weight: Tensor
    scales: Tensor | None

    @property
    def addresses(self) -> tuple[int, int]:
        return self.weight.data_ptr(), 0 if self.scales is None else self.scales.data_ptr()


def compressed(weight: Tensor) -> Compressed:
    """``weight`` [O, I] rounded to eight bits a row, where that is quicker to multiply with: a guess may be rough."""
    if not HAS_PAIRS or weight.dtype != torch.bfloat16 or weight.shape[1] % STEP[BYTES] or len(weight) % BLOCK:
        return Compressed(weight, None)
    scales = weight.abs().amax(dim=1).float().clamp(min=1e-30) / 127
    return Compressed((weight.float() / scales[:, None]).round().to(torch.int8), scales)


@dataclass(frozen=True)
class DraftHead:
    """A head's weights, in the model's dtype unless said otherwise.

    ``embedding`` [V, D], ``maps`` a bridge per step (weight [D, (1 + n) D], bias [D] in float32; of a recursive draft
    that of step 1, and one of weight [D, 2 D]), ``norm`` [D] in float32, ``vocabulary`` [V_d, D] and ``vocab_ids``
    [V_d] (None: all of them), ``confidence``, weight [D] and bias [1] in float32. Of a draft from one pass also
    ``correction``, the tables [V_d, r] of the token before and of the token after. Maps and vocabulary are as
    `compressed` gives them.
    """

    embedding: Tensor
    maps: list[tuple["Compressed", Tensor]]
    norm: Tensor
    vocabulary: "Compressed"
    vocab_ids: Tensor | None
    is_one_pass: bool = False  # parallel, or of a single token
    is_recursive: bool = False
    correction: tuple[Tensor, Tensor] | None = None
    confidence: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Drafted:
    """What a call made."""

    tokens: list[int]  # a chain of K, then the siblings, then what was looked up
    tops: list[float]  # the largest logit of each of the chain, NaN where one was
    parents: list[int]  # the row that each token hangs on
    taps: Tensor  # [1, 1 + tokens, D], which the next call overwrites
    num_steps: int  # of the block, one more than tokens where it stopped before drawing


class DraftCall:
    """A head and the room that drafts of at most ``draft_len`` tokens need.

    A draft ends before a token with which all drafts would stand with less than ``min_confidence``, and behind one of
    ``end_ids``. Beside each token stand at most ``draft_width`` - 1 siblings of a chance of ``min_branch`` or more,
    which a second or later token of a tree must have, too. What was looked up joins drafts of less than ``most_looked``
    tokens.
    """

    def __init__(
        self, head: DraftHead, draft_len: int, threads: int, min_confidence: float = 0.0, draft_width: int = 1,
        min_branch: float = 0.0, end_ids: Sequence[int] = (), most_looked: int = 0,
    ) -> None:  # fmt: skip
        (num_vocab, size), num_inputs = head.vocabulary.weight.shape, head.maps[0][0].weight.shape[1]
        self.num_inputs, self.threads, self.draft_len = num_inputs, threads, draft_len
        self._head, self._function = head, w.run_one_pass if head.is_one_pass else w.run_steps
        rank = 0 if head.correction is None else head.correction[0].shape[1]
        steps = [head.maps[min(step, len(head.maps) - 1)] for step in range(draft_len)]
        maps = [(made.addresses, bias.data_ptr()) for made, bias in steps]
        self._maps = np.array([[weight, bias, scales] for (weight, scales), bias in maps], dtype=np.int64)
        rows = draft_len if head.is_one_pass else 1
        most = max(draft_len * draft_width, most_looked)
        self._taps, self._logits = _floats(1, most + 1, size), _floats(rows, num_vocab)
        self._normed, self._inputs = _floats(threads, rows, size), _floats(0, num_inputs)
        self._room, self._biases = _floats(threads, max(rank, 1)), _floats(num_vocab if rank else 0)
        self._packed = torch.empty(0, dtype=torch.bfloat16)  # the most inputs that a product has, a thread
        self._num_packed = max(num_inputs, 2 * size, rank)  # a row
        self._again = _floats(2 * size) if head.is_recursive and not head.is_one_pass else None
        self._tokens, self._tops = np.zeros(most + 1, dtype=np.int64), np.zeros(draft_len, dtype=np.float32)
        self._trunks, self._branches = np.zeros(most + 1, dtype=np.int64), np.zeros(2 * most, dtype=np.int64)
        self._noise, self._factor = np.zeros((draft_len, 2), dtype=np.int64), np.ones(5, dtype=np.float32)
        self._record_noise = (self._noise.ctypes.data, self._factor.ctypes.data)
        self._sees, self._parents = np.zeros((most + 1, most + 1), np.uint8), np.zeros(most + 1, dtype=np.int64)
        self._looked = np.zeros(max(most_looked, 1), dtype=np.int64)
        self._end_ids = np.array(sorted(end_ids), dtype=np.int64)
        self._least = np.array([min_branch, 1], dtype=np.float32)  # and the chance that the chain so far stands
        self._record = np.zeros(w.NUM_WORDS, dtype=np.int64)
        for word, tensor in {
            w.EMBEDDING: head.embedding, w.NORM: head.norm, w.VOCAB_IDS: head.vocab_ids,
            w.TAPS: self._taps, w.LOGITS: self._logits, w.NORMED: self._normed, w.ROOM: self._room,
            w.BIASES: self._biases, w.AGAIN: self._again,
        }.items():  # fmt: skip
            self._record[word] = 0 if tensor is None else tensor.data_ptr()
        arrays: dict[int, np.ndarray] = {
            w.MAPS: self._maps, w.TOKENS: self._tokens, w.TOPS: self._tops, w.TRUNKS: self._trunks,
            w.END_IDS: self._end_ids, w.LEAST: self._least, w.BRANCHES: self._branches, w.SEES: self._sees,
            w.PARENTS: self._parents, w.LOOKED: self._looked,
        }  # fmt: skip
        for word, array in arrays.items():
            self._record[word] = array.ctypes.data
        self._record[w.NUM_INPUTS], self._record[w.NUM_VOCAB], self._record[w.RANK] = num_inputs, num_vocab, rank
        self._record[w.VOCAB], self._record[w.SCALES] = head.vocabulary.addresses
        self._record[w.WIDTH], self._record[w.NUM_END_IDS] = draft_width, len(self._end_ids)
        self._record[w.MOST] = most_looked
        if head.correction is not None:
            self._record[w.BEFORE], self._record[w.AFTER] = (table.data_ptr() for table in head.correction)
        if head.confidence is not None and min_confidence > 0:
            weight, bias = head.confidence
            self._chance = np.array([float(bias), min_confidence], dtype=np.float32)
            self._record[w.CONFIDENCE], self._record[w.CHANCE] = weight.data_ptr(), self._chance.ctypes.data
            self._record[w.STOP] = 1
        self._address = self._record.ctypes.data

    def inputs(self, rows: int) -> Tensor:
        """Room for the bridge's inputs, [rows, (1 + n) D] in float32; the tap's part of the last row is filled in."""
        if len(self._inputs) < rows:
            self._inputs = _floats(rows, self.num_inputs)
            count = max(rows, self.draft_len) * self._num_packed
            self._packed = torch.empty(self.threads, count, dtype=torch.bfloat16)
            self._record[w.INPUTS], self._record[w.PACKED] = self._inputs.data_ptr(), self._packed.data_ptr()
            self._record[w.PACKED_SIZE] = 2 * count
        return self._inputs[:rows]

    def __call__(
        self, trunks: Sequence[LayerCall], blocks: Sequence[LayerCall], token: int, position: int, seen: int,
        last_position: int, num_drafts: int, noise: Sequence[tuple[int, int]] = (),
        sampling: Sequence[float] = (1, 0, 1, 0, 1), looked: Sequence[int] = (),
    ) -> Drafted:  # fmt: skip
        """Draft behind ``token`` at ``position``; the block has seen ``seen`` positions.

        ``noise`` are `noise_reference`'s keys of each draft's position, ``sampling`` the temperature, top-k (0: all),
        top-p and min-p to draw with and the noise's scale; no noise is greedy. ``looked`` are tokens that may follow as
        well.

        A chain with nothing beside it takes one trunk, of one row, other drafts trunks of 1, 2, ... rows; one from one
        pass one block of M + K - 1 rows, others two, of M rows and of one.
        """
        record = self._record
        self._trunks[: len(trunks)] = [trunk.address for trunk in trunks]
        record[w.BLOCK_FIRST], record[w.BLOCK_NEXT] = blocks[0].address, blocks[-1].address
        record[w.NUM_DRAFTS], record[w.POSITION], record[w.SEEN] = num_drafts, position, seen
        record[w.LAST_POSITION], record[w.NUM_DRAWN], record[w.NUM_BRANCHES] = last_position, 0, 0
        self._tokens[0], self._least[1] = token, 1
        self._looked[: len(looked)], record[w.NUM_LOOKED] = looked, len(looked)
        record[w.NOISE], record[w.FACTOR] = self._record_noise if noise else (0, 0)
        if noise:
            self._noise[: len(noise)] = noise
            self._factor[:] = 1 / sampling[0], *sampling[1:4], sampling[0] * sampling[4]
        call(self._function, self._address, self.threads)
        rows, tops = 1 + int(record[w.NUM_NODES]), self._tops[: int(record[w.NUM_DRAWN])].tolist()
        tokens, parents = self._tokens[1:rows].tolist(), self._parents[1:rows].tolist()
        return Drafted(tokens, tops, parents, self._taps[:, :rows], int(record[w.NUM_STEPS]))
