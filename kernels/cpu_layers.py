"""Decoder layers of the Llama kind on a CPU: the rows of a pass through a range of layers in one call.

    n = norm(h),  h += o(attention(rotate(q(n)), rotate(k(n)), v(n)));    n = norm(h),  h += down(silu(gate(n)) * up(n))

Between two products nothing leaves the processor's cache and no Python runs, so that a pass costs what reading the
weights costs. A row is computed by the same code in the same order whatever rows stand beside it: its bits depend on
nothing but what it may see. Weights and cache are used where they lie, nothing is copied.

A team of threads shares each product; a barrier stands wherever one thread needs what another made.

Shapes: R rows, D hidden, H query heads, G key/value heads, W head width, F width of the MLP, S positions, T slots.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from . import cpu_math as cm
from .cpu_dot import BLOCK, HAS_PAIRS, LANES, MAX_ROWS, PAIRS
from .cpu_pairs import COLUMNS, SLOTS, score, weigh
from .cpu_team import call, compiled, num_threads, thread_number, wait

# the words of a call: sizes and addresses (0: none)
NUM_WORDS = 29
(NUM_LAYERS, LAYERS, NUM_ROWS, HIDDEN, FIRST, POSITIONS, ANCESTORS, SIZE, HEADS, GROUPS, HEAD_WIDTH, MLP_WIDTH, COS,
 SIN, SCALARS, IS_WIDE, CAPACITY, IS_WIDE_CACHE, SHARED, PRIVATE, PRIVATE_SIZE, NUM_THREADS, NOTES, FINAL_NORM, VOCAB,
 NUM_VOCAB, LOGITS, NUM_TEXTS, TEXTS) = range(NUM_WORDS)  # fmt: skip
# the words of a layer: addresses of weights in the model's dtype, norms and biases in float32 (0: none), its cache
(NORM_1, Q, K, V, Q_BIAS, K_BIAS, V_BIAS, Q_NORM, K_NORM, OUT, OUT_BIAS, NORM_2, GATE, UP, DOWN, KEYS,
 VALUES) = range(17)  # fmt: skip
LAYER_WORDS = 17
WORTH_OF_A_ROW = (
    0.06 if HAS_PAIRS else 0.16
)  # a row more costs .03 to .04 of a pass with pairs of bfloat16, else .1 to .15


@njit
def _project(a: Any, w: Any, normed: int, qkv: int, room: int, thread: int) -> None:
    """A thread's share of q, k and v of all rows, side by side: [R, (H + 2 G) W]."""
    rows, size, is_wide, team = a[NUM_ROWS], a[SIZE], a[IS_WIDE], a[NUM_THREADS]
    num_q, num_k = a[HEADS] * a[HEAD_WIDTH], a[GROUPS] * a[HEAD_WIDTH]
    stride = num_q + 2 * num_k
    for weight, bias, place, count in (
        (w[Q], w[Q_BIAS], 0, num_q),
        (w[K], w[K_BIAS], num_q, num_k),
        (w[V], w[V_BIAS], num_q + num_k, num_k),
    ):
        begin, end = cm.share(count, thread, team)
        cm.product(normed, weight, qkv + 4 * place, rows, size, count, begin, end, stride, is_wide, room)
        cm.settle(qkv + 4 * place, bias, rows, begin, end, stride, is_wide)


@njit
def _rotate_and_keep(a: Any, w: Any, qkv: int, group: int) -> None:
    """Norm and rotate a group's query heads and its key at all rows; write key and value into the cache."""
    heads, groups, width, is_wide = a[HEADS], a[GROUPS], a[HEAD_WIDTH], a[IS_WIDE]
    per_group, eps, positions = heads // groups, cm.floats(a[SCALARS])[1], cm.words(a[POSITIONS])
    for r in range(a[NUM_ROWS]):
        row, table = qkv + 4 * r * (heads + 2 * groups) * width, 4 * positions[r] * width
        key, value = row + 4 * (heads + group) * width, row + 4 * (heads + groups + group) * width
        for h in range(per_group + 1):
            head, weight = row + 4 * (group * per_group + h) * width, w[Q_NORM]
            if h == per_group:
                head, weight = key, w[K_NORM]
            if weight:
                cm.norm(head, weight, head, 1, width, eps, is_wide)
            cm.rotate(head, a[COS] + table, a[SIN] + table, width, is_wide)
        slot = (group * a[CAPACITY] + a[FIRST] + r) * width
        cm.keep(key, w[KEYS], slot, width, a[IS_WIDE_CACHE])
        cm.keep(value, w[VALUES], slot, width, a[IS_WIDE_CACHE])


