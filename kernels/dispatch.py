"""The one place that chooses between a kernel and its pure-torch reference."""

import os

import torch
from torch import Tensor

from . import attention_reference, linear_reference

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
    return attention_reference.attention(q, k, v, mask, scale, softcap, sinks)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """See `linear_reference.linear`."""
    return linear_reference.linear(x, weight, bias, packed)


def pack(weight: Tensor) -> Tensor:
    """See `linear_reference.pack`."""
    return linear_reference.pack(weight)


def profits_from_packing(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` is quicker on a packed weight for ``x``."""
    return linear_reference.profits_from_packing(x, weight)
