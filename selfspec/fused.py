"""Layers of the Llama kind run by one kernel on a CPU, instead of module by module.

The family's own modules remain the definition: `Target.self_check` compares, and whatever is not as expected here
(other families, sliding windows, hooks, adapters, quantised weights, batches, long prompts) is run by them.

Shapes: R rows of a pass, D hidden.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from selfspec.cache import KVCache
from selfspec.kernels import dispatch
from selfspec.masks import MaskRule, tree_shape
from selfspec.plain_layers import FAMILIES, NotPlainError, is_hooked, read_layer

if TYPE_CHECKING:
    from selfspec.target import Target

logger = logging.getLogger(__name__)
PROMPT_ROWS = 24  # of a prompt, run at once: a layer's room stays in the processor's cache (docs/LOG.md)


@dataclass(frozen=True)
class _Addresses:
    """Where one layer's weights lie. ``kept`` holds on to that memory, whatever becomes of ``module``."""

    module: nn.Module
    words: list[int]  # in the kernel's order, the cache's two left out
    shape: Any
    kept: list[Tensor]


@dataclass(frozen=True)
class _Plan:
    """What the passes of one text over one range of layers have in common."""

    shape: Any
    layers: np.ndarray  # [n, 17]
    cos: Tensor
    sin: Tensor
    capacity: int
    dtype: torch.dtype  # of the cache
    kept: list[_Addresses]
    kernels: Any
    last_position: int  # of the tables
    calls: dict[Any, Any] = field(default_factory=dict)

    def call(self, rows: int, noted: tuple[int, ...] = (), head: "_HeadWeights | None" = None) -> Any:
        """The kernel's call for this many rows, prepared at its first use."""
        key = (rows, noted, head)
        if key not in self.calls or self.calls[key].threads != self.kernels.num_threads():
            self.calls[key] = self.kernels.LayerCall(
                self.shape, self.layers, self.cos, self.sin, self.capacity, self.dtype, rows, noted,
                None if head is None else (head.norm, head.vocabulary),
            )  # fmt: skip
        return self.calls[key]


@dataclass(frozen=True, eq=False)
class _HeadWeights:
    """The target's final norm, in float32, and its vocabulary."""

    norm: Tensor  # [D]
    vocabulary: Tensor  # [V, D]
    eps: float


