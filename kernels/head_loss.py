"""The loss of an exit from its normed states: head and loss together, a few rows at a time, both ways at once.

The gradient by the logits of some rows is made together with their loss, and is used up before the next rows are begun:
by the states it is a product with the head's weight, by the weight a product with the states. So of [A, V] never more
than ``num_held`` rows exist, and the way back multiplies by a number.

Shapes: A guesses, D hidden, V columns of the head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .checks import require_shape

RowLoss = Callable[[Tensor, Tensor, Tensor, str], tuple[Tensor, Tensor]]  # `exit_loss`
Teacher = Callable[[int, int], Tensor]  # rows [begin, end) -> p [end - begin, V]


def head_loss(
    normed: Tensor, head: Tensor, teacher: Teacher, weights: Tensor, name: str, num_held: int, row_loss: RowLoss
) -> Tensor:
    """sum_a weights[a] loss(head @ normed[a], p_a), differentiable by ``normed`` [A, D] and ``head`` [V, D].

    ``teacher`` gives the target's probabilities of a range of rows, made on the fly or sliced; ``row_loss`` is one of
    the implementations of `exit_loss`, ``name`` one of its losses. Raises ValueError for num_held below 1.
    """
    require_shape("normed", normed, weights.shape[0], head.shape[1])
    if num_held < 1:
        raise ValueError(f"num_held must be positive, got {num_held}")
    loss: Tensor = _HeadLoss.apply(normed, head, teacher, weights, name, num_held, row_loss)
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, normed: Tensor, head: Tensor, teacher: Teacher, weights: Tensor, name: str, num_held: int,
        row_loss: RowLoss,
    ) -> Tensor:  # fmt: skip
        by_normed = torch.empty_like(normed)
        wide = torch.promote_types(head.dtype, torch.float32)
        by_head = torch.zeros_like(head, dtype=wide) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), device=normed.device)
        for begin in range(0, normed.shape[0], num_held):
            end = min(begin + num_held, normed.shape[0])
            states, mine = normed[begin:end], weights[begin:end]
            losses, gradient = row_loss(states @ head.T, teacher(begin, end), mine, name)
            total = total + (losses * mine).sum()
            by_normed[begin:end] = gradient @ head
            if by_head is not None:
                by_head += gradient.T @ states
        ctx.save_for_backward(by_normed, by_head)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by_normed, by_head = ctx.saved_tensors
        return grads[0] * by_normed, None if by_head is None else grads[0] * by_head, *[None] * 5
