"""A linear map of a few rows.

    y = x W' + b

Decoding reads the whole of W for a handful of rows. On a CPU in fp32 torch's general matrix product takes about twice
the time of one row for two; oneDNN's, on weights reordered once into its blocked layout, takes hardly more than one
row's for a few. The reordered copy is the price: as much memory again, in fp32 on a CPU alone, from the first pass of
several rows on.

Shapes: R rows, I inputs, O outputs.
"""

import torch
from torch import Tensor

FEW_ROWS = range(2, 17)
HAS_PACKING = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
TYPICAL_ROWS = 4  # what the blocked layout is made for


def profits_from_packing(x: Tensor, weight: Tensor) -> bool:
    """Whether few rows ``x`` [..., R, I] are worth a reordered copy of ``weight`` on this machine."""
    return (
        x.numel() // x.shape[-1] in FEW_ROWS
        and HAS_PACKING
        and x.dtype == torch.float32
        and weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
    )


def pack(weight: Tensor) -> Tensor:
    """A copy of ``weight`` [O, I] in the layout that `linear` takes as ``packed``."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL_ROWS)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """x [..., R, I] times weight [O, I] transposed, plus bias [O]: [..., R, O]; ``packed`` is `pack` of weight."""
    if packed is None:
        return torch.nn.functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