class FusedLayers:
    """Runs layer modules of one target through `kernels.cpu_layers` where it can."""

    def __init__(self, target: "Target") -> None:
        self.target = target
        self._addresses: dict[int, _Addresses | None] = {}
        self._head: tuple[_HeadWeights | None] | None = None  # looked for or not
        self._age = 0  # plans of an earlier one are not used
        self._tables: tuple[Any, Tensor, Tensor] | None = None  # rotary tables in float32, and what they were made of

    def forget(self) -> None:
        """Look at the modules again: weights may have moved, hooks come or gone. Called where a text begins."""
        self._addresses = {}
        self._head = None
        self._age += 1

    @property
    def is_in_use(self) -> bool:
        """Whether passes over all of the target's layers run here."""
        layers = self.target.layers
        return all(self._find(layer) is not None for layer in layers) and self._table(range(len(layers))) is not None

    @property
    def has_head(self) -> bool:
        """Whether the final norm and the vocabulary run here, too."""
        return self._head_weights() is not None

    def run(
        self, modules: Sequence[nn.Module], hidden: Tensor, slots: range, cache: KVCache, parents: Sequence[int] | None
    ) -> Tensor | None:
        """`Target.run_modules` without what it counts; None where this pass is not for the kernel."""
        is_prompt = parents is None and dispatch.takes_prompts(hidden)
        plan = self._plan_for(modules, hidden, slots, cache, hidden.shape[1] if is_prompt else dispatch.FEW_ROWS)
        if plan is None:
            return None
        if parents is not None or hidden.shape[1] <= PROMPT_ROWS:
            return _run(plan, hidden, cache.lengths[slots.start], parents)
        made, first = list[Tensor](), cache.lengths[slots.start]
        for rows in hidden.split(PROMPT_ROWS, dim=1):
            made.append(_run(plan, rows, first, None))
            first += rows.shape[1]
        return torch.cat(made, dim=1)

    def finish(
        self, hidden: Tensor, slots: range, cache: KVCache, parents: Sequence[int] | None, depths: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]] | None:
        """`Target.finish` without what it counts, for layers ``slots`` up to the last; None likewise."""
        head, rows = self._head_weights(), hidden.shape[1]
        plan = None if head is None else self._plan_for(self.target.layers[slots.start :], hidden, slots, cache)
        if head is None or plan is None:
            return None
        call = plan.call(rows, tuple(depth - slots.start for depth in depths), head)
        logits = cache.logits_room(rows, len(head.vocabulary))
        call(hidden, *_placed(plan, rows, cache.lengths[slots.start], parents), logits)
        notes = call.notes.to(hidden.dtype, copy=True)
        return logits, dict(zip(depths, notes, strict=True))

    def finish_together(
        self, texts: Sequence[tuple[Tensor, KVCache, Sequence[int] | None]], slots: range, depths: Sequence[int]
    ) -> tuple[list[Tensor], list[tuple[Tensor, ...]]] | None:
        """Rows [1, R, D], cache and parents of several texts through layers ``slots``, side by side.

        Returns the logits of each, none before the last layer, and at each depth the states of each; None likewise.
        """
        head = self._head_weights() if slots.stop == self.target.num_layers else None
        plans = [self._plan_for(self.target.layers[slots.start : slots.stop], h, slots, cache) for h, cache, _ in texts]
        found = [plan for plan in plans if plan is not None]
        if len(found) < len(texts) or (slots.stop == self.target.num_layers and head is None):
            return None
        sizes, calls = [hidden.shape[1] for hidden, *_ in texts], []
        for plan, (hidden, cache, parents) in zip(found, texts, strict=True):
            calls.append(plan.call(hidden.shape[1]))
            place = _placed(plan, hidden.shape[1], cache.lengths[slots.start], parents)
            calls[-1].place(hidden.dtype == torch.float32, *place)
        largest = max(range(len(texts)), key=lambda i: found[i].capacity)  # whose calls have room for all
        call = found[largest].call(sum(sizes), tuple(depth - slots.start for depth in depths), head)
        logits = None if head is None else texts[largest][1].logits_room(sum(sizes), len(head.vocabulary))
        call.run(torch.cat([hidden for hidden, *_ in texts], dim=1), calls, logits)
        notes = call.notes.to(texts[0][0].dtype, copy=True)
        by_text = [] if logits is None else list(logits.split(sizes, dim=1))
        return by_text, [note.split(sizes, dim=1) for note in notes]

    def _plan_for(
        self, modules: Sequence[nn.Module], hidden: Tensor, slots: range, cache: KVCache, most: int = dispatch.FEW_ROWS
    ) -> "_Plan | None":
        is_single = hidden.shape[0] == 1 and cache.pads is None
        if not is_single or hidden.shape[1] > most or torch.is_grad_enabled() or not modules:
            return None
        return self.plan(modules, hidden, slots, cache)

    def _head_weights(self) -> _HeadWeights | None:
        """The target's norm and vocabulary; None where they are not plain, not like the layers' norms, or hooked."""
        target, norm, output = self.target, self.target.norm, self.target.output
        if self._head is None:
            head, layer = _read_head(target), self._find(target.layers[-1])
            is_alike = head is not None and layer is not None and layer.shape.eps == head.eps
            self._head = (head if is_alike else None,)
        return None if is_hooked(norm) or is_hooked(output) else self._head[0]

    def plan(
        self, modules: Sequence[nn.Module], like: Tensor, slots: range, cache: KVCache, beside: "_Plan | None" = None
    ) -> "_Plan | None":
        """How states ``like`` [1, R, D] go through ``modules`` in this text; None where the kernel cannot be used.

        Through no modules they go as in the plan ``beside``, whose layers are left out.
        """
        if cache.is_float8:
            if self._find(modules[0]) is not None:
                _notice_float8()
            return None
        if not modules:
            aside = (id(beside), slots)
            if beside is not None and aside not in cache.plans:
                cache.plans[aside] = replace(beside, layers=beside.layers[:0], calls={})
            return cache.plans.get(aside)
        key = (id(modules[0]), slots, self._age)
        if key not in cache.plans:
            cache.plans[key] = self._make_plan(modules, like, slots, cache)
        return None if any(map(is_hooked, modules)) else cache.plans[key]

    def _make_plan(self, modules: Sequence[nn.Module], like: Tensor, slots: range, cache: KVCache) -> "_Plan | None":
        found, tables = [self._find(module) for module in modules], self._table(slots)
        layers = [f for f in found if f is not None]
        if tables is None or len(layers) < len(found) or any(layer.shape != layers[0].shape for layer in layers):
            return None
        shape, lines = layers[0].shape, []
        for layer, slot in zip(layers, slots, strict=True):
            keys, values = cache.tensors(slot, like, shape.num_kv_heads, shape.head_width)
            lines.append([*layer.words, keys.data_ptr(), values.data_ptr()])
        kernels = dispatch.cpu_kernels(self.target.device)
        words = np.array(lines, dtype=np.int64)
        return _Plan(shape, words, *tables, keys.shape[2], keys.dtype, layers, kernels, len(tables[0]) - 1)

    def _find(self, module: nn.Module) -> _Addresses | None:
        held = self._addresses  # another thread's refused generation may replace it
        if id(module) not in held:
            held[id(module)] = self._read(module)
        return held[id(module)]

    def _table(self, slots: range) -> tuple[Tensor, Tensor] | None:
        """Rotary tables [S, W] that layers ``slots`` are called with; None where they see more or less than the prefix,
        or have different ones.
        """
        if self.target.calls is None:
            return None
        calls = [self.target.calls.table[min(slot, self.target.num_layers - 1)][1] for slot in slots]
        rotary = calls[0].get("position_embeddings")
        for arguments in calls:
            rule = arguments.get("attention_mask")
            if not isinstance(rule, MaskRule) or not rule.is_causal:
                return None
            if arguments.get("position_embeddings") is not rotary:
                return None
        if not isinstance(rotary, tuple):
            return None
        if self._tables is None or self._tables[0] is not rotary:
            cos, sin = (part[0].float().contiguous() for part in rotary)
            self._tables = (rotary, cos, sin)
        return self._tables[1:]

    def _read(self, module: Any) -> _Addresses | None:
        """Addresses of a layer of the Llama kind; None for any other, and where something stands in the way."""
        kernels = dispatch.cpu_kernels(self.target.device)
        if kernels is None:
            return None
        try:
            layer = read_layer(self.target.family, module)
        except NotPlainError:
            return None
        if not all(kernels.takes(m.weight) for m in layer.linears):
            return None
        kept: list[Tensor] = []

        def small(held: Tensor | None) -> int:
            if held is None:
                return 0
            kept.append(held.detach().float().contiguous())
            return kept[-1].data_ptr()

        def large(linear: Any) -> int:
            kept.append(linear.weight.detach())
            return kept[-1].data_ptr()

        q, k, v, heads = layer.q, layer.k, layer.v, layer.head_norms or (None, None)
        words = [
            small(layer.attention_norm.weight), large(q), large(k), large(v), small(q.bias), small(k.bias),
            small(v.bias), *(small(getattr(h, "weight", None)) for h in heads), large(layer.o), small(layer.o.bias),
            small(layer.mlp_norm.weight), large(layer.gate), large(layer.up), large(layer.down),
        ]  # fmt: skip
        width = layer.head_width
        shape = kernels.Shape(
            q.in_features, q.out_features // width, k.out_features // width, width, layer.gate.out_features,
            layer.scaling, float(layer.attention_norm.variance_epsilon),
        )  # fmt: skip
        return _Addresses(module, words, shape, kept) if kernels.fits(shape) else None


