"""From last-layer states to logits, the way the family does it.

Shapes: B batch, R rows, D hidden, V vocabulary.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from selfspec.linears import with_dispatched_linears

if TYPE_CHECKING:
    from selfspec.target import Target


class Head:
    """Final norm and output layer, called through the family's own forward (which may scale or cap logits).

    ``norm`` and ``output`` replace the target's own: an exit head brings its own norm and a slice of the vocabulary.
    """

    def __init__(
        self,
        target: "Target",
        norm: nn.Module | None = None,
        output: nn.Module | None = None,
        is_dispatched: bool = True,
    ) -> None:
        self.target = target
        self.norm = target.norm if norm is None else norm
        self.output = target.output if output is None else output
        if is_dispatched:
            self.output = with_dispatched_linears(self.output)
        self._shell, self._recorders = target.make_shell(self.norm, self.output)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [B, R, V] of last-layer states ``hidden`` [B, R, D]."""
        if self.target.is_plain_head:
            return self.output(self.norm(hidden))
        return self.family_forward(hidden)

    def family_forward(self, hidden: Tensor) -> Tensor:
        """The same through the whole model's forward, its last layer answering ``hidden``."""
        self._recorders[-1].replacement = hidden
        try:
            ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
            return type(self.target.base).forward(self._shell, input_ids=ids, use_cache=False).logits
        finally:
            self._recorders[-1].replacement = None
