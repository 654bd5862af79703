"""Rotary embedding of queries and keys and the write of keys and values to the cache: the definition, in pure torch.

    y[i] = x[i] cos[i] - x[i + W/2] sin[i]              for i < W/2
    y[i] = x[i] cos[i] + x[i - W/2] sin[i]              for W/2 <= i < W
    y[i] = x[i]                                         for i >= W (partial rotary)

with cos and sin of the row's position, every product and sum rounded to the dtype of x, as the families' modules do.
Where the family has them, RMSNorms of queries and keys over each head's width come first.

Shapes: B sequences, R rows, H query heads, Hkv key/value heads, D head width, W rotary width, S slots, T positions.
"""

import torch
from torch import Tensor

from .add_rms_norm_reference import rms_norm
from .checks import require_dtype, require_shape


def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Queries [B, H, R, D] of ``qkv`` [B, R, (H + 2 Hkv) D], rotated; keys and values go to their cache, in place.

    ``cos`` and ``sin`` [T, W] are tables in the dtype of ``qkv``, ``keys`` and ``values`` [B, Hkv, S, D] the cache of
    one layer in any dtype, ``positions`` and ``slots`` [B, R] int64; a row of a negative slot is not kept.
    ``norms`` are the weights [D] of the RMSNorms of queries and keys, with ``eps``.
    """
    num_queries = check(qkv, cos, sin, positions, keys, values, slots, norms)
    groups, width = keys.shape[1], keys.shape[3]
    heads = qkv.unflatten(2, (-1, width)).transpose(1, 2)  # [B, H + 2 Hkv, R, D]
    q, k, v = heads.split([num_queries, groups, groups], dim=1)
    if norms is not None:
        q, k = (rms_norm(x, weight, eps) for x, weight in zip((q, k), norms, strict=True))
    tables = cos[positions][:, None], sin[positions][:, None]  # [B, 1, R, W]
    sequence, row = (slots >= 0).nonzero(as_tuple=True)
    at = slots[sequence, row]
    keys[sequence, :, at] = _rotated(k, *tables)[sequence, :, row].to(keys.dtype)
    values[sequence, :, at] = v[sequence, :, row].to(values.dtype)
    return _rotated(q, *tables)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning, still = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    left, right = turning.chunk(2, dim=-1)
    return torch.cat([turning * cos + torch.cat([-right, left], dim=-1) * sin, still], dim=-1)


def check(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, keys: Tensor, values: Tensor, slots: Tensor,
    norms: tuple[Tensor, Tensor] | None,
) -> int:  # fmt: skip
    """Raise for arguments that `rope_append` does not take; the number of query heads."""
    batch, groups, num_slots, width = keys.shape
    rows = qkv.shape[1]
    num_queries = qkv.shape[2] // width - 2 * groups
    if num_queries < 1:
        raise ValueError(f"no query heads: qkv is {list(qkv.shape)}, keys are {list(keys.shape)}")
    require_shape("qkv", qkv, batch, rows, (num_queries + 2 * groups) * width)
    require_shape("values", values, batch, groups, num_slots, width)
    require_shape("sin", sin, *cos.shape)
    if cos.shape[1] % 2 or cos.shape[1] > width:
        raise ValueError(f"rotary width must be even and at most {width}, got {cos.shape[1]}")
    for name, tensor in {"positions": positions, "slots": slots}.items():
        require_shape(name, tensor, batch, rows)
        require_dtype(name, tensor, torch.int64)
    for name, tensor in {"cos": cos, "sin": sin}.items():
        require_dtype(name, tensor, qkv.dtype)
    for weight in norms or ():
        require_shape("norms", weight, width)
        require_dtype("norms", weight, qkv.dtype)
    return num_queries