@functools.cache
def _notice_float8() -> None:
    logger.warning("the CPU's kernels do not take keys and values in float8: layers run by their modules, slower")


def _run(plan: _Plan, hidden: Tensor, first: int, parents: Sequence[int] | None) -> Tensor:
    """States [1, R, D] behind the plan's layers of rows in slots ``first`` and on."""
    rows = hidden.shape[1]
    return plan.call(rows)(hidden, *_placed(plan, rows, first, parents)).to(hidden.dtype, copy=True)


def _placed(plan: _Plan, rows: int, first: int, parents: Sequence[int] | None) -> tuple[int, list[int], Tensor | None]:
    """First slot, positions of the rows, and who sees whom."""
    depths, ancestors = tree_shape(None if parents is None else tuple(parents), rows)
    return first, [min(first + depth, plan.last_position) for depth in depths], ancestors


def _read_head(target: "Target") -> _HeadWeights | None:
    kernels, norm, output = dispatch.cpu_kernels(target.device), target.norm, target.output
    if kernels is None or target.family not in FAMILIES or not target.is_plain_head:
        return None
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    is_plain = isinstance(output, nn.Linear) and output.bias is None and not hasattr(output, "_hf_hook")
    if not is_plain or weight is None or eps is None or not kernels.takes(output.weight):
        return None
    return _HeadWeights(weight.detach().float().contiguous(), output.weight.detach(), float(eps))