@njit
def _attend(a: Any, q: int, made: int, scores: int, keys: int, values: int, longest: int) -> None:
    """Attention of a group: queries ``q`` [lines, W], a line a head and row, over its slots -> ``made`` [lines, W].

    A row sees the prefix, then its ancestors among the rows, itself included, in order: its sums are the same whether
    those lie side by side (a chain) or not (a tree).
    """
    cm.stay_apart()
    rows, first, width, is_wide = a[NUM_ROWS], a[FIRST], a[HEAD_WIDTH], a[IS_WIDE_CACHE]
    lines, element = a[HEADS] // a[GROUPS] * rows, 4 if is_wide else 2
    sees, s, out, scale = cm.octets(a[ANCESTORS]), cm.floats(scores), cm.floats(made), cm.floats(a[SCALARS])[0]
    kind, sums = cm.kind_of(width, is_wide), scores + 4 * lines * longest
    if kind == PAIRS:
        cm.pack(q, made, lines * width)  # nothing is made yet
        room = (sums + 4 * lines + 63) // 64 * 64  # at a line of the processor's cache
        score(made, keys, scores, lines, first + rows, width, longest, room)
    else:
        for t in range(0, first + rows, BLOCK):
            for line in range(0, lines, MAX_ROWS):
                cm.dots(q + 4 * line * width, keys + element * t * width, scores + 4 * (line * longest + t), width,
                        longest, min(lines - line, MAX_ROWS), kind)  # fmt: skip
    totals = cm.floats(sums)
    for line in range(lines):
        row, begin = line % rows, line * longest
        count = begin + first
        for j in range(row + 1):
            if sees[row * rows + j]:
                s[count] = s[begin + first + j]
                count += 1
        totals[line] = cm.powers(scores + 4 * begin, count - begin, scale)
    if kind == PAIRS and width % COLUMNS == 0:
        weigh(scores, values, made, lines, first, rows, a[ANCESTORS], width, longest)
    else:
        if first:
            cm.weigh(scores, values, made, first, longest, width, lines, is_wide)
        else:
            for i in range(lines * width):
                out[i] = np.float32(0)
        for line in range(lines):
            row, count = line % rows, line * longest + first
            for j in range(row + 1):
                if sees[row * rows + j]:
                    value = values + element * (first + j) * width
                    cm.add_slot(made + 4 * line * width, s[count], value, width, is_wide)
                    count += 1
    for line in range(lines):
        cm.multiply(made + 4 * line * width, np.float32(1) / totals[line], width)


@njit
def _attention(a: Any, w: Any, qkv: int, attended: int, private: int, group: int) -> None:
    """One group's part of ``attended`` [R, H W]; ``private`` is room for its queries, outputs and scores."""
    rows, heads, groups, width = a[NUM_ROWS], a[HEADS], a[GROUPS], a[HEAD_WIDTH]
    per_group, element = heads // groups, 4 if a[IS_WIDE_CACHE] else 2
    made = private + 4 * rows * per_group * width
    scores = made + 4 * rows * per_group * width
    longest = (a[FIRST] + rows + SLOTS - 1) // SLOTS * SLOTS  # scores are made 8 or 32 slots at a time
    for h in range(per_group):
        for r in range(rows):
            head = qkv + 4 * (r * (heads + 2 * groups) + group * per_group + h) * width
            cm.copy(head, private + 4 * (h * rows + r) * width, width)
    slots = element * group * a[CAPACITY] * width
    _attend(a, private, made, scores, w[KEYS] + slots, w[VALUES] + slots, longest)
    cm.settle(made, 0, 1, 0, per_group * rows * width, 0, a[IS_WIDE])
    for h in range(per_group):
        for r in range(rows):
            head = attended + 4 * (r * heads + group * per_group + h) * width
            cm.copy(made + 4 * (h * rows + r) * width, head, width)


