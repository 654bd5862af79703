"""What an exit is trained on and judged by. p: target, q: exit, both over the drafted vocabulary V_d."""

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Metrics:
    """Held-out quality of an exit; lists are indexed by draft step - 1."""

    loss: float
    agreement: list[float]  # exit argmax equals the target's
    accepted_mass: list[float]  # sum min(p, q) at temperature 1
    acceptance: list[float]  # a_j: right at step j, given that all before were
    tau: list[float]  # tokens per cycle with k = 1, 2, ... greedy drafts
    speedup: float | None = None  # predicted over ordinary decoding, from measured costs and the chosen drafting

    def flat(self) -> dict[str, float]:
        """One name for every number, for logs and sidecars."""
        values = {"loss": self.loss} if self.speedup is None else {"loss": self.loss, "speedup": round(self.speedup, 3)}
        for name in ("agreement", "accepted_mass", "acceptance", "tau"):
            values |= {f"{name}_{i}": round(v, 4) for i, v in enumerate(getattr(self, name), start=1)}
        return values


@dataclass(frozen=True)
class RowScores:
    """An exit on one held-out row, every draft step at every answer position; lists [J][A]."""

    is_right: list[list[bool]]  # exit argmax equals the target's
    confidence: list[list[float]]  # what the exit thinks its chance is


@dataclass(frozen=True)
class Walk:
    """Cycles of decoding held-out text, counted."""

    num_tokens: int
    num_drafted: list[int]  # of each cycle
    num_steps: list[int]  # draft steps of each cycle; one more than drafted where a step stopped before drawing
    tried: list[int]  # by step: cycles that reached it with all before it right
    accepted: list[int]  # by step

    @property
    def num_cycles(self) -> int:
        return len(self.num_drafted)


def walk_cycles(row: RowScores, draft_len: int, min_confidence: float = 0.0) -> Walk:
    """Decode one row as `ChainDrafter` would. Steps beyond those scored count as the last one scored."""
    size, at = len(row.is_right[0]), 0
    drafted, steps, tried, accepted = list[int](), list[int](), [0] * draft_len, [0] * draft_len
    while at < size:
        most, survival, num = min(draft_len, size - 1 - at), 1.0, 0  # the last token needs no draft behind it
        while num < most:
            survival *= row.confidence[min(num, len(row.confidence) - 1)][at + num]
            if survival < min_confidence:
                break
            num += 1
        drafted.append(num)
        steps.append(num + (num < most))
        for step in range(num):
            tried[step] += 1
            if not row.is_right[min(step, len(row.is_right) - 1)][at]:
                break
            accepted[step] += 1
            at += 1
        at += 1
    return Walk(size, drafted, steps, tried, accepted)
