"""Decoder layers of the Llama kind, and what keeps one from being run by other means than its own modules."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.activations import SiLUActivation

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LINEARS = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
)


class NotPlainError(Exception):
    """What of a layer is not as expected."""


@dataclass(frozen=True, eq=False)
class PlainLayer:
    """The parts of a layer; the linear maps are of one dtype and those of the MLP have no bias."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear
    attention_norm: Any
    mlp_norm: Any
    head_norms: tuple[Any, Any] | None  # of queries and keys
    head_width: int
    scaling: float

    @property
    def linears(self) -> list[nn.Linear]:
        """All linear maps, in the order of LINEARS."""
        return [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]

    @property
    def norms(self) -> list[Any]:
        """All norms."""
        return [self.attention_norm, self.mlp_norm, *(self.head_norms or ())]


def read_layer(family: str, module: Any) -> PlainLayer:
    """The parts of ``module``, a decoder layer of ``family``. Raises NotPlainError, naming what is in the way."""
    if family not in FAMILIES:
        raise NotPlainError(f"{family} is not of the Llama kind")
    for name, part in module.named_modules():
        if is_hooked(part) or hasattr(part, "_hf_hook"):
            raise NotPlainError(f"{name or type(part).__name__} has hooks")
    attention: Any = getattr(module, "self_attn", None)
    try:
        linears: list[Any] = [module.get_submodule(name) for name in LINEARS]
        norms = [module.input_layernorm, module.post_attention_layernorm]
    except AttributeError as error:
        raise NotPlainError(" ".join(str(error).split())) from error
    for name, linear in zip(LINEARS, linears, strict=True):
        if not isinstance(linear, nn.Linear):
            raise NotPlainError(f"{name} is of the class {type(linear).__name__}")
        if linear.weight.dtype != linears[0].weight.dtype:
            raise NotPlainError(f"{name} is in {linear.weight.dtype}, others in {linears[0].weight.dtype}")
        if name.startswith("mlp") and linear.bias is not None:
            raise NotPlainError(f"{name} has a bias")
    if not isinstance(module.mlp.act_fn, nn.SiLU | SiLUActivation):
        raise NotPlainError(f"its activation is {type(module.mlp.act_fn).__name__}")
    heads = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    q, k, v, o, gate, up, down = linears
    return PlainLayer(
        q, k, v, o, gate, up, down, norms[0], norms[1],
        None if None in heads else heads, attention.head_dim, float(attention.scaling),
    )  # fmt: skip


def is_hooked(module: nn.Module) -> bool:
    """Whether calling ``module`` calls something else too."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
