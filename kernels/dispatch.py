"""The one place that chooses between a kernel and its pure-torch reference."""

import functools
import importlib
import importlib.util
import logging
import os
import platform
from typing import Any

import torch
from torch import Tensor

from . import attention_reference
from .row_view import RowView

logger = logging.getLogger(__name__)
CHOICES = ("reference", "cpu", "triton")
FEW_ROWS = 64  # of a decoding pass; a prompt has more


def implementation(device: torch.device | str = "cpu") -> str:
    """Name of the implementation that runs on ``device``; SELFSPEC_KERNELS overrides it.

    Raises ValueError for a value of SELFSPEC_KERNELS that is not one of reference, cpu and triton, or not to be had.
    """
    return _chosen(os.environ.get("SELFSPEC_KERNELS"), torch.device(device).type)


@functools.cache
def _chosen(choice: str | None, device_type: str) -> str:
    if choice is not None and choice not in CHOICES:
        raise ValueError(f"SELFSPEC_KERNELS={choice!r}; choose one of {', '.join(CHOICES)}")
    if choice == "triton" or (choice is None and device_type == "cuda"):
        missing = _missing_for_triton(device_type)
        if missing is None:
            return "triton"
        if choice is not None:
            raise ValueError(f"SELFSPEC_KERNELS=triton: {missing}")
        logger.warning("%s: attention by torch, slower", missing)
    is_cpu = device_type == "cpu" and choice != "reference" and _has_compiler()
    return "cpu" if is_cpu else "reference"


def _missing_for_triton(device_type: str) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    is_interpreted = importlib.import_module("triton").knobs.runtime.interpret
    return None if device_type == "cuda" or is_interpreted else f"on {device_type} it needs TRITON_INTERPRET=1"


@functools.cache
def _has_compiler() -> bool:
    has_numba = importlib.util.find_spec("numba") is not None
    if not has_numba:
        logger.warning("numba is not installed: slower products on this CPU; pip install numba")
    return has_numba


def cpu_kernels(device: torch.device) -> Any:
    """The module `cpu_layers`, compiled at its first import; None where the reference runs."""
    return _cpu_layers() if implementation(device) == "cpu" else None


def cpu_draft(device: torch.device) -> Any:
    """The module `cpu_draft`, likewise."""
    return importlib.import_module(f"{__package__}.cpu_draft") if implementation(device) == "cpu" else None


def cpu_sample(device: torch.device) -> Any:
    """The module `cpu_sample`, likewise."""
    return importlib.import_module(f"{__package__}.cpu_sample") if implementation(device) == "cpu" else None


def cpu_attention(device: torch.device) -> Any:
    """The module `cpu_attention`, likewise."""
    return importlib.import_module(f"{__package__}.cpu_attention") if implementation(device) == "cpu" else None


def load(device: torch.device) -> None:
    """Compile what decoding on ``device`` needs, or take it from disk, so that no cycle has to wait for it."""
    for module in (cpu_kernels, cpu_draft, cpu_sample):
        module(device)


def worth_of_a_row(device: torch.device) -> float:
    """The chance that a draft needs for a row of the verify pass: about what a row costs, in passes (docs/LOG.md)."""
    kernels = cpu_kernels(device)
    return 0.06 if kernels is None else float(kernels.WORTH_OF_A_ROW)


@functools.cache
def _cpu_layers() -> Any:
    return importlib.import_module(f"{__package__}.cpu_layers")


def takes_views(device: torch.device, num_rows: int) -> bool:
    """Whether a pass of so many rows goes to a kernel that takes a `RowView` in place of a mask."""
    return num_rows <= FEW_ROWS and implementation(device) == "triton"


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | RowView | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `attention_reference.attention`; with a `RowView` see `attention_reference.attention_over_cache`."""
    if cache_dtype(q) != q.dtype:
        return attention(q.float(), k.float(), v.float(), mask, scale, softcap, sinks).to(q.dtype)
    if isinstance(mask, RowView):
        return _attention_over_cache(q, k, v, mask, scale, softcap, sinks)
    is_plain = softcap is None and sinks is None and not torch.is_grad_enabled()
    kernels = cpu_attention(q.device) if is_plain and q.shape[0] > 1 else None  # one sequence's layers are fused
    if kernels is not None and kernels.takes(q, k, v, mask):
        return kernels.attention(q, k, v, mask, scale)
    return attention_reference.attention(q, k, v, mask, scale, softcap, sinks)


def _attention_over_cache(q: Tensor, k: Tensor, v: Tensor, view: RowView, *settings: Any) -> Tensor:
    if implementation(q.device) != "triton":
        return attention_reference.attention_over_cache(q, k, v, view, *settings)
    kernels = importlib.import_module(f"{__package__}.attention_triton")
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    reason = "gradients" if needs_grad else kernels.problem(q, k, v)
    if reason is None:
        return kernels.attention_over_cache(q, k, v, view, *settings)
    _notice(f"the Triton attention does not take {reason}: attention by torch, slower")
    return attention_reference.attention_over_cache(q, k, v, view, *settings)


@functools.cache
def _notice(message: str) -> None:
    logger.warning(message)


def cache_dtype(key: Tensor) -> torch.dtype:
    """What to keep keys and values like ``key`` in: float32 on a CPU that would have to emulate bfloat16."""
    return torch.float32 if _is_emulated(key) else key.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., R, I] times weight [O, I] transposed, plus bias [O]: [..., R, O]."""
    if x.device.type == "cpu" and x.dtype == weight.dtype and not torch.is_grad_enabled():
        rows = x.numel() // x.shape[-1]
        kernels = cpu_kernels(x.device) if rows <= FEW_ROWS and not _suits_torch(x, weight, rows) else None
        if kernels is not None and kernels.takes(weight):
            return kernels.linear(x, weight, bias)
        if _is_emulated(x):  # many rows: one conversion of the weight is cheaper than emulated products
            wide = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
            return wide.to(x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def _suits_torch(x: Tensor, weight: Tensor, rows: int) -> bool:
    """Whether torch's float32 product is quicker: for a dozen rows or more, except by a vocabulary.

    Only for several sequences; within one, a row's bits must not depend on how many stand beside it.
    """
    is_tall = weight.shape[0] > 8 * weight.shape[1]
    return x.dim() == 3 and x.shape[0] > 1 and x.dtype == torch.float32 and rows > 12 and not is_tall


def takes_prompts(x: Tensor) -> bool:
    """Whether the CPU's kernels run a prompt's rows ``x`` quicker than torch: they do in pairs of bfloat16.

    Not where there are tiles (AMX), which only torch's products use.
    """
    kernels = cpu_kernels(x.device)
    return kernels is not None and kernels.HAS_PAIRS and x.dtype == torch.bfloat16 and not _has_tiles()


@functools.cache
def _has_tiles() -> bool:
    return torch.cpu._is_amx_tile_supported()


def bfloat16_is_fast() -> bool:
    """Whether bfloat16 is the quick dtype on this CPU: by its instructions, or by our products."""
    return _has_bfloat16() or implementation("cpu") == "cpu"


def _is_emulated(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not _has_bfloat16()


@functools.cache
def _has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 natively (AVX512-BF16, AMX, Arm BF16); emulation does not count."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not is_x86 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
