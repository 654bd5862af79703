"""Whether a text is the reference's, and if not, how near a tie the first difference was.

In half precision a pass over another number of rows scores the same token a little differently; a text may then differ
at a near-tie (L4). The gap is measured on the reference's prefix, in units in the last place of the top logit.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.cache import KVCache
from selfspec.target import Target

NEAR_TIE_ULP = 4.0


@dataclass(frozen=True)
class Divergence:
    """The first token at which two texts differ."""

    position: int  # among the new tokens, from 0
    gap_ulp: float | None  # between the two tokens' logits; None where one text is a beginning of the other

    @property
    def is_near_tie(self) -> bool:
        return self.gap_ulp is not None and self.gap_ulp <= NEAR_TIE_ULP


def up_to_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """``tokens`` up to the first of ``ends``; what stands behind it only pads a batch."""
    return list(tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))])


def first_divergence(
    target: Target, prompt: Sequence[int], reference: Sequence[int], tokens: Sequence[int]
) -> Divergence | None:
    """Where ``tokens`` leave ``reference``, and the gap there; None for equal texts."""
    if list(reference) == list(tokens):
        return None
    pairs = zip(reference, tokens, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(reference), len(tokens)))
    if position >= min(len(reference), len(tokens)):
        return Divergence(position, None)
    logits = last_logits(target, [*prompt, *reference[:position]])
    return Divergence(position, gap_in_ulp(logits, reference[position], tokens[position], target.dtype))


@torch.no_grad()
def last_logits(target: Target, ids: Sequence[int]) -> Tensor:
    """Logits [V] in float32 after the prefix ``ids``, the last token run alone as plain decoding does."""
    cache = KVCache(target.num_layers, len(ids))
    tokens = torch.tensor([list(ids)], device=target.device)
    if len(ids) > 1:
        target.run_layers(target.embed(tokens[:, :-1]), 0, target.num_layers, cache)
    return target.finish(target.embed(tokens[:, -1:], len(ids) - 1), 0, cache)[0][0, -1]


def gap_in_ulp(logits: Tensor, first: int, second: int, dtype: torch.dtype) -> float:
    """Distance of two tokens' logits in units in the last place of the largest logit in ``dtype``."""
    top = float(logits.abs().max() if logits.max() == 0 else logits.max().abs())
    ulp = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(top, torch.finfo(dtype).tiny)))
    return abs(float(logits[first] - logits[second])) / ulp
