"""Residual sum and RMSNorm: the definition, in pure torch.

    s = residual + delta,    y = s / sqrt(mean(s^2) + eps) * weight

in float32 within a row. A Llama rounds s / sqrt(..) to the model's dtype before the product with the weight; a Gemma
(``is_offset``) multiplies by 1 + weight first and rounds once.

Shapes: D hidden, the rest any.
"""

import torch
from torch import Tensor

from .checks import require_dtype, require_shape

MOST_COLUMNS = 16384  # that registers can hold of a row


def add_rms_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, eps: float, is_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """The sum and its norm, [..., D] both, of ``residual`` and ``delta`` [..., D] and ``weight`` [D], of one dtype."""
    check(residual, delta, weight)
    total = residual + delta
    return total, rms_norm(total, weight, eps, is_offset)


def rms_norm(total: Tensor, weight: Tensor, eps: float, is_offset: bool = False) -> Tensor:
    """The norm alone, to the bit, of a sum ``total`` [..., D] that is there already."""
    check(total, None, weight)
    wide = total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if is_offset:
        return (normed * (1.0 + weight.float())).to(total.dtype)
    return weight * normed.to(total.dtype)


def check(residual: Tensor, delta: Tensor | None, weight: Tensor) -> None:
    """Raise for arguments that `add_rms_norm` does not take."""
    require_shape("weight", weight, residual.shape[-1])
    require_dtype("weight", weight, residual.dtype)
    if delta is not None:
        require_shape("delta", delta, *residual.shape)
        require_dtype("delta", delta, residual.dtype)
