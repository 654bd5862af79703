"""Attention of a few query rows over a key/value cache: the definition, in pure torch.

    out[h, r] = softmax(cap(q[h, r] . k[g] * scale) + mask[r]) @ v[g],     g = h // (H / Hkv)

The query heads of a group are packed as rows of one matrix product, so that K and V are read once per group and never
repeated. The scores of a whole prompt are not materialised: many rows go to torch's fused attention.

Shapes: B batch, H query heads, Hkv key/value heads, R rows, T cached slots, D head width.
"""

import torch
from torch import Tensor

from .row_view import RowView

MAX_PACKED_ROWS = 64


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from ``q`` [B, H, R, D] to ``k``, ``v`` [B, Hkv, T, D]; returns [B, R, H, Dv].

    ``mask`` is boolean [R, T] or [B, R, T], true where a row may look; None stands for "everything" when R is 1 and for
    the causal mask of an empty cache when R > 1 (then T must equal R). ``softcap`` squashes scores as Gemma 2 does,
    ``sinks`` [H] adds one learnt score per head that takes weight and gives none (gpt-oss).
    """
    num_rows = q.shape[2]
    if mask is None and num_rows > 1 and k.shape[2] != num_rows:
        raise ValueError(f"rows over a cache need a mask: {num_rows} rows, {k.shape[2]} slots")
    if mask is not None and mask.dim() == 3:
        mask = mask[:, None]  # [B, 1, R, T]
    if num_rows > MAX_PACKED_ROWS and softcap is None and sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2)
    if mask is None and num_rows > 1:
        mask = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q.device).tril()
    return _packed_attention(q, k, v, mask, scale, softcap, sinks)


def _packed_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    batch, heads, rows, width = q.shape
    groups, slots = k.shape[1], k.shape[2]
    packed = (q * scale).reshape(batch * groups, heads // groups * rows, width)  # [B Hkv, G R, D]
    keys, values = k.flatten(0, 1), v.flatten(0, 1)  # [B Hkv, T, D]
    scores = torch.bmm(packed, keys.transpose(1, 2)).float()  # [B Hkv, G R, T]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        by_row = scores.view(batch, heads, rows, slots)
        scores = by_row.masked_fill(~mask, float("-inf")).view_as(scores)
    if sinks is not None:
        column = sinks.float().view(1, groups, -1, 1, 1).expand(batch, -1, -1, rows, 1)  # [B, Hkv, G, R, 1]
        scores = torch.cat([scores, column.reshape(batch * groups, -1, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :slots].to(v.dtype)
    out = torch.bmm(weights, values)  # [B Hkv, G R, Dv]
    return out.view(batch, heads, rows, -1).transpose(1, 2)


def attention_over_cache(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    view: RowView,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """`attention` of R <= 64 rows over a cache that holds their own keys and values too; returns [B, R, H, D].

    ``q`` is [B, H, R, D]; ``keys`` and ``values`` [B, Hkv, S, D] are in its dtype, or in e4m3 and then stand for
    ``kv_scales`` times what is stored. What no row of ``view`` sees may never have been written: it is not read. A row
    that sees nothing (padding) is zero.
    """
    mask = view.mask(keys.shape[2])
    unread = ~mask.any(dim=1)[:, None, :, None]  # [B, 1, S, 1]: zero times NaN would be NaN
    k, v = (t.to(q.dtype).masked_fill(unread, 0.0) * by for t, by in zip((keys, values), kv_scales, strict=True))
    blind = ~mask.any(dim=2)[:, :, None, None]
    return attention(q, k, v, mask, scale, softcap, sinks).masked_fill(blind, 0.0)
