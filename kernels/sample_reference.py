"""Tokens drawn with position-keyed noise: the definition, in pure torch.

    token[b, r] = argmax_v score(v),    score = logit / temperature - log(-log u)     of logits (Gumbel-max)
                                        score = p / -log u                            of probabilities
                                        score = logit                                 at temperature 0

u is the uniform number of (seed[b], stream, position[b, r], token id). Ties go to the first column.

Shapes: B sequences, R rows, V columns: the vocabulary, or the part of it that an exit drafts.
"""

import torch
from torch import Tensor

from .checks import require_dtype, require_shape
from .noise_reference import TARGET_STREAM, row_noise


def sample(
    scores: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: float = 1.0,
    stream: int = TARGET_STREAM,
    columns: Tensor | None = None,
    is_probs: bool = False,
) -> Tensor:
    """Token ids [B, R] from ``scores`` [B, R, V]: logits, or with ``is_probs`` probabilities (then no temperature).

    ``seeds`` [B] and ``positions`` [B, R] are int64, ``columns`` [V] int64 are the token ids of the columns (None: 0,
    1, 2, ...). -Inf forbids a column; NaN is the caller's to refuse. Raises ValueError for other shapes or a negative
    temperature, TypeError for other dtypes.
    """
    check(scores, seeds, positions, temperature, columns)
    ids = torch.arange(scores.shape[2], device=scores.device) if columns is None else columns
    best = _scores(scores.float(), seeds, positions, temperature, stream, ids, is_probs).argmax(-1)
    return ids[best]


def _scores(
    scores: Tensor, seeds: Tensor, positions: Tensor, temperature: float, stream: int, ids: Tensor, is_probs: bool
) -> Tensor:
    if not is_probs and temperature == 0:
        return scores
    waits = row_noise(seeds, stream, positions, ids).log().neg()  # [B, R, V], exponential
    return scores / waits if is_probs else scores / temperature - waits.log()


def check(scores: Tensor, seeds: Tensor, positions: Tensor, temperature: float, columns: Tensor | None) -> None:
    """Raise for arguments that `sample` does not take."""
    batch, rows, vocab = scores.shape
    require_dtype("scores", scores, torch.float32, torch.float16, torch.bfloat16)
    require_shape("seeds", seeds, batch)
    require_shape("positions", positions, batch, rows)
    for name, tensor in {"seeds": seeds, "positions": positions, "columns": columns}.items():
        if tensor is not None:
            require_dtype(name, tensor, torch.int64)
    if columns is not None:
        require_shape("columns", columns, vocab)
    if not temperature >= 0:
        raise ValueError(f"temperature must be >= 0, got {temperature}")
