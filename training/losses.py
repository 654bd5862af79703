"""What an exit is trained on and judged by. p: target, q: exit, both over the drafted vocabulary V_d."""

from dataclasses import dataclass

import torch
from torch import Tensor


def soft_cross_entropy(logits: Tensor, probs: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean over positions of -sum_x p(x) log q(x); logits, probs [A, V_d], weights [A].

    p is not renormalised: what lies outside the drafted vocabulary has no target.
    """
    mass = probs.sum(-1)
    losses = mass * logits.logsumexp(-1) - (probs * logits).sum(-1)
    return (losses * weights).sum() / weights.sum()


@torch.no_grad()
def overlap(logits: Tensor, probs: Tensor) -> Tensor:
    """sum_x min(p(x), q(x)) [A]: the chance that a draft sampled from q is accepted (Leviathan et al. 2023, eq. 5)."""
    return torch.minimum(logits.softmax(-1), probs).sum(-1)


@dataclass(frozen=True)
class Metrics:
    """Held-out quality of an exit; lists are indexed by draft step - 1."""

    loss: float
    agreement: list[float]  # exit argmax equals the target's
    accepted_mass: list[float]  # sum min(p, q) at temperature 1
    acceptance: list[float]  # a_j: right at step j, given that all before were
    tau: list[float]  # tokens per cycle with k = 1, 2, ... greedy drafts

    def flat(self) -> dict[str, float]:
        """One name for every number, for logs and sidecars."""
        values = {"loss": self.loss}
        for name in ("agreement", "accepted_mass", "acceptance", "tau"):
            values |= {f"{name}_{i}": round(v, 4) for i, v in enumerate(getattr(self, name), start=1)}
        return values


def walk_cycles(is_right: list[list[bool]], draft_len: int) -> tuple[int, int, list[int], list[int]]:
    """Decode one row with drafts of length k: is_right[j - 1][a] says whether step j at answer position a is right.

    Returns (tokens, cycles, tried, accepted), the last two counted per step.
    """
    size, at, cycles = len(is_right[0]), 0, 0
    tried, accepted = [0] * draft_len, [0] * draft_len
    while at < size:
        cycles += 1
        for step in range(draft_len):
            if at >= size - 1:  # the last token needs no draft behind it
                break
            tried[step] += 1
            if not is_right[min(step, len(is_right) - 1)][at]:
                break
            accepted[step] += 1
            at += 1
        at += 1
    return size, cycles, tried, accepted