@njit
def _attend_all(a: Any, number: int, qkv: int, attended: int, private: int, thread: int) -> None:
    """A thread's share of the groups of all texts of a call: each has rows, a cache and words of its own."""
    heads, groups, width, team = a[HEADS], a[GROUPS], a[HEAD_WIDTH], a[NUM_THREADS]
    turn = 0
    for text in range(a[NUM_TEXTS]):
        own = cm.words(cm.words(a[TEXTS])[text])
        w = layer_words(own, number)
        for group in range(groups):
            if turn % team == thread:
                _rotate_and_keep(own, w, qkv, group)
                _attention(own, w, qkv, attended, private, group)
            turn += 1
        qkv += 4 * own[NUM_ROWS] * (heads + 2 * groups) * width
        attended += 4 * own[NUM_ROWS] * heads * width


@njit
def layer_words(a: Any, number: int) -> Any:
    """The words of a call's layer."""
    return cm.words(a[LAYERS] + 8 * LAYER_WORDS * number)


@njit
def widest(a: Any) -> int:
    """The most inputs that a product of a call has."""
    return max(a[SIZE], a[MLP_WIDTH], a[HEADS] * a[HEAD_WIDTH])


@njit
def run_layer(a: Any, number: int, thread: int) -> None:
    """One thread's part of one layer; ``a`` are the words of the call."""
    w = layer_words(a, number)
    rows, size, mlp, hidden, is_wide, team = a[NUM_ROWS], a[SIZE], a[MLP_WIDTH], a[HIDDEN], a[IS_WIDE], a[NUM_THREADS]
    num_q, eps = a[HEADS] * a[HEAD_WIDTH], cm.floats(a[SCALARS])[1]
    # shared by the team: q, k and v; what attention gives; outputs of a product; the MLP's activations
    qkv = a[SHARED]
    attended = qkv + 4 * rows * (num_q + 2 * a[GROUPS] * a[HEAD_WIDTH])
    made = attended + 4 * rows * num_q
    active = made + 4 * rows * max(2 * mlp, size)
    # this thread's own: the inputs of a product, normed states, and what `_attention` needs
    room = a[PRIVATE] + thread * a[PRIVATE_SIZE]
    normed = room + 2 * rows * widest(a)
    own = normed + 4 * rows * size

    cm.norm(hidden, w[NORM_1], normed, rows, size, eps, is_wide)
    _project(a, w, normed, qkv, room, thread)
    wait(team)
    _attend_all(a, number, qkv, attended, own, thread)
    wait(team)
    begin, end = cm.share(size, thread, team)
    cm.product(attended, w[OUT], made, rows, num_q, size, begin, end, size, is_wide, room)
    cm.settle(made, w[OUT_BIAS], rows, begin, end, size, is_wide)
    cm.add(hidden, made, rows, begin, end, size, is_wide)
    wait(team)
    cm.norm(hidden, w[NORM_2], normed, rows, size, eps, is_wide)
    begin, end = cm.share(mlp, thread, team)
    cm.product(normed, w[GATE], made, rows, size, mlp, begin, end, 2 * mlp, is_wide, room)
    cm.product(normed, w[UP], made + 4 * mlp, rows, size, mlp, begin, end, 2 * mlp, is_wide, room)
    cm.activate(made, active, rows, begin, end, mlp, is_wide)
    wait(team)
    begin, end = cm.share(size, thread, team)
    cm.product(active, w[DOWN], made, rows, mlp, size, begin, end, size, is_wide, room)
    cm.add(hidden, made, rows, begin, end, size, is_wide)
    wait(team)


@compiled
def _run_layers(call: int) -> None:
    a = cm.words(call)
    thread, team, rows, size = thread_number() if a[NUM_THREADS] > 1 else 0, a[NUM_THREADS], a[NUM_ROWS], a[SIZE]
    for number in range(a[NUM_LAYERS]):
        run_layer(a, number, thread)
        note = cm.words(a[NOTES])[number]
        if note and thread == 0:  # the next layer changes nothing before this thread has come to its first barrier
            cm.copy(a[HIDDEN], note, rows * size)
    if a[VOCAB]:
        room, count = a[PRIVATE] + thread * a[PRIVATE_SIZE], a[NUM_VOCAB]
        normed = room + 2 * rows * widest(a)
        cm.norm(a[HIDDEN], a[FINAL_NORM], normed, rows, size, cm.floats(a[SCALARS])[1], a[IS_WIDE])
        begin, end = cm.share(count, thread, team)
        cm.product(normed, a[VOCAB], a[LOGITS], rows, size, count, begin, end, count, a[IS_WIDE], room)
        cm.settle(a[LOGITS], 0, rows, begin, end, count, a[IS_WIDE])


