"""Losses of an exit and their gradients by its logits: the definition, in pure torch, without autograd.

q = softmax(z) are the exit's probabilities, p the target's over the same columns, not renormalised, P = sum p. A row's
loss and dloss/dz are

    cross_entropy   -sum p log q                       P q - p
    kl              sum p log(p / q)                   P q - p
    reverse_kl      r = sum q log(q / p)               q (log(q / p) - r)
    tv              1 - sum min(p, q)                  -q (m - sum q m),  m = [q < p], one half where q = p
    lk              w kl + (1 - w) tv, w = exp(-3 sum min(p, q)) held fixed; gradients alike

Shapes: A rows, V columns.
"""

import torch
from torch import Tensor

from .checks import require_shape

SMALLEST = 1e-20  # p below it counts as this in the logarithm of the reverse divergence
LOSSES = ("cross_entropy", "kl", "reverse_kl", "tv", "lk")


def exit_loss(logits: Tensor, probs: Tensor, weights: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Losses [A] and the gradient [A, V] of their sum by ``weights`` [A], from ``logits`` and ``probs`` [A, V].

    The gradient has the dtype of ``logits`` and may take its place in memory: logits are used up. Losses are float32,
    or float64 of float64. Raises ValueError for an unknown ``name``.
    """
    check(logits, probs, weights, name)
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_q, p = logits.to(wide).log_softmax(-1), probs.to(wide)
    losses, gradient = _LOSSES[name](log_q, log_q.exp(), p)
    return losses, (gradient * weights[:, None]).to(logits.dtype)


def _cross_entropy(log_q: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    return -(p * log_q).sum(-1), p.sum(-1, keepdim=True) * q - p


def _kl(log_q: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    return (torch.special.xlogy(p, p) - p * log_q).sum(-1), p.sum(-1, keepdim=True) * q - p


def _reverse_kl(log_q: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    ratio = log_q - p.clamp_min(SMALLEST).log()
    loss = (q * ratio).sum(-1)
    return loss, q * (ratio - loss[:, None])


def _tv(log_q: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    del log_q
    is_less = (q < p).to(q.dtype) + 0.5 * (q == p)
    return 1 - torch.minimum(p, q).sum(-1), -q * (is_less - (q * is_less).sum(-1, keepdim=True))


def _lk(log_q: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    (far, far_gradient), (near, near_gradient) = _kl(log_q, q, p), _tv(log_q, q, p)
    weight = torch.exp(-3 * (1 - near))
    mixed = weight[:, None] * far_gradient + (1 - weight[:, None]) * near_gradient
    return weight * far + (1 - weight) * near, mixed


_LOSSES = dict(zip(LOSSES, (_cross_entropy, _kl, _reverse_kl, _tv, _lk), strict=True))


def check(logits: Tensor, probs: Tensor, weights: Tensor, name: str) -> None:
    """Raise for arguments that `exit_loss` does not take."""
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}; choose one of {', '.join(LOSSES)}")
    require_shape("probs", probs, *logits.shape)
    require_shape("weights", weights, logits.shape[0])
