"""The peers: what a user of transformers would pick instead, through its own public interface."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, StaticCache
from transformers.generation.streamers import BaseStreamer

from selfspec.eval.engine import AR
from selfspec.eval.measure import Meter, Phases, Request, SkippedMethodError
from selfspec.model import EarlyExitModel
from selfspec.pretrained import load_target_model

PEER = "transformers"  # its generate as it comes
STATIC_TIERS = (128, 256, 512, 1024, 2048, 4096, 8192)  # cache lengths: one compiled graph each


class Transformers:
    """transformers' own generate on the untouched base; ``options`` are its own arguments.

    Its speculative forms are held against its own plain decoding: what sets the two engines apart is not their doing.
    """

    is_promised = False

    def __init__(self, model: EarlyExitModel, **options: Any) -> None:
        self.base, self.tokenizer, self.options = model.base, model.tokenizer, options
        self.is_ar = not options
        self.reference = AR if self.is_ar else PEER

    def prepare(self, ids: Tensor, request: Request) -> None:
        """Nothing."""

    def run(self, ids: Tensor, request: Request, meter: Meter, phases: Phases) -> list[int]:
        """Generate with a streamer that hands the tokens on."""
        del phases
        sampling: dict[str, Any] = {"do_sample": False}
        if request.temperature > 0:
            sampling = {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}
            torch.manual_seed(request.seed)
        with untouched_config(self.base):
            sequences = self.base.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_new_tokens,
                streamer=_Tap(meter), **sampling, **self.arguments(),
            )  # fmt: skip
        return sequences[0, ids.shape[1] :].tolist()

    def arguments(self) -> dict[str, Any]:
        """What this way of generating passes on top."""
        return self.options


class _Tap(BaseStreamer):
    """Hands new tokens on; the first thing that generate puts is the prompt."""

    def __init__(self, meter: Meter) -> None:
        self._meter, self._has_prompt = meter, False

    def put(self, value: Tensor) -> None:
        if self._has_prompt:
            self._meter.emit(value.flatten().tolist())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing to do."""


@contextlib.contextmanager
def untouched_config(base: Any) -> Iterator[None]:
    """Put the number of layers back: assistant_early_exit leaves it changed when it fails."""
    config = base.config.get_text_config()
    num_layers = config.num_hidden_layers
    try:
        yield
    finally:
        config.num_hidden_layers = num_layers


class StaticCompiled(Transformers):
    """generate with a static cache and a compiled step: the fastest plain decoding that transformers documents."""

    def __init__(self, model: EarlyExitModel) -> None:
        super().__init__(model)
        self.is_ar, self.reference = True, AR
        self._caches: dict[int, StaticCache] = {}
        self._length = 0  # of the cache that the prompt at hand needs
        self._compile = CompileConfig(fullgraph=False, dynamic=False)
        self._compile._compile_all_devices = True  # CPUs too
        if model.target.device.type == "cpu":
            _require_compiler()

    def prepare(self, ids: Tensor, request: Request) -> None:
        """Choose the cache, and compile for a length that is new."""
        needed = ids.shape[1] + request.max_new_tokens
        self._length = next((tier for tier in STATIC_TIERS if tier >= needed), needed)
        if self._length not in self._caches:
            self._caches[self._length] = StaticCache(config=self.base.config, max_cache_len=self._length)
            self.run(ids, Request(4), Meter(ids.device), Phases())

    def arguments(self) -> dict[str, Any]:
        cache = self._caches[self._length]
        cache.reset()
        return {"past_key_values": cache, "compile_config": self._compile}


def _require_compiler() -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise SkippedMethodError("torch.compile on a CPU needs a C++ compiler") from error


def assistant_early_exit(model: EarlyExitModel, layer: int | None = None) -> Transformers:
    """transformers' own early-exit drafting: the target's norm and head after ``layer`` layers, a second cache."""
    if layer is None:
        head = model.default_exit
        layer = max(head.exit_layer, 1) if head is not None else max(model.target.num_layers // 4, 1)
    if not 1 <= layer < model.target.num_layers:
        raise ValueError(f"assistant_early_exit layer {layer} is not in 1..{model.target.num_layers - 1}")
    return Transformers(model, assistant_early_exit=layer)


def prompt_lookup(model: EarlyExitModel, num_tokens: int = 10) -> Transformers:
    """transformers' n-gram drafting from the text so far."""
    return Transformers(model, prompt_lookup_num_tokens=num_tokens)


def assistant_model(model: EarlyExitModel, path: str | None = None) -> Transformers:
    """Two-model speculative decoding (Leviathan et al. 2023; Chen et al. 2023) with the draft model at ``path``."""
    if path is None:
        raise SkippedMethodError("no draft model given; {method: assistant_model, path: FOLDER}")
    target = model.target
    draft, _ = load_target_model(path, dtype=target.dtype, device=target.device)
    theirs, ours = draft.config.get_text_config().vocab_size, target.config.vocab_size
    if theirs != ours:
        raise SkippedMethodError(f"the draft model's vocabulary has {theirs} ids, the target's {ours}")
    return Transformers(model, assistant_model=draft)
