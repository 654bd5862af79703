"""What a cycle on the device is made of: what it keeps, passes at places that it alone knows, and its draws.

Shapes: B = 1, K drafted tokens, R rows, M rows that wait for the exit's block, D hidden, V vocabulary, n recalled
layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from selfspec.cache import KVCache, move
from selfspec.exits import ExitHead
from selfspec.kernels import compact_reference, ops
from selfspec.layer_calls import Place
from selfspec.masks import Tree
from selfspec.sampling import Sampling, logits_to_probs
from selfspec.target import Target, pad_rows


@dataclass(frozen=True)
class Kind:
    """What cycles are made for."""

    head: ExitHead | None
    draft_len: int
    min_confidence: float = 0.0
    sampling: Sampling = field(default_factory=Sampling)
    rule: str = "coupled"
    draft_width: int = 1

    @property
    def is_tree(self) -> bool:
        """Whether drafts have siblings."""
        return self.draft_len > 0 and self.draft_width > 1

    @property
    def num_rows(self) -> int:
        """Of a pass, R."""
        return 1 + self.draft_len * self.draft_width

    @property
    def parents(self) -> list[int]:
        """What each row hangs on: the last token, the chain behind it, and then the siblings of each of its drafts."""
        return [0, *range(self.draft_len), *(row for row in range(self.draft_len) for _ in range(1, self.draft_width))]

    @property
    def num_seen(self) -> int:
        """Rows of a pass that the exit's block has seen of its draft: a chain's all but the last, else the root."""
        assert self.head is not None
        return self.draft_len if self.head.config.form == "chain" and self.draft_len else 1

    @property
    def num_waiting(self) -> int:
        """The others, M."""
        return self.draft_len + 1 - self.num_seen if self.head is not None and self.head.blocks else 0


@dataclass(eq=False)
class Held:
    """What a cycle reads and leaves to the next one, in tensors that stay where they are."""

    first: Tensor  # [1], rows that the target's layers hold: the position of the last emitted token
    token: Tensor  # [1, 1], that token
    seed: Tensor  # [1]
    end: Tensor  # [1], tokens of the longest text
    recall: Tensor  # [1, 1, nD], deep states of position first - 1
    seen: Tensor  # [1], rows that the exit's block holds; the others before ``first`` wait:
    taps: Tensor  # [1, M, D], states at the exit layer from position ``seen`` on,
    tap_recalls: Tensor  # [1, M, nD], and what the bridge reads with them
    counts: Tensor  # [3], of the last cycle: drafted, accepted, the first row whose logits are not finite or -1
    emitted: Tensor  # [K + 1], its tokens, of which accepted + 1 count

    @classmethod
    def of(cls, target: Target, kind: Kind) -> "Held":
        """As before any text."""
        width = 0 if kind.head is None else len(kind.head.recall_layers) * target.hidden_size
        sizes = {"token": (1, 1), "counts": (3,), "emitted": (kind.draft_len + 1,)}
        sizes |= dict.fromkeys(("first", "seed", "end", "seen"), (1,))
        states = {"recall": (1, width)}
        states |= {"taps": (kind.num_waiting, target.hidden_size), "tap_recalls": (kind.num_waiting, width)}
        return cls(  # what is captured runs on this
            **{name: torch.ones(size, dtype=torch.long, device=target.device) for name, size in sizes.items()},
            **{n: torch.zeros(1, *size, dtype=target.dtype, device=target.device) for n, size in states.items()},
        )


class Passes:
    """`Target`'s passes over ``cache``, at places that the device knows.

    Raises NotImplementedError for a family whose rows see what is no window.
    """

    def __init__(self, target: Target, cache: KVCache) -> None:
        self.target, self.cache, self.calls = target, cache, target.calls_for(cache)
        self._moved: compact_reference.Held | None = None
        self.calls.require_windows()

    def run(self, layers: range, hidden: Tensor, first: Tensor, tree: Tree | None = None) -> Tensor:
        """`Target.run_layers` of rows ``hidden`` [B, R, D] from ``first`` [1] on; in exact mode as many as ever."""
        if not layers:
            return hidden
        num_rows = hidden.shape[1]
        padded = pad_rows(hidden, self.cache.width)
        made = self.run_modules(self.target.layers[layers.start : layers.stop], layers, padded, first, tree)
        return made[:, :num_rows]

    def run_modules(
        self, modules: Sequence[nn.Module], slots: range, hidden: Tensor, first: Tensor, tree: Tree | None = None
    ) -> Tensor:
        """`Target.run_modules` likewise."""
        num_layers, width = self.target.num_layers, self.cache.width
        num_rows = hidden.shape[1]
        is_exact = width is not None and slots.start < num_layers
        place = Place(first, num_rows, self.cache.capacity, width=width if is_exact else None, tree=tree,
                      pads=self.cache.pads)  # fmt: skip
        by_layer = self.calls.at(place, self.target.device)
        self.cache.open_at(first + torch.arange(num_rows, device=first.device))
        return self.target.call_modules(modules, hidden, slots, by_layer, self.cache)

    def finish(
        self, hidden: Tensor, start: int, first: Tensor, depths: Sequence[int], tree: Tree | None
    ) -> tuple[Tensor, Tensor | None]:
        """`Target.finish` likewise: logits [B, R, V] in float32, and the states at ``depths`` side by side."""
        states = {start: hidden}
        for depth in sorted({*depths, self.target.num_layers}):
            states[depth] = hidden = self.run(range(start, depth), hidden, first, tree)
            start = depth
        recalls = torch.cat([states[depth] for depth in depths], dim=-1) if depths else None
        return self.target.logits(hidden, self.cache), recalls

    def compact(self, path: Tensor, num_accepted: Tensor, first: Tensor) -> None:
        """`KVCache.compact` likewise, of the accepted rows ``path`` [1, K] behind the root."""
        if self._moved is None:  # at a first call, when all layers have theirs; a graph knows its table by address
            self._moved = self.cache.hold(range(self.target.num_layers))
        move(self._moved, path, num_accepted, first)


@dataclass(frozen=True)
class Draws:
    """Tokens drawn as the loop draws them, with the noise of ``seed`` [1]."""

    sampling: Sampling
    seed: Tensor

    def scores(self, logits: Tensor) -> Tensor:
        """What is drawn from, of ``logits`` [1, R, V]: probabilities in float32, or the logits where that is greedy."""
        return logits if self.sampling.is_greedy else logits_to_probs(logits[0], self.sampling)[None]

    def tokens(self, scores: Tensor, positions: Tensor, stream: int, columns: Tensor | None = None) -> Tensor:
        """Tokens [1, R] of such ``scores`` at ``positions`` [1, R]; ``columns`` [V] are their ids."""
        is_greedy = self.sampling.is_greedy
        return ops.sample(scores, self.seed, positions, 0.0 if is_greedy else 1.0, stream, columns, not is_greedy)
