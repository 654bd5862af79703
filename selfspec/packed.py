"""Layers of the Llama kind by a few launches on a GPU, instead of module by module.

    norm (with the residual sum in front of it) -> q, k, v by one product -> rotary embedding, into the cache
    -> attention -> o -> residual sum and norm -> gate, up by one product -> silu(gate) up -> down

A product's weights are one piece of memory, of which the modules' own parameters become views: names, values and
modules of the base stay as they are, and it takes no memory more. The family's own modules remain the definition:
`Target.self_check` compares, and a layer that is not as expected here (another family, hooks, adapters, quantised or
shared weights) is run by them, as all are where Triton does not run.

Shapes: B sequences, R rows of a pass, D hidden, H query heads, Hkv key/value heads.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from selfspec import float8
from selfspec.cache import KVCache
from selfspec.kernels import dispatch, ops
from selfspec.kernels.add_rms_norm_reference import MOST_COLUMNS
from selfspec.kernels.row_view import RowView
from selfspec.layer_calls import Call, call_layer
from selfspec.plain_layers import NotPlainError, PlainLayer, is_hooked, read_layer

if TYPE_CHECKING:
    from selfspec.target import Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Packed:
    """One layer with its packed products, each a weight and a bias."""

    layer: PlainLayer
    qkv: tuple[Tensor, Tensor | None]
    gate_up: tuple[Tensor, Tensor | None]

    def run(
        self, hidden: Tensor, delta: Tensor | None, rows: Tensor, call: Call, slot: int, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """States [B, R, D] and what is still to be added to them, from the same in front of the layer.

        ``rows`` [B R] count from 0.
        """
        layer, (batch, num_rows, _) = self.layer, hidden.shape
        cos, sin = (table.flatten(0, 1) for table in call[1]["position_embeddings"])  # [R or B R, W]
        rows = rows.view(batch, -1) if len(cos) == len(rows) else rows[:num_rows].expand(batch, -1)
        hidden, normed = _norm(hidden, delta, layer.attention_norm)
        qkv = dispatch.linear(normed, *self.qkv)  # [B, R, (H + 2 Hkv) W]
        queries = self._append(qkv, cos, sin, rows, slot, cache)
        seen = _attend(queries, slot, cache, call[1].get("attention_mask"), layer.scaling).flatten(2)  # [B, R, H W]
        hidden, normed = _norm(hidden, dispatch.linear(seen, layer.o.weight, layer.o.bias), layer.mlp_norm)
        gate, up = dispatch.linear(normed, *self.gate_up).chunk(2, dim=-1)
        return hidden, dispatch.linear(nn.functional.silu(gate) * up, layer.down.weight)

    def _append(self, qkv: Tensor, cos: Tensor, sin: Tensor, rows: Tensor, slot: int, cache: KVCache) -> Tensor:
        """Queries [B, H, R, W] of ``qkv`` [B, R, (H + 2 Hkv) W]; the cache gets the keys and values."""
        layer, (batch, num_rows, _) = self.layer, qkv.shape
        norms, groups = _head_norms(layer), layer.k.out_features // layer.head_width
        if cache.is_float8:
            made = qkv.new_empty(2, batch, groups, num_rows, layer.head_width)
            places = torch.arange(num_rows, device=qkv.device).expand(batch, -1)
            queries = ops.rope_append(qkv, cos, sin, rows, made[0], made[1], places, *norms)
            cache.write(made[0], made[1], slot)
            return queries
        keys, values = cache.tensors(slot, qkv, groups, layer.head_width)
        slots = cache.slots(num_rows, qkv.device).expand(batch, -1)
        return ops.rope_append(qkv, cos, sin, rows, keys, values, slots, *norms)


class PackedLayers:
    """Runs the layers of one target that can be packed so, and the others by their modules."""

    def __init__(self, target: "Target") -> None:
        self.target = target
        self._layers: WeakKeyDictionary[nn.Module, _Packed | None] = WeakKeyDictionary()
        self._told: set[str] = set()
        self._is_given_up = False

    @property
    def is_in_use(self) -> bool:
        """Whether any layer is run here."""
        return any(packed is not None for packed in self._layers.values())

    def take(self, modules: Sequence[nn.Module]) -> None:
        """Have ``modules`` run here where that is possible; what is in the way is named once in the log.

        Again where they may have changed: weights that lie elsewhere now are packed anew.
        """
        if self._is_given_up or dispatch.implementation(self.target.device) != "triton":
            self._layers.update(dict.fromkeys(modules))
            return
        uses, problems = _uses(self.target.base), list[str]()
        for module in modules:
            try:
                self._layers[module] = _pack(read_layer(self.target.family, module), uses)
            except NotPlainError as problem:
                self._layers[module] = None
                problems.append(str(problem))
        if problems:
            self._tell(f"{len(problems)} of {len(modules)} layers run by their modules, slower: {problems[0]}")

    def look_again(self) -> None:
        """Take all modules once more, whose weights and hooks may have changed; called where a text begins."""
        self.take(list(self._layers))

    def refuse(self, reason: str) -> None:
        """Run all layers by their modules from now on."""
        self._is_given_up = True
        self.look_again()
        self._tell(f"layers run by their modules, slower: {reason}")

    def run(
        self, modules: Sequence[nn.Module], hidden: Tensor, slots: range, calls: Sequence[Call], cache: KVCache
    ) -> Tensor:
        """States [B, R, D] behind ``modules``, called as in ``calls``, whose rows the opened ``cache`` takes."""
        rows, delta = torch.arange(hidden.shape[0] * hidden.shape[1], device=hidden.device), None
        for module, slot, call in zip(modules, slots, calls, strict=True):
            packed = None if torch.is_grad_enabled() or is_hooked(module) else self._layers.get(module)
            if packed is not None:
                hidden, delta = packed.run(hidden, delta, rows, call, slot, cache)
                continue
            hidden, delta = call_layer(module, hidden if delta is None else hidden + delta, call, cache), None
        return hidden if delta is None else hidden + delta

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning(message)


def _norm(hidden: Tensor, delta: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """The sum and its norm: the same bits, whether it is made here or was made before."""
    if delta is None:
        return hidden, ops.rms_norm(hidden, norm.weight, norm.variance_epsilon, False)
    return ops.add_rms_norm(hidden, delta, norm.weight, norm.variance_epsilon, False)


def _head_norms(layer: PlainLayer) -> tuple[Tensor | None, Tensor | None, float]:
    if layer.head_norms is None:
        return None, None, 0.0
    query, key = layer.head_norms
    return query.weight, key.weight, query.variance_epsilon


def _attend(queries: Tensor, slot: int, cache: KVCache, mask: Any, scale: float) -> Tensor:
    """What rows ``queries`` [B, H, R, W] see of a layer, [B, R, H, W]; the kernel reads float8 as it is."""
    if not cache.is_float8 or not isinstance(mask, RowView):
        return dispatch.attention(queries, *cache.read(slot, queries.dtype), mask, scale)
    (keys, values), (by_key, by_value) = (t.view(float8.DTYPE) for t in cache.stored(slot)), cache.scales(slot)
    groups = keys.shape[1]
    scaled = queries.unflatten(1, (groups, -1)) * by_key.to(queries.dtype)[:, :, None]  # exact: powers of two
    seen = dispatch.attention(scaled.flatten(1, 2), keys, values, mask, scale)
    return (seen.unflatten(2, (groups, -1)) * by_value.to(seen.dtype)[:, None]).flatten(2, 3)


# ---- packing ------------------------------------------------------------------------------------------------------


def _uses(base: nn.Module) -> Counter[int]:
    """How many names of the model have a parameter at an address."""
    return Counter(p.data_ptr() for _, p in base.named_parameters(remove_duplicate=False) if not p.is_meta)


def _pack(layer: PlainLayer, uses: Counter[int]) -> _Packed:
    """``layer`` with its products packed. Raises NotPlainError where its weights cannot be."""
    parameters = [p for m in (*layer.linears, *layer.norms) for p in m.parameters()]
    if any(type(p) is not nn.Parameter or type(p.data) is not Tensor for p in parameters):
        raise NotPlainError("its weights are quantised, or distributed")
    if any(p.is_meta or p.is_inference() for p in parameters):
        raise NotPlainError("its weights are elsewhere, or made in inference mode")
    kinds = {(p.dtype, str(p.device)) for p in parameters}
    if len(kinds) > 1 or not parameters[0].is_floating_point():
        raise NotPlainError(f"its weights are of {sorted(map(str, kinds))}")
    if layer.q.in_features > MOST_COLUMNS:
        raise NotPlainError(f"states have {layer.q.in_features} numbers, more than {MOST_COLUMNS}")
    if any(not hasattr(norm, "variance_epsilon") for norm in layer.norms):
        raise NotPlainError(f"its norms are of the class {type(layer.attention_norm).__name__}")
    if any(uses[p.data_ptr()] > 1 for p in parameters):
        raise NotPlainError("its weights are shared")
    return _Packed(layer, _joined([layer.q, layer.k, layer.v]), _joined([layer.gate, layer.up]))


def _joined(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the one product that is all of ``linears``."""
    biases = [m.bias for m in linears if m.bias is not None]
    if 0 < len(biases) < len(linears):
        raise NotPlainError(f"{len(biases)} of {len(linears)} maps that belong together have a bias")
    return _in_one_piece([m.weight for m in linears]), _in_one_piece(biases) if biases else None


@torch.inference_mode(False)
@torch.no_grad()
def _in_one_piece(parts: Sequence[Tensor]) -> Tensor:
    """``parts`` [n_i, ...] one below the other, whose memory they are; they move only if it is not so already."""
    first, stop = parts[0], parts[0].data_ptr()
    is_there = True
    for part in parts:
        is_there &= part.is_contiguous() and part.data_ptr() == stop
        is_there &= part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        stop = part.data_ptr() + part.numel() * part.element_size()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    if is_there:
        return first.detach().as_strided(shape, first.stride())
    whole = torch.cat([part.detach() for part in parts])
    for part, piece in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = piece
    return whole
