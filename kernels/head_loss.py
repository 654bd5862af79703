"""The loss of an exit from its normed states: head and loss together, a few rows at a time, both ways at once.

The gradient by the logits of some rows is made together with their loss, and is used up before the next rows are begun.
So of [A, V] never more than ``num_held`` rows exist, and the way back only multiplies by a number.

Shapes: A guesses, D hidden, V columns of the head.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import ops

Head = Callable[[Tensor, slice], Tensor]  # states [n, D] of the rows of a slice -> their logits [n, V]
Teacher = Callable[[slice], Tensor]  # rows of a slice -> p [n, V]


def head_loss(
    normed: Tensor, head: Head, teacher: Teacher, weights: Tensor, name: str, num_held: int,
    parameters: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """sum_a weights[a] loss(head(normed[a]), p_a), differentiable by ``normed`` [A, D] and the head's ``parameters``.

    ``teacher`` gives the target's probabilities, made on the fly or sliced; ``name`` is one of the losses of
    `exit_loss`. Raises ValueError for another name, and for num_held below 1.
    """
    if num_held < 1:
        raise ValueError(f"num_held must be positive, got {num_held}")
    loss: Tensor = _HeadLoss.apply(normed, head, teacher, weights, name, num_held, *parameters)
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, normed: Tensor, head: Head, teacher: Teacher, weights: Tensor, name: str, num_held: int,
        *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        gradients = [torch.empty_like(normed), *map(torch.zeros_like, parameters)]
        total = torch.zeros((), dtype=torch.promote_types(normed.dtype, torch.float32), device=normed.device)
        for begin in range(0, len(normed), num_held):
            rows = slice(begin, begin + num_held)
            states = normed[rows].detach().requires_grad_()
            with torch.enable_grad():
                logits = head(states, rows)
            by_logits = logits.detach()  # the gradient takes their place
            losses = ops.exit_loss_(by_logits, teacher(rows), weights[rows], name)
            total += (losses * weights[rows]).sum()
            gradients[0][rows], *others = torch.autograd.grad(
                logits, [states, *parameters], by_logits, allow_unused=True
            )
            for gradient, other in zip(gradients[1:], others, strict=True):
                if other is not None:
                    gradient += other
        ctx.save_for_backward(*gradients)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by_normed, *by_parameters = (grads[0] * saved for saved in ctx.saved_tensors)
        return by_normed, *[None] * 5, *by_parameters
