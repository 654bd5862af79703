"""Verification: how much of a draft stands, and what the target says next.

Two rules with one interface, pure functions of tensors (randomness is an argument). Both are written for trees of
drafted tokens; a chain is the tree in which every row hangs on the one before.

* `coupled`: the target's own token at each row is argmax(log p + Gumbel noise), the noise keyed by position alone
  (`sampling.draw_token`); a draft stands while it equals that token. The text is then the target's whatever the draft.
* `rejection`: accept x ~ q with probability min(1, p(x)/q(x)), else go on with norm((p - q)+) (Leviathan et al. 2023,
  Chen et al. 2023; for several children of one row, drawn in turn, Miao et al. 2024).

Shapes: B batch, K drafted tokens, V vocabulary. Row 0 is the root (the last emitted token); draft j is row j + 1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.sampling import draw

RowProbs = Callable[[int, list[int]], Tensor]  # (row, accepted rows before it) -> p [V]
RowToken = Callable[[int, list[int]], int]  # (row, accepted rows before it) -> the target's own token
RowNoise = Callable[[int], Tensor]  # row -> uniform numbers [V]


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes in one cycle."""

    tokens: Tensor  # [B, K]
    parents: Tensor  # [B, K], row numbers: the root is 0, draft j is row j + 1
    probs: Tensor | None = None  # [B, K, V], q as really drawn from; None is one-hot at the token
    taps: Tensor | None = None  # [B, K + 1, D], states at the exit layer of all rows, if drafting computed them

    @property
    def num_drafted(self) -> int:
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        return self.parents.tolist() == [list(range(self.num_drafted))] * self.tokens.shape[0]


@dataclass(frozen=True)
class Verdict:
    """What verification found."""

    path: Tensor  # [B, K], accepted rows in order, -1 beyond num_accepted
    num_accepted: Tensor  # [B], 0 .. K
    next_token: Tensor  # [B], recovered if num_accepted < K, else bonus


def verify_coupled(own: Tensor | RowToken, draft: Draft) -> Verdict:
    """Accept drafts that equal the target's ``own`` tokens [B, K + 1], drawn at every row.

    For B = 1 also a function of (row, accepted rows before it), called for the accepted rows alone, in order.
    """
    _check_rows("own", own, draft)
    return _gather(draft, [_walk_coupled(_own_of(own, b), draft, b) for b in range(draft.tokens.shape[0])])


def verify_rejection(
    target_probs: Tensor | RowProbs, draft: Draft, accept_noise: Tensor, recover_noise: Tensor | RowNoise
) -> Verdict:
    """Accept draft j with probability min(1, p/q); what remains of p after rejections gives the next token.

    target_probs [B, K + 1, V], accept_noise [B, K] uniform, recover_noise [B, K + 1, V] uniform, independent of the
    noise that drew the draft and of each other; the first and the last may be functions, as in `verify_coupled`.
    """
    _check_rows("target_probs", target_probs, draft)
    return _gather(
        draft,
        [
            _walk_rejection(_rows_of(target_probs, b), draft, b, accept_noise[b], _noise_of(recover_noise, b))
            for b in range(draft.tokens.shape[0])
        ],
    )


def _check_rows(name: str, rows: Tensor | RowProbs | RowToken, draft: Draft) -> None:
    if isinstance(rows, Tensor) and rows.shape[1] != draft.num_drafted + 1:
        raise ValueError(f"{name} needs K+1 positions for K={draft.num_drafted}, got {rows.shape[1]}")


def _rows_of(probs: Tensor | RowProbs, batch: int) -> RowProbs:
    return (lambda row, _: probs[batch, row]) if isinstance(probs, Tensor) else probs


def _own_of(own: Tensor | RowToken, batch: int) -> RowToken:
    return (lambda row, _: int(own[batch, row])) if isinstance(own, Tensor) else own


def _noise_of(noise: Tensor | RowNoise, batch: int) -> RowNoise:
    return (lambda row: noise[batch, row]) if isinstance(noise, Tensor) else noise


def _children(draft: Draft, batch: int, row: int) -> list[int]:
    return [j + 1 for j, parent in enumerate(draft.parents[batch].tolist()) if parent == row]


def _walk_coupled(own: RowToken, draft: Draft, batch: int) -> tuple[list[int], int]:
    row, path = 0, list[int]()
    while True:
        token = own(row, path)
        agreeing = [c for c in _children(draft, batch, row) if int(draft.tokens[batch, c - 1]) == token]
        if not agreeing:
            return path, token
        row = agreeing[0]
        path.append(row)


def _walk_rejection(
    probs: RowProbs, draft: Draft, batch: int, accept_noise: Tensor, recover_noise: RowNoise
) -> tuple[list[int], int]:
    row, path = 0, list[int]()
    while True:
        p = probs(row, path)
        for child in _children(draft, batch, row):
            token = int(draft.tokens[batch, child - 1])
            q = _draft_probs(draft, batch, child, p)
            if accept_noise[child - 1] * q[token] < p[token]:
                break
            residual = (p - q).clamp_min(0.0)
            mass = residual.sum()
            p = residual / mass if mass > 0 else p  # no mass left: p and q agree up to rounding
        else:
            return path, int(draw(p, recover_noise(row)))
        row = child
        path.append(row)


def _draft_probs(draft: Draft, batch: int, row: int, like: Tensor) -> Tensor:
    if draft.probs is not None:
        return draft.probs[batch, row - 1].to(like.dtype)
    return torch.zeros_like(like).scatter_(0, draft.tokens[batch, row - 1 : row].to(like.device), 1.0)


def _gather(draft: Draft, walks: list[tuple[list[int], int]]) -> Verdict:
    count, device = draft.num_drafted, draft.tokens.device
    return Verdict(
        path=torch.tensor([p + [-1] * (count - len(p)) for p, _ in walks], device=device).view(len(walks), count),
        num_accepted=torch.tensor([len(p) for p, _ in walks], device=device),
        next_token=torch.tensor([t for _, t in walks], device=device),
    )
