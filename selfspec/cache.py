"""One static key/value cache for drafting and verification.

Every layer has slots [0, capacity) and a length of its own: drafting fills the shallow layers ahead of the deep ones,
a verify pass lets the deep ones catch up, and `rollback` cuts all of them to the accepted length. Nothing is copied
and nothing is recomputed. Exit heads keep their own keys and values in further layers behind the target's.
"""

from typing import Any

import torch
from torch import Tensor

from selfspec import float8
from selfspec.kernels import dispatch, ops
from selfspec.kernels.compact_reference import Held, hold

MOST_SHARED = 16  # rows of logits that passes take turns with


class KVCache:
    """Preallocated keys and values, [B, Hkv, capacity, D] a layer, and a length a layer.

    It speaks the `update` of transformers' caches, which is all that attention modules call. Tensors are allocated at
    a layer's first update, with that layer's own head count, width and device, in the dtype attention computes in.

    ``width`` is the fixed number of rows of exact mode: passes of fewer rows are padded up to it and attention always
    spans the whole capacity, so that the same shapes, hence the same bits, come out however tokens are grouped. None
    means fast mode: passes as they come, attention over the live slots.

    ``pads`` [B] are the slots at each sequence's start that hold padding: slot s is position s - pads[b], and nothing
    looks at what stands before position 0. So prompts of different lengths end at one slot and go on together.

    ``is_float8`` keeps them in eight bits, of one sequence: see `float8`. Attention modules read them in their dtype.
    """

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        width: int | None = None,
        pads: Tensor | None = None,
        is_float8: bool = False,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be positive, got {capacity}")
        if is_float8 and pads is not None:
            raise NotImplementedError("a float8 cache holds one sequence, without padding")
        self.capacity, self.width, self.pads, self.is_float8 = capacity, width, pads, is_float8
        self.lengths = [0] * num_layers
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._scales: dict[int, Tensor] = {}  # of keys and values, [2, B, Hkv, 1, 1] a layer
        self._first = self._num_kept = 0
        self._end: int | None = 0  # None: all slots
        self._slots: Tensor | None = None
        self.keeps_logits = (
            True  # each pass's apart; False: the next pass overwrites them, which saves the system's work
        )
        self._logits: Tensor | None = None
        self.plans: dict[Any, Any] = {}  # kept by kernels that go by addresses, which live as long as the tensors

    def open(self, first: int, num_rows: int, read_end: int, num_kept: int | None = None) -> None:
        """Begin a pass: its rows go to slots [first, first + num_rows), its attention spans slots [0, read_end).

        ``num_kept`` of the rows are no padding of exact mode (None: all).
        """
        if first + num_rows > self.capacity:
            raise ValueError(f"cache holds {self.capacity} slots, a pass needs {first + num_rows}")
        self._first, self._end, self._slots = first, read_end, None
        self._num_kept = num_rows if num_kept is None else num_kept

    def open_at(self, slots: Tensor) -> None:
        """Begin a pass whose rows go to ``slots`` [R], known to the device alone; its attention spans all slots."""
        self._end, self._slots = None, slots

    def slots(self, num_rows: int, device: torch.device) -> Tensor:
        """Where the pass's rows go, [R]."""
        if self._slots is None:
            self._slots = torch.arange(self._first, self._first + num_rows, device=device)
        return self._slots

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the pass's ``key`` and ``value`` [B, Hkv, R, D]; return all slots that attention spans."""
        self.write(key, value, layer_idx)
        return self.read(layer_idx, dispatch.cache_dtype(key))

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Put the pass's ``key`` and ``value`` [B, Hkv, R, D] to its slots."""
        keys, values = self.tensors(layer, key, key.shape[1], key.shape[3], value.shape[3])
        if self.is_float8:
            scales = self._scales[layer]
            if self._end is not None and self._first == 0:  # the prompt's pass
                scales.copy_(torch.stack([float8.scale_of(t[:, :, : self._num_kept]) for t in (key, value)]))
            key, value = float8.to_bytes(key, scales[0]), float8.to_bytes(value, scales[1])
        if self._end is None:
            keys.index_copy_(2, self.slots(key.shape[2], key.device), key.to(keys.dtype))
            values.index_copy_(2, self.slots(key.shape[2], key.device), value.to(values.dtype))
            return
        stop = self._first + key.shape[2]
        keys[:, :, self._first : stop] = key
        values[:, :, self._first : stop] = value

    def read(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Views of all slots of a layer that the pass's attention spans, of a float8 cache copies in ``dtype``."""
        keys, values = self.stored(layer)
        if not self.is_float8:
            return keys, values
        by_key, by_value = self._scales[layer]
        return float8.from_bytes(keys, by_key, dtype), float8.from_bytes(values, by_value, dtype)

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of the same slots as they are."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None
        assert values is not None
        return keys[:, :, : self._end], values[:, :, : self._end]

    def scales(self, layer: int) -> Tensor:
        """What the keys and values of a float8 cache are multiplied by, [2, B, Hkv, 1, 1]."""
        return self._scales[layer]

    def tensors(
        self, layer: int, like: Tensor, heads: int, width: int, value_width: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, slots, width] of a layer, allocated now if need be, for states ``like`` [B, ...].

        There are as many slots as the capacity, rounded up to a multiple of 8 for kernels that read 8 at a time.
        """
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            shape, dtype = (like.shape[0], heads, -(-self.capacity // 8) * 8), dispatch.cache_dtype(like)
            if self.is_float8:
                dtype, self._scales[layer] = torch.uint8, like.new_ones(2, *shape[:2], 1, 1, dtype=torch.float32)
            keys = self._keys[layer] = like.new_zeros(*shape, width, dtype=dtype)
            values = self._values[layer] = like.new_zeros(*shape, value_width or width, dtype=dtype)
        return keys, values

    def logits_room(self, num_rows: int, num_tokens: int) -> Tensor:
        """Where a pass may put its logits, [1, R, V] in float32."""
        if self.keeps_logits or num_rows > MOST_SHARED:
            return torch.empty(1, num_rows, num_tokens, dtype=torch.float32)
        if self._logits is None or self._logits.shape[2] != num_tokens:
            self._logits = torch.empty(1, MOST_SHARED, num_tokens, dtype=torch.float32)
        return self._logits[:, :num_rows]

    def advance(self, layers: range, num_rows: int) -> None:
        """Count ``num_rows`` more valid rows in ``layers``."""
        for layer in layers:
            self.lengths[layer] += num_rows

    def rollback(self, length: int, layers: range | None = None) -> None:
        """Forget everything from position ``length`` on, in all layers or in some; costs nothing."""
        # rejected drafts must not stay: the next pass overwrites their slots and masks hide them until then
        for layer in range(len(self.lengths)) if layers is None else layers:
            self.lengths[layer] = min(self.lengths[layer], length)

    def clear(self) -> None:
        """Begin another text in the same memory."""
        self.lengths = [0] * len(self.lengths)
        self.plans.clear()

    def forget(self) -> None:
        """Make all of it zeros again."""
        for tensor in (*self._keys, *self._values):
            if tensor is not None:
                tensor.zero_()

    def compact(self, first: int, path: list[int], layers: range) -> None:
        """Move the accepted rows of a tree to where a chain would have them.

        Row ``path[i]`` of the pass that began at slot ``first`` becomes slot ``first + i``; a path begins with the
        root, 0, and a chain's is 0, 1, 2, ... and moves nothing.
        """
        moved = [
            (first + i, first + row) for i, row in enumerate(path) if row != i
        ]  # rising: none is overwritten early
        tensors = [t for layer in layers for t in (self._keys[layer], self._values[layer]) if t is not None]
        for device in dict.fromkeys(t.device for t in tensors) if moved else ():
            here = [t for t in tensors if t.device == device]
            if dispatch.implementation(device) == "triton":
                self._move(here, first, path)
                continue
            for tensor in here:
                for slot, source in moved:
                    tensor[:, :, slot] = tensor[:, :, source]

    def _move(self, tensors: list[Tensor], first: int, path: list[int]) -> None:
        """`compact` of ``tensors`` on one device, all in one launch."""
        key = ("compact", *(t.data_ptr() for t in tensors))
        if key not in self.plans:
            self.plans[key] = hold(tensors)
        held: Held = self.plans[key]
        numbers = torch.tensor([first, len(path) - 1, *path[1:]], device=held.table.device).expand(held.batch, -1)
        move(held, numbers[:, 2:], numbers[:, 1], numbers[:, 0])

    def hold(self, layers: range) -> Held:
        """Keys and values of ``layers``, for `move`."""
        return hold([t for layer in layers for t in (self._keys[layer], self._values[layer]) if t is not None])

    def spread(self, pads: Tensor) -> None:
        """Go on with as many sequences as there are ``pads`` [B], each beginning, behind its padding, with what the one
        sequence of this cache holds.
        """
        if self.is_float8:
            raise NotImplementedError("a float8 cache holds one sequence, without padding")
        self._keys, self._values = (
            [_spread(t, pads, self.lengths[0]) for t in ts] for ts in (self._keys, self._values)
        )
        self.pads = pads
        self.plans.clear()

    def release(self) -> None:
        """Give the memory back: the text is at its end."""
        self._keys, self._values = [None] * len(self.lengths), [None] * len(self.lengths)
        self._logits = None
        self.plans.clear()

    def begin_like(self, other: "KVCache", length: int) -> None:
        """Take over what ``other`` holds of positions before ``length``."""
        for layer, (keys, values) in enumerate(zip(other._keys, other._values, strict=True)):
            if keys is not None and values is not None:
                own = self.tensors(layer, keys, keys.shape[1], keys.shape[3], values.shape[3])
                for mine, theirs in zip(own, (keys, values), strict=True):
                    mine[:, :, :length] = theirs[:, :, :length]
        self.lengths = [min(held, length) for held in other.lengths]

    def first(self, num_sequences: int) -> "KVCache":
        """The first sequences alone, over the same memory; a pass over them counts for all."""
        part = KVCache(
            len(self.lengths), self.capacity, self.width, None if self.pads is None else self.pads[:num_sequences]
        )
        part.lengths = self.lengths
        part._keys, part._values = (
            [t if t is None else t[:num_sequences] for t in ts] for ts in (self._keys, self._values)
        )
        return part

    def select(self, sequences: Tensor) -> None:
        """Go on with ``sequences`` [b] (indices) alone."""
        self._keys, self._values = ([t if t is None else t[sequences] for t in ts] for ts in (self._keys, self._values))
        self.pads = self.pads if self.pads is None else self.pads[sequences]
        self.plans.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes allocated so far."""
        tensors = [t for t in (*self._keys, *self._values) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)


def move(held: Held, path: Tensor, num_accepted: Tensor, first: Tensor) -> None:
    """`KVCache.compact` of what is ``held``, by numbers [B, K], [B] and [B] that the device alone may know."""
    ops.compact(held.tensors, held.table, held.num_heads, held.num_bytes, held.alignment, path, num_accepted, first)


def _spread(tensor: Tensor | None, pads: Tensor, length: int) -> Tensor | None:
    if tensor is None:
        return None
    made = tensor.new_zeros(len(pads), *tensor.shape[1:])
    for sequence, pad in zip(made, pads.tolist(), strict=True):
        sequence[:, pad : pad + length] = tensor[0, :, :length]
    return made