@compiled
def _run_linear(call: int) -> None:
    a = cm.words(call)
    x, weight, bias, y, rows, size, count, is_wide, team = a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]
    thread = thread_number() if team > 1 else 0
    begin, end = cm.share(count, thread, team)
    cm.product(x, weight, y, rows, size, count, begin, end, count, is_wide, a[9] + 2 * thread * rows * size)
    cm.settle(y, bias, rows, begin, end, count, is_wide)


def takes(weight: Tensor) -> bool:
    """Whether `linear` multiplies with ``weight`` [O, I]."""
    count, size = weight.shape
    is_plain = type(weight) in (Tensor, torch.nn.Parameter)  # quantised ones only look like tensors of their dtype
    is_plain = is_plain and weight.dtype in (torch.bfloat16, torch.float32) and weight.is_contiguous()
    return is_plain and weight.device.type == "cpu" and size % LANES == 0 and count >= BLOCK


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [..., R, I] times ``weight`` [O, I] transposed, plus ``bias`` [O], in their dtype: [..., R, O]."""
    (count, size), threads = weight.shape, num_threads()
    wide, added = x.float().contiguous(), None if bias is None else bias.float()
    y, room = (
        torch.empty(*x.shape[:-1], count, dtype=torch.float32),
        torch.empty(threads, x.numel(), dtype=torch.bfloat16),
    )
    record = np.array([
        wide.data_ptr(), weight.data_ptr(), 0 if added is None else added.data_ptr(), y.data_ptr(),
        x.numel() // size, size, count, weight.dtype == torch.float32, threads, room.data_ptr(),
    ], dtype=np.int64)  # fmt: skip
    call(_run_linear, record.ctypes.data, threads)
    return y.to(x.dtype)


@dataclass(frozen=True)
class Shape:
    """What all layers of a call have in common."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    mlp_width: int
    scale: float  # of the scores
    eps: float  # of the norms


def fits(shape: Shape) -> bool:
    """Whether a `LayerCall` takes layers of this shape."""
    return shape.head_width % LANES == 0 and shape.num_heads % shape.num_kv_heads == 0


