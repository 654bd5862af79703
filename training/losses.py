"""What an exit is trained on and judged by. p: target, q: exit, both over the drafted vocabulary V_d."""

from collections.abc import Callable

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """-sum_x p(x) log q(x) [A] of logits, probs [A, V_d].

    Here and below p is not renormalised: what lies outside the drafted vocabulary has no target.
    """
    return probs.sum(-1) * logits.logsumexp(-1) - (probs * logits).sum(-1)


def kl(logits: Tensor, probs: Tensor) -> Tensor:
    """sum_x p(x) log(p(x) / q(x)) [A]: the gradient of `cross_entropy`, zero where the exit is the target."""
    return cross_entropy(logits, probs) + torch.special.xlogy(probs, probs).sum(-1)


def reverse_kl(logits: Tensor, probs: Tensor) -> Tensor:
    """sum_x q(x) log(q(x) / p(x)) [A]: dear where the exit drafts what the target would not say."""
    log_q = logits.log_softmax(-1)
    return (log_q.exp() * (log_q - probs.clamp_min(SMALLEST).log())).sum(-1)


def total_variation(logits: Tensor, probs: Tensor) -> Tensor:
    """1 - sum_x min(p(x), q(x)) [A]: the chance that a sampled draft is rejected."""
    return 1 - overlap(logits, probs)


def likelihood_to_acceptance(logits: Tensor, probs: Tensor) -> Tensor:
    """From `kl`, whose gradient leads from far away, to `total_variation`, which is what counts [A].

    The weight of the first is exp(-3 a), a the acceptance so far: the hybrid of the LK losses, as speculators has it.
    """
    accepted = overlap(logits, probs)
    weight = torch.exp(-3 * accepted.detach())
    return weight * kl(logits, probs) + (1 - weight) * (1 - accepted)


def overlap(logits: Tensor, probs: Tensor) -> Tensor:
    """sum_x min(p(x), q(x)) [A]: the chance that a draft sampled from q is accepted (Leviathan et al. 2023, eq. 5)."""
    return torch.minimum(logits.softmax(-1), probs).sum(-1)


SMALLEST = 1e-20  # p below it counts as this in a logarithm
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
    "lk": likelihood_to_acceptance,
}
