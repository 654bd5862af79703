"""What an exit is judged by. p: target, q: exit, both over the drafted vocabulary V_d.

What it is trained on, with gradients: see `kernels.exit_loss_reference`.
"""

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """-sum_x p(x) log q(x) [A] of logits, probs [A, V_d].

    p is not renormalised: what lies outside the drafted vocabulary has no target.
    """
    return probs.sum(-1) * logits.logsumexp(-1) - (probs * logits).sum(-1)


def overlap(logits: Tensor, probs: Tensor) -> Tensor:
    """sum_x min(p(x), q(x)) [A]: the chance that a draft sampled from q is accepted (Leviathan et al. 2023, eq. 5)."""
    return torch.minimum(logits.softmax(-1), probs).sum(-1)