class LayerCall:
    """A call prepared for passes of R rows through given layers: all but the rows themselves is written down once.

    ``layers`` [n, 17] holds the words of each layer (see above). Each cache is [G, capacity, W] in ``cache_dtype``; the
    capacity is a multiple of 8. ``cos`` and ``sin`` are tables [S, W] in float32. ``noted`` are numbers of layers, 1 to
    n, behind which the states are kept; ``head`` is the final norm's weight [D] in float32 and the vocabulary [V, D],
    whose logits are then made too.
    """

    def __init__(
        self,
        shape: Shape,
        layers: np.ndarray,
        cos: Tensor,
        sin: Tensor,
        capacity: int,
        cache_dtype: torch.dtype,
        rows: int,
        noted: Sequence[int] = (),
        head: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        heads, groups, width, size = shape.num_heads, shape.num_kv_heads, shape.head_width, shape.hidden_size
        self.rows, self.threads = rows, num_threads()
        shared = rows * (2 * (heads + groups) * width + 3 * max(shape.mlp_width, size))
        private = rows * max(size, shape.mlp_width, heads * width) // 2 + rows * size
        private += rows * heads // groups * (2 * width + capacity + SLOTS) + LANES * (width + 1)
        private = -(-private // LANES) * LANES  # each thread's begins where a line of the processor's cache does
        self._states, self._shared = (
            torch.empty(1, rows, size, dtype=torch.float32),
            torch.empty(shared, dtype=torch.float32),
        )
        self._private, self._places = (
            torch.empty(self.threads, private, dtype=torch.float32),
            np.zeros(rows, dtype=np.int64),
        )
        self._scalars = np.array([shape.scale, shape.eps], dtype=np.float32)
        self.notes = torch.empty(
            len(noted), 1, rows, size, dtype=torch.float32
        )  # states behind the noted layers, of the last call
        self._notes = np.zeros(len(layers), dtype=np.int64)
        for note, number in zip(self.notes, noted, strict=True):
            self._notes[number - 1] = note.data_ptr()
        self._record = np.zeros(NUM_WORDS, dtype=np.int64)
        self._kept = (layers, cos, sin, head)
        if head is not None:
            norm, vocabulary = head
            self._record[NUM_VOCAB] = len(vocabulary)
            self._record[FINAL_NORM], self._record[VOCAB] = norm.data_ptr(), vocabulary.data_ptr()
        for word, value in {
            NUM_LAYERS: len(layers), LAYERS: layers.ctypes.data, NUM_ROWS: rows, HIDDEN: self._states.data_ptr(),
            POSITIONS: self._places.ctypes.data, SIZE: size, HEADS: heads, GROUPS: groups, HEAD_WIDTH: width,
            MLP_WIDTH: shape.mlp_width, COS: cos.data_ptr(), SIN: sin.data_ptr(), SCALARS: self._scalars.ctypes.data,
            CAPACITY: capacity, IS_WIDE_CACHE: cache_dtype == torch.float32, SHARED: self._shared.data_ptr(),
            PRIVATE: self._private.data_ptr(), PRIVATE_SIZE: 4 * private, NUM_THREADS: self.threads,
            NOTES: self._notes.ctypes.data,
        }.items():  # fmt: skip
            self._record[word] = value
        self.address, self.capacity = self._record.ctypes.data, capacity
        self._texts: list[int] = []
        self._hold([self])

    def begin(self, is_wide: bool, ancestors: Tensor | None = None) -> None:
        """Set the dtype, and who sees whom among the rows (None: a chain)."""
        self._sees = _chain(self.rows) if ancestors is None else ancestors.contiguous()
        self._record[IS_WIDE], self._record[ANCESTORS] = is_wide, self._sees.data_ptr()

    def place(self, is_wide: bool, first: int, positions: Sequence[int], ancestors: Tensor | None = None) -> None:
        """Set where the rows go: to the slots first, first + 1, ... and to ``positions`` of the tables."""
        self.begin(is_wide, ancestors)
        self._places[:], self._record[FIRST] = positions, first

    def __call__(
        self, hidden: Tensor, first: int, positions: Sequence[int], ancestors: Tensor | None = None,
        logits: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the layers on ``hidden`` [1, R, D], float32 or bfloat16, writing the rows' keys and values.

        Rows take the slots first, first + 1, ... and stand at ``positions`` of the tables; ``ancestors`` [R, R],
        boolean, says who sees whom among them (None: a chain). Returns the states behind the last layer [1, R, D] in
        float32, which the next call overwrites; where there is a head, ``logits`` [1, R, V] in float32 are filled in.
        """
        self.place(hidden.dtype == torch.float32, first, positions, ancestors)
        return self.run(hidden, [self], logits)

    def run(self, hidden: Tensor, texts: "Sequence[LayerCall]", logits: Tensor | None = None) -> Tensor:
        """The same with the rows of several texts side by side, for each the call that its rows are placed in.

        Those are calls for as many rows as the text has, through the same layers, each with its own cache, whose
        capacity must not exceed this one's.
        """
        if sum(text.rows for text in texts) != self.rows or any(text.capacity > self.capacity for text in texts):
            raise ValueError(f"a call of {self.rows} rows and {self.capacity} slots does not hold these texts")
        self._states.copy_(hidden)
        self._record[LOGITS] = 0 if logits is None else logits.data_ptr()
        self._hold(texts)
        self._record[IS_WIDE] = hidden.dtype == torch.float32
        call(_run_layers, self.address, self.threads)
        return self._states

    def _hold(self, texts: "Sequence[LayerCall]") -> None:
        addresses = [text.address for text in texts]
        if addresses != self._texts:
            self._texts, self._text_words = addresses, np.array(addresses, dtype=np.int64)
            self._record[NUM_TEXTS], self._record[TEXTS] = len(texts), self._text_words.ctypes.data


@functools.cache
def _chain(rows: int) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool).tril()
