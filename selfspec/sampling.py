"""One way to make a distribution, and the noise that draws from it.

Draft and target go through the same `logits_to_probs`; greedy is a one-hot distribution, not a branch. Noise is
a counter-based hash of (seed, stream, position, token id): every device draws the same numbers, in any order, which is
what lets a sampled text be the same with and without speculation (the Gumbel-max coupling of draft and target).

Shapes: B batch, R rows, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.kernels import dispatch, noise_reference

TARGET_STREAM, DRAFT_STREAM, ACCEPT_STREAM, RECOVER_STREAM = noise_reference.STREAMS


class NonFiniteLogitsError(FloatingPointError):
    """The target's logits hold NaN or +Inf; the message gives the position."""


@dataclass(frozen=True)
class Sampling:
    """How a distribution is made from logits; names and order of application are transformers'.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off; top_p 0 keeps the most likely token alone.
    Raises ValueError for values outside their range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_p == 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be >= 0 and finite, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p must be in [0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be > 0, got {self.repetition_penalty}")


def logits_to_probs(
    logits: Tensor,
    sampling: Sampling,
    prefixes: Sequence[Tensor] | None = None,
    forbidden: Tensor | None = None,
    process: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Distribution [R, V] in float32 of each row of ``logits`` [R, V]: what `processed` makes of them, filtered."""
    logits = processed(logits, sampling, prefixes, forbidden, process)
    if sampling.is_greedy:
        return torch.zeros_like(logits).scatter_(-1, argmax(logits)[..., None], 1.0)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if sampling.top_p < 1:
        logits = _nucleus(logits, sampling.top_p)
    if sampling.min_p > 0:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), float("-inf"))
    return logits.softmax(-1)


def processed(
    logits: Tensor,
    sampling: Sampling,
    prefixes: Sequence[Tensor] | None = None,
    forbidden: Tensor | None = None,
    process: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Scores [R, V] in float32: ``logits`` [R, V] before temperature and filters.

    ``prefixes[r]`` holds all token ids before row r, drafted ones included (for the repetition penalty); ``forbidden``
    is a boolean mask [V] or [R, V] of ids that get no mass; ``process`` is the user's own change of one row, (prefix
    [1, S], scores [1, V]) -> scores, between penalty and temperature as in transformers.
    """
    logits = logits.float()
    if sampling.repetition_penalty != 1.0 and prefixes is not None:
        logits = torch.stack(
            [_penalise(r, p, sampling.repetition_penalty) for r, p in zip(logits, prefixes, strict=True)]
        )
    if forbidden is not None:
        logits = logits.masked_fill(forbidden, float("-inf"))
    if process is not None and prefixes is not None:
        rows = zip(logits, prefixes, strict=True)
        logits = torch.cat([process(prefix[None], row[None].clone()) for row, prefix in rows])
    return logits


def _penalise(row: Tensor, prefix: Tensor, penalty: float) -> Tensor:
    seen = row[prefix]
    return row.scatter(0, prefix, torch.where(seen < 0, seen * penalty, seen / penalty))


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches ``top_p``."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
    return logits.masked_fill((before >= top_p).scatter(-1, ids, before >= top_p), float("-inf"))


def require_finite(logits: Tensor, position: int) -> None:
    """Raise NonFiniteLogitsError if a row of the target's ``logits`` [R, V] at ``position`` + row has NaN or +Inf."""
    total = logits.amax(-1)  # one pass: NaN and +Inf both reach the maximum
    if not bool(torch.isfinite(total).all()):
        row = int((~torch.isfinite(total)).nonzero()[0, 0])
        raise NonFiniteLogitsError(f"the target's logits at position {position + row} are not finite")


def uniform(seed: int, stream: int, positions: Sequence[int], columns: Tensor) -> Tensor:
    """Uniform numbers in (0, 1), [R, C], a pure function of (seed, stream, position, column).

    ``columns`` [C] are integers, such as token ids: a subset of the vocabulary gets the numbers that the whole has. The
    hash is `noise_reference`'s.
    """
    words = [noise_reference.keys(seed, stream, position) for position in positions]
    low, high = torch.tensor(words, dtype=torch.int32, device=columns.device).split(1, dim=1)  # [R, 1] each
    return noise_reference.uniform(low, high, columns)


def draw(probs: Tensor, noise: Tensor | None) -> Tensor:
    """Token ids [R] drawn from ``probs`` [R, V] with uniform ``noise`` [R, V]; ties go to the lowest id.

    argmax(p / -log u) is the Gumbel-max trick argmax(log p + g) with one logarithm less. A one-hot needs no noise.
    """
    return argmax(probs if noise is None else probs / noise.log().neg())


def guess_scores(q: Tensor, noise: Tensor, temperature: float, noise_scale: float) -> Tensor:
    """Scores [..., V] whose largest is the guess, by an exit's ``q`` [..., V], at what the target draws with ``noise``.

    T (log q + c g), g = -log(-log u). With all of the noise, c = 1, it is what q itself would draw; but an exit knows
    less than its target and is flatter, so that less noise, a draw at a lower temperature, agrees more often. In units
    of logits, so that a softmax of them is a chance that can be trusted as the greedy one can.
    """
    return temperature * (q.log() - noise_scale * noise.log().neg().log())


def draw_token(scores: Tensor, sampling: Sampling, seed: int, stream: int, position: int) -> int:
    """The token drawn from one row's `processed` ``scores`` [V]: the largest, or by the noise of ``position``.

    `draw` of `logits_to_probs` with `uniform` noise is the definition. A CPU's kernel rounds otherwise, so that it
    draws another token where two are equally good to the last bits; plain and speculative decoding both draw by it.
    """
    if sampling.is_greedy:
        return int(argmax(scores))
    kernel, token = dispatch.cpu_sample(scores.device), None
    if kernel is not None:
        keys = noise_reference.keys(seed, stream, position)
        token = kernel.sample(scores, keys, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    if token is None:
        noise = uniform(seed, stream, [position], torch.arange(len(scores), device=scores.device))
        token = int(draw(logits_to_probs(scores[None], sampling), noise))
    return token


def argmax(scores: Tensor) -> Tensor:
    """Index of the largest of ``scores`` [..., V], the lowest of equals: [...]."""
    if scores.device.type == "cpu" and scores.dtype == torch.float32:
        return torch.as_tensor(scores.detach().numpy().argmax(-1))  # eight times as fast as torch's
    return scores.argmax(-1)
