"""The target model, run in parts: embed, any range of layers, logits.

The family's own code stays in charge. At set-up its decoder runs once over positions 0, 1, 2, ... with every layer
replaced by a recorder; what the recorders were called with (rotary tables, masks, argument names) is the recipe for
calling the real layers later, a few rows at a time. No modeling file is copied, and `base` is never edited: whatever
must differ (the attention function, a list of recorders) lives in shallow clones that share parameters and hooks.

Shapes: B batch, R rows of a pass, T slots, D hidden, V vocabulary, L layers.
"""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from selfspec import proof
from selfspec.cache import KVCache
from selfspec.clones import bare_clone, is_split, shallow_clone
from selfspec.fused import FusedLayers
from selfspec.head import Head
from selfspec.kernels import dispatch
from selfspec.kernels.row_view import RowView
from selfspec.layer_calls import Call, LayerCalls, Place, Recorder, call_layer
from selfspec.linears import with_dispatched_linears
from selfspec.masks import MaskRule, row_depths
from selfspec.packed import PackedLayers
from selfspec.proof import UnsupportedModelError

ATTENTION = "selfspec"
LAYER_LISTS = ("layers", "h", "blocks")
NORM_NAMES = ("norm", "ln_f", "final_layer_norm", "final_layernorm")


def _attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | RowView | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over `kernels.dispatch.attention`."""
    del module
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return dispatch.attention(query, key, value, attention_mask, scale, softcap, s_aux), None


def _mask_rule(mask_function: Callable[..., Tensor], **_: Any) -> "MaskRule":
    return MaskRule(mask_function)


AttentionInterface.register(ATTENTION, _attention_forward)
AttentionMaskInterface.register(ATTENTION, _mask_rule)


class Target:
    """A frozen Hugging Face causal language model that runs layer by layer over a `KVCache`.

    Raises UnsupportedModelError where the model has no stack of decoder layers or `self_check` finds a difference.
    """

    def __init__(self, base: PreTrainedModel, check: bool = True) -> None:
        if base.training:
            raise ValueError("the target must be in evaluation mode: call model.eval() first")
        if getattr(base.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(f"{base.config.model_type}: encoder-decoder models are not supported")
        self.base = base
        self.config = base.config.get_text_config()
        self.num_layers: int = self.config.num_hidden_layers
        self.embedding: Any = base.get_input_embeddings()
        dispatch.implementation(self.device)  # names a wrong choice of kernels now, not in the middle of a text
        self.calls: LayerCalls | None = None  # how the family calls its layers
        self.fused, self.packed = FusedLayers(self), PackedLayers(self)
        self.is_plain_embed = self.is_plain_head = False
        try:
            self._take_apart(check)
        except UnsupportedModelError:
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UnsupportedModelError(
                f"{self.family}: its layers cannot be run one by one ({type(error).__name__}: {reason})"
            ) from error

    def _take_apart(self, check: bool) -> None:
        base = self.base
        self._path, stack = self._find_layers()
        self.output: Any = base.get_output_embeddings()
        decoder = base.get_submodule(".".join(self._path[:-1]))
        self._norm_name = next((n for n in NORM_NAMES if isinstance(getattr(decoder, n, None), nn.Module)), "")
        if not self._norm_name or self.output is None:
            raise UnsupportedModelError(f"{self.family}: no final norm or no output layer found")
        self.norm: nn.Module = getattr(decoder, self._norm_name)
        self._private_config = copy.copy(self.config)
        self._private_config._attn_implementation_internal = ATTENTION
        # accelerate's hooks call the original module, whatever clone they hang on: such layers run as they are
        self.layers: list[nn.Module] = [
            layer if hasattr(layer, "_hf_hook") else self._with_private_config(layer) for layer in stack
        ]
        self.packed.take(self.layers)
        self._shell, self._recorders = self.make_shell(self.norm, self.output)
        with torch.no_grad():
            self.plain_head = Head(self, is_dispatched=False)  # what proofs to the last bit compare with
            self.is_plain_embed, self.is_plain_head = proof.shortcuts(self)
            self.head = Head(self)
            if check:
                self.self_check()

    @property
    def family(self) -> str:
        return str(self.config.model_type)

    @property
    def name(self) -> str:
        """Hub id of the model, or its folder's name without the path; the family where neither is known."""
        folder = Path(self.base.config._name_or_path or self.family)
        source = folder / "selfspec_source.json"  # written where a default model was converted
        if source.is_file():
            return str(json.loads(source.read_text(encoding="utf-8"))["hub_id"])
        return folder.name if folder.is_dir() else str(folder)

    @property
    def is_split(self) -> bool:
        """See `clones.is_split`."""
        return is_split(self.base)

    def agreed(self, number: int) -> int:
        """The first process's ``number``, where several hold the target together; their generators may differ."""
        if not self.is_split:
            return number
        told = torch.tensor([number], device=self.device)
        distributed.broadcast(told, 0)
        return int(told)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def context_length(self) -> int | None:
        """Most tokens of a text, None where the family sets no limit; rotary tables are not grown beyond their own."""
        longest: int | None = getattr(self.config, "max_position_embeddings", None)
        rope = getattr(self.config, "rope_parameters", None) or {}
        trained = rope.get("original_max_position_embeddings")
        return int(trained) if trained and self._grows_its_tables else longest

    @property
    def _grows_its_tables(self) -> bool:
        """Whether rotary tables depend on how long the text is."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        kinds = {str(rope.get("rope_type"))} | {str(r.get("rope_type")) for r in rope.values() if isinstance(r, dict)}
        return bool(kinds & {"dynamic", "longrope"})

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Width V of the logits, padding of the vocabulary included."""
        return int(self.output.weight.shape[0])

    def self_check(self) -> None:
        """See `proof.check_split`; runs at set-up."""
        proof.check_split(self)

    def is_row_exact(self, width: int, num_rows: int | None = None, is_float8: bool = False) -> bool:
        """See `proof.is_row_exact`."""
        return proof.is_row_exact(self, width, num_rows, is_float8)

    @property
    def base_layers(self) -> list[nn.Module]:
        """The base's own decoder layers."""
        return list(self.base.get_submodule(".".join(self._path)).children())

    def notice_changes(self) -> None:
        """Look at the model again, whose weights and hooks may have changed; called where a text begins."""
        self.embedding = self.base.get_input_embeddings()
        self.fused.forget()
        self.packed.look_again()

    # ---- the three primitives ------------------------------------------------------------------------------------

    def embed(
        self, tokens: Tensor, first: int = 0, depths: Sequence[int] | None = None, pads: Tensor | None = None
    ) -> Tensor:
        """Input states [B, R, D] of ``tokens`` [B, R] in slots first, first + 1, ... (or first + depths); ``pads`` [B]
        as in `KVCache`.
        """
        if self.is_plain_embed:
            return self.embedding(tokens)
        steps = range(tokens.shape[1]) if depths is None else depths
        positions = torch.tensor([[first + step for step in steps]], device=tokens.device)
        if pads is not None:
            positions = (positions - pads[:, None]).clamp(min=0)
        self._run_shell(input_ids=tokens, position_ids=positions)
        hidden = self._recorders[0].hidden
        assert hidden is not None
        return hidden

    def run_layers(
        self, hidden: Tensor, start: int, stop: int, cache: KVCache, parents: Sequence[int] | None = None
    ) -> Tensor:
        """Run layers [start, stop) on ``hidden`` [B, R, D], the rows behind what those layers hold in ``cache``.

        Several sequences go on at one slot, whatever their lengths: see `KVCache` on padding.

        ``parents`` gives the rows of a draft tree: row i hangs on row parents[i], row 0 on the cache (parents[0] is
        ignored); None is a chain. Returns the states after layer stop - 1, [B, R, D].
        """
        return self.run_modules(self.layers[start:stop], hidden, range(start, stop), cache, parents)

    def run_modules(
        self,
        modules: Sequence[nn.Module],
        hidden: Tensor,
        slots: range,
        cache: KVCache,
        parents: Sequence[int] | None = None,
    ) -> Tensor:
        """`run_layers` for given layer modules, whose keys and values live in the layers ``slots`` of ``cache``.

        Modules beyond the target's own are called like its last ones.
        """
        if parents is not None and cache.pads is not None:
            raise ValueError("a draft tree belongs to one sequence without padding")
        num_rows, first = hidden.shape[1], cache.lengths[slots.start]
        is_exact = cache.width is not None and slots.start < self.num_layers and num_rows <= cache.width
        if is_exact:
            hidden = pad_rows(hidden, cache.width)
        calls = self.open(hidden, slots, cache)
        made = self.fused.run(modules, hidden, slots, cache, parents)
        if made is not None:
            cache.advance(slots, num_rows)
            return made[:, :num_rows]
        read_end = cache.capacity if is_exact else first + hidden.shape[1]
        tree, width = None if parents is None else tuple(parents), cache.width if is_exact else None
        place = Place(first, hidden.shape[1], read_end, tree, cache.pads, width)
        by_layer = calls.at(place, self.device)
        cache.open(first, hidden.shape[1], read_end, num_rows)
        hidden = self.call_modules(modules, hidden, slots, by_layer, cache)
        cache.advance(slots, num_rows)
        return hidden[:, :num_rows].to(self.device)  # layers may lie on several

    def call_modules(
        self, modules: Sequence[nn.Module], hidden: Tensor, slots: range, by_layer: Sequence[Call], cache: KVCache
    ) -> Tensor:
        """States [B, R, D] behind layer ``modules`` at ``slots`` of ``cache``, which is open for the pass's rows."""
        return self.packed.run(modules, hidden, slots, [by_layer[i] for i in self._called_like(slots)], cache)

    def finish(
        self,
        hidden: Tensor,
        start: int,
        cache: KVCache,
        depths: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        num_logits: int | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Run layers [start, L) as `run_layers` does, then norm and output layer.

        Returns the logits [B, R, V] in float32, of the last ``num_logits`` rows if that is given, and the states
        [B, R, D] at ``depths`` from ``start`` on: the number of layers behind them.
        """
        slots, inner = range(start, self.num_layers), sorted({depth for depth in depths if depth > start})
        states = {start: hidden}
        if cache.width in (None, 1) and num_logits is None and slots:  # width 1 pads nothing
            self.open(hidden, slots, cache)
            made = self.fused.finish(hidden, slots, cache, parents, inner)
            if made is not None:
                cache.advance(slots, hidden.shape[1])
                return made[0], states | made[1]
        for depth in sorted({*inner, self.num_layers}):
            states[depth] = hidden = self.run_layers(hidden, start, depth, cache, parents)
            start = depth
        return self.logits(hidden if num_logits is None else hidden[:, -num_logits:], cache), states

    def logits(self, hidden: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits [B, R, V] in float32 of states ``hidden`` [B, R, D] after the last layer."""
        num_rows = hidden.shape[1]
        if cache is not None and cache.width is not None:
            hidden = pad_rows(hidden, cache.width)
        return self.head(hidden)[:, :num_rows].float().to(self.device)

    def run_uncached(
        self,
        modules: Sequence[nn.Module],
        hidden: Tensor,
        slots: range,
        mask: Tensor | None = None,
        parents: Sequence[int] | None = None,
    ) -> Tensor:
        """Run layer modules over whole sequences ``hidden`` [B, R, D] from position 0, keeping nothing.

        ``slots`` says which layers of the target they are called like (mask, rotary table), as in `run_modules`.
        ``mask`` takes the place of the family's own. ``parents`` as in `run_layers`: row 0 stands at position 0, and so
        does every row whose parent is -1, which begins a sequence of its own.
        """
        num_rows = hidden.shape[1]
        place = Place(0, num_rows, num_rows, None if parents is None else tuple(parents))
        num_positions = num_rows if parents is None else 1 + max(row_depths(parents))
        by_layer = self._record_calls(num_positions).at(place, self.device, mask)
        for module, layer in zip(modules, self._called_like(slots), strict=True):
            hidden = call_layer(module, hidden, by_layer[layer], None)
        return hidden

    # ---- how the family calls its layers -------------------------------------------------------------------------

    def _called_like(self, slots: range) -> range:
        """Layers of the target whose masks and tables modules at ``slots`` get; behind them its last ones."""
        first = slots.start if slots.start < self.num_layers else self.num_layers - len(slots)
        return range(first, first + len(slots))

    def _find_layers(self) -> tuple[list[str], nn.ModuleList]:
        for name, module in self.base.named_modules():
            *_, last = path = name.split(".")
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers and last in LAYER_LISTS:
                return path, module
        raise UnsupportedModelError(f"{self.family}: no list of {self.num_layers} decoder layers found")

    def _with_private_config(self, layer: nn.Module) -> nn.Module:
        clone = shallow_clone(layer)
        for name, child in layer._modules.items():
            if child is not None and hasattr(child, "config"):
                clone._modules[name] = shallow_clone(child, config=self._private_config)
        return with_dispatched_linears(clone)

    def make_shell(self, norm: nn.Module, output: nn.Module) -> tuple[nn.Module, list[Recorder]]:
        """A clone of the whole model whose layers are recorders and whose norm and output are the given ones."""
        recorders = [Recorder(layer) for layer in self.base_layers]
        shell = bare_clone(self.base, self._private_config)
        for name, child in self.base._modules.items():
            if child is self.output:
                shell._modules[name] = output
        parent: Any = shell
        for name in self._path[:-1]:
            parent._modules[name] = bare_clone(parent._modules[name], self._private_config)
            parent = parent._modules[name]
        parent._modules[self._path[-1]] = nn.ModuleList(recorders)
        parent._modules[self._norm_name] = norm
        return shell, recorders

    def _run_shell(self, **inputs: Any) -> None:
        decoder = self._shell.get_submodule(".".join(self._path[:-1]))
        type(decoder).forward(
            decoder, past_key_values=inputs.pop("past_key_values", DynamicCache()), use_cache=True, **inputs
        )

    def open(self, hidden: Tensor, slots: range, cache: KVCache) -> LayerCalls:
        """Begin a pass of the rows ``hidden`` through layers that hold equally many; how those are called."""
        first, num_rows = cache.lengths[slots.start], hidden.shape[1]
        if any(cache.lengths[slot] != first for slot in slots):
            raise ValueError(f"layers {slots.start}..{slots.stop - 1} hold different numbers of rows: {cache.lengths}")
        cache.open(first, num_rows, first + num_rows)
        return self.calls_for(cache)

    def calls_for(self, cache: KVCache) -> LayerCalls:
        """How the layers are called at any place in ``cache``."""
        if self.calls is not None and cache.capacity <= self.calls.size:
            return self.calls
        return self._record_calls(min(cache.capacity, self.context_length or cache.capacity))

    @torch.no_grad()
    def _record_calls(self, num_positions: int) -> LayerCalls:
        """The layers' calls, recorded now where they were not for ``num_positions`` positions yet."""
        if self.calls is not None and num_positions <= self.calls.size:
            return self.calls
        size = max(1024, 1 << (num_positions - 1).bit_length()) + 1  # a size that is no other dimension's
        longest = self.context_length
        if longest is not None and (self._grows_its_tables or not getattr(self.config, "rope_parameters", None)):
            size = min(size, longest)  # behind it there are other tables, or none
            if num_positions > size:
                raise ValueError(f"{self.family}: {num_positions} positions exceed the context of {longest}")
        embeds = torch.zeros(1, 1, self.hidden_size, dtype=self.dtype, device=self.device).expand(1, size, -1)
        cache, positions = DynamicCache(), torch.arange(size, device=self.device)[None]
        self._run_shell(inputs_embeds=embeds, position_ids=positions, past_key_values=cache)
        self.calls = LayerCalls(self._recorders, cache, size)
        return self.calls


def pad_rows(hidden: Tensor, width: int | None) -> Tensor:
    """Exact mode: add rows of zeros to ``hidden`` [B, R, D] up to the fixed ``width`` of decoding passes."""
    missing = (width or 0) - hidden.shape[1]
    return nn.functional.pad(hidden, (0, 0, 0, missing)) if missing > 0 else hidden
