"""Acceptance of drafts on the device: the definition, in pure torch, without a look at any value from the host.

A walk starts at the root, row 0; the drafts that hang on the row it stands on are judged in turn:

* coupled: the first that equals the target's own token at the row is accepted. Where none does, that token is next.
* rejection: draft x is accepted if u q(x) < p(x), else p becomes norm((p - q)+), or stays where no mass is left.
  Where all are rejected, the next token is drawn from what p has become (Leviathan et al. 2023; Miao et al. 2024).

An accepted draft's row is where the walk goes on. A draft stands behind the row that it hangs on.

Shapes: B sequences, K drafted tokens, V vocabulary. Row 0 is the root (the last emitted token), draft j is row j + 1.
"""

import torch
from torch import Tensor

from .checks import require_dtype, require_shape
from .noise_reference import ACCEPT_STREAM, RECOVER_STREAM, row_noise
from .sample_reference import sample

Found = tuple[Tensor, Tensor, Tensor, Tensor]


def verify_coupled(own: Tensor, tokens: Tensor, parents: Tensor, lengths: Tensor) -> Found:
    """Accept drafts that equal the target's ``own`` tokens [B, K + 1], drawn at every row.

    ``tokens`` and ``parents`` (row numbers) are [B, K], ``lengths`` [B] the cached rows before the root; all int64.
    Returns the path [B, K] of accepted rows in order, -1 beyond them; their number [B]; the next token [B], recovered
    or bonus; the new lengths [B], root and accepted rows included.
    """
    check(tokens, parents, lengths, own)
    batch, count = tokens.shape
    agrees = own.gather(1, parents) == tokens  # [B, K]
    row, path = own.new_zeros(batch), own.new_full((batch, count), -1)
    for step in range(count):
        stands = agrees & (parents == row[:, None])
        row = torch.where(stands.any(1), stands.int().argmax(1) + 1, row)
        path[:, step] = torch.where(stands.any(1), row, -1)
    accepted = (path >= 0).sum(1)
    return path, accepted, own.gather(1, row[:, None])[:, 0], lengths + accepted + 1


def verify_rejection(
    target_probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    lengths: Tensor,
) -> Found:
    """Accept draft j with probability min(1, p/q); returns what `verify_coupled` does.

    ``target_probs`` [B, K + 1, V] and ``draft_probs`` [B, K, V] (None: one-hot at the token) are float32. Draft j's u
    is the number of column j in the stream of acceptance at ``positions`` [B, 0]; the next token is drawn in the stream
    of recovery at the position of the row where the walk ended. ``seeds`` [B] and ``positions`` [B, K + 1] are int64.
    """
    check(tokens, parents, lengths, positions, seeds, target_probs, draft_probs)
    batch, count = tokens.shape
    chances = row_noise(seeds, ACCEPT_STREAM, positions[:, :1], torch.arange(count, device=tokens.device))[:, 0]
    row, path, p = tokens.new_zeros(batch), tokens.new_full((batch, count), -1), target_probs[:, 0]
    accepted = tokens.new_zeros(batch)
    for j in range(count):
        one_hot = torch.zeros_like(p).scatter_(1, tokens[:, j : j + 1], 1.0)
        q = one_hot if draft_probs is None else draft_probs[:, j]
        p_here, q_here = (d.gather(1, tokens[:, j : j + 1])[:, 0] for d in (p, q))
        is_asked = parents[:, j] == row
        stands = is_asked & (chances[:, j] * q_here < p_here)
        p = torch.where(stands[:, None], target_probs[:, j + 1], torch.where(is_asked[:, None], _rest(p, q), p))
        row = torch.where(stands, j + 1, row)
        path = path.scatter(1, accepted[:, None], torch.where(stands, j + 1, -1)[:, None])
        accepted = accepted + stands
    where = positions.gather(1, row[:, None])
    following = sample(p[:, None], seeds, where, stream=RECOVER_STREAM, is_probs=True)[:, 0]
    return path, accepted, following, lengths + accepted + 1


def _rest(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+) [B, V], or p where nothing is left: there p and q agree up to rounding."""
    residual = (p - q).clamp_min(0.0)
    mass = residual.sum(1, keepdim=True)
    return torch.where(mass > 0, residual / mass, p)


def check(
    tokens: Tensor,
    parents: Tensor,
    lengths: Tensor,
    rows: Tensor,
    seeds: Tensor | None = None,
    target_probs: Tensor | None = None,
    draft_probs: Tensor | None = None,
) -> None:
    """Raise for arguments that verification does not take; ``rows`` are own tokens or positions [B, K + 1]."""
    batch, count = tokens.shape
    require_shape("parents", parents, batch, count)
    require_shape("lengths", lengths, batch)
    require_shape("a number a row", rows, batch, count + 1)
    for name, tensor in {"tokens": tokens, "parents": parents, "lengths": lengths, "a number a row": rows}.items():
        require_dtype(name, tensor, torch.int64)
    if seeds is None or target_probs is None:
        return
    require_shape("seeds", seeds, batch)
    require_dtype("seeds", seeds, torch.int64)
    for name, probs, num_rows in (("target_probs", target_probs, count + 1), ("draft_probs", draft_probs, count)):
        if probs is not None:
            require_shape(name, probs, batch, num_rows, target_probs.shape[2])
            require_dtype(name, probs, torch.float32)
