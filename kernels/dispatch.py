"""The one place that chooses between a kernel and its pure-torch reference."""

import os

import torch
from torch import Tensor

from . import attention_reference, linear_cpu

CHOICES = ("reference", "triton")


def implementation(device: torch.device | str = "cpu") -> str:
    """Name of the implementation that runs on ``device``; SELFSPEC_KERNELS overrides it.

    Raises ValueError for a value of SELFSPEC_KERNELS that is not one of reference, triton, and NotImplementedError for
    triton, whose kernels are not part of this release.
    """
    del device  # every device runs the reference until the Triton kernels land
    choice = os.environ.get("SELFSPEC_KERNELS", "reference")
    if choice not in CHOICES:
        raise ValueError(f"SELFSPEC_KERNELS={choice!r}; choose one of {', '.join(CHOICES)}")
    if choice == "triton":
        raise NotImplementedError("SELFSPEC_KERNELS=triton: no Triton kernel yet, use SELFSPEC_KERNELS=reference")
    return choice


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `attention_reference.attention`."""
    if cache_dtype(q) == q.dtype:
        return attention_reference.attention(q, k, v, mask, scale, softcap, sinks)
    return attention_reference.attention(q.float(), k.float(), v.float(), mask, scale, softcap, sinks).to(q.dtype)


def cache_dtype(key: Tensor) -> torch.dtype:
    """What to keep keys and values like ``key`` in: float32 on a CPU that would have to emulate bfloat16."""
    is_emulated = key.dtype == torch.bfloat16 and key.device.type == "cpu" and not linear_cpu.has_bfloat16()
    return torch.float32 if is_emulated else key.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: linear_cpu.Product | None = None) -> Tensor:
    """x [..., R, I] times weight [O, I] transposed, plus bias [O]: [..., R, O]; ``packed`` is `pack` of weight."""
    return torch.nn.functional.linear(x, weight, bias) if packed is None else packed(x, bias)


def pack(weight: Tensor) -> linear_cpu.Product | None:
    """See `linear_cpu.pack`."""
    return linear_cpu.pack(weight)


def profits_from_packing(x: Tensor, weight: Tensor) -> bool:
    """See `linear_cpu.profits_from_packing`."""
    return linear_cpu.profits_from_packing(x, weight)


def bfloat16_is_fast() -> bool:
    """Whether bfloat16 is the quick dtype on this CPU: by its instructions, or over packed weights."""
    return linear_cpu.has_bfloat16() or linear_cpu.has_half()
