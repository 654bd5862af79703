"""Passes of the target over the rows of several texts at once: weights are read once for all of them.

Every text keeps its own cache, and what its rows give is bit for bit what they give alone, since the kernels compute a
row in the same order whatever stands beside it. So texts of any lengths go together without padding.

Shapes: R rows of a text, D hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor

from selfspec.cache import KVCache

if TYPE_CHECKING:
    from selfspec.target import Target

Made = tuple[Tensor, dict[int, Tensor]]  # logits [1, R, V] in float32, and states [1, R, D] by depth


@dataclass(frozen=True)
class Rows:
    """The rows of one text in a pass of layers [start, L)."""

    hidden: Tensor  # [1, R, D], before layer ``start``
    start: int
    cache: KVCache
    depths: Sequence[int] = ()  # at which states are to be kept
    parents: Sequence[int] | None = None  # of a draft tree; None is a chain

    def finish(self, target: "Target") -> Made:
        """The pass of these rows alone."""
        return target.finish(self.hidden, self.start, self.cache, self.depths, self.parents)


def finish_together(target: "Target", texts: Sequence[Rows]) -> list[Made]:
    """`Target.finish` of all ``texts``: at once where the CPU's kernels run, else one after another."""
    made = _side_by_side(target, texts) if len(texts) > 1 else None
    return [rows.finish(target) for rows in texts] if made is None else made


def _side_by_side(target: "Target", texts: Sequence[Rows]) -> list[Made] | None:
    """Where texts enter at different layers, the deeper ones wait for the others; None where the kernel is not used."""
    hidden = [rows.hidden for rows in texts]
    states = [{rows.start: rows.hidden} for rows in texts]
    logits: list[Tensor] = []
    for begin, stop in pairwise([*sorted({rows.start for rows in texts}), target.num_layers]):
        here = [i for i, rows in enumerate(texts) if rows.start <= begin]
        depths = sorted({depth for i in here for depth in texts[i].depths if begin < depth <= stop} | {stop})
        for i in here:
            target.open(hidden[i], range(begin, stop), texts[i].cache)
        made = target.fused.finish_together(
            [(hidden[i], texts[i].cache, texts[i].parents) for i in here], range(begin, stop), depths
        )
        if made is None:
            return None
        logits, noted = made
        for i, *kept in zip(here, *noted, strict=True):
            states[i] |= dict(zip(depths, kept, strict=True))
            hidden[i] = kept[-1]
    for rows in texts:
        rows.cache.advance(range(rows.start, target.num_layers), rows.hidden.shape[1])
    return list(zip(logits, states, strict=True))


def num_shared(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all begin with, the last one of each left out: its row gives a text its first token."""
    first, last = min(map(list, prompts)), max(map(list, prompts))  # in the order of their tokens
    most = min(map(len, prompts)) - 1
    return next((i for i in range(most) if first[i] != last[i]), most)
