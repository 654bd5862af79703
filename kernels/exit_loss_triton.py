"""Losses of an exit and their gradients in one launch: see `exit_loss_reference` for the formulas.

A program goes over the vocabulary of one row three times: for log sum exp z, for the loss and the sums that its
gradient needs, for the gradient, which overwrites the logits. No softmax, logarithm, minimum or mask
[A, V] is materialised, and nothing is saved for a backward pass.
"""

# mypy: allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import require_device, require_dtype
from .exit_loss_reference import LOSSES, check
from .exit_loss_reference import SMALLEST as _SMALLEST

BLOCK, NUM_WARPS = 2048, 8
SMALLEST = tl.constexpr(_SMALLEST)
CROSS_ENTROPY, KL, REVERSE_KL, TV, LK = (tl.constexpr(i) for i in range(len(LOSSES)))


@triton.jit
def _top_and_sum(logits, num_columns, BLOCK: tl.constexpr):
    """max z and sum exp(z - max) of one row, each lane with a maximum and a sum of its own until the end."""
    largest, total = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for begin in range(0, num_columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        z = tl.load(logits + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, z)
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # of a lane that has seen nothing yet
        total = total * tl.exp(largest - shift) + tl.exp(z - shift)
        largest = larger
    top = tl.max(largest, axis=0)
    return top, tl.sum(total * tl.exp(largest - top), axis=0)


@triton.jit
def _p_q_log_q(logits, probs, top, total, column, num_columns):
    """p, q and log q of a block of columns; 0, 0 and -inf beyond the last."""
    is_inside = column < num_columns
    z = tl.load(logits + column, mask=is_inside, other=float("-inf")).to(tl.float32)
    p = tl.load(probs + column, mask=is_inside, other=0.0).to(tl.float32)
    return p, tl.exp(z - top) / total, z - top - tl.log(total)  # the maximum first: a sum with it would be rounded


@triton.jit
def _log_ratio(p, log_q):
    """log(q / p), 0 where q is 0."""
    return tl.where(log_q == float("-inf"), 0.0, log_q - tl.log(tl.maximum(p, SMALLEST)))


@triton.jit
def _is_less(p, q):
    """1 where q < p, one half where they are equal: the slope of min(p, q) by q."""
    return tl.where(q < p, 1.0, tl.where(q == p, 0.5, 0.0))


@triton.jit
def loss_row(
    logits, probs, weights, losses, num_columns, logits_stride, probs_stride, NAME: tl.constexpr, BLOCK: tl.constexpr
):
    """One row's loss; its gradient in place of its logits."""
    HAS_OVERLAP: tl.constexpr = NAME >= TV
    HAS_DIVERGENCE: tl.constexpr = (NAME != REVERSE_KL) & (NAME != TV)
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    probs += row * probs_stride
    top, total = _top_and_sum(logits, num_columns, BLOCK)
    mass, far = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)  # sums of p; of the divergence
    both, slope = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)  # of min(p, q); of q m
    for begin in range(0, num_columns, BLOCK):
        p, q, log_q = _p_q_log_q(logits, probs, top, total, begin + tl.arange(0, BLOCK), num_columns)
        if NAME == REVERSE_KL:
            far += q * _log_ratio(p, log_q)
        elif HAS_OVERLAP:
            both += tl.minimum(p, q)
            slope += q * _is_less(p, q)
        if HAS_DIVERGENCE:
            mass += p
            entropy = tl.log(tl.where(p > 0, p, 1.0)) if NAME != CROSS_ENTROPY else 0.0
            far += p * tl.where(p > 0, entropy - log_q, 0.0)
    whole, loss, near = tl.sum(mass, axis=0), tl.sum(far, axis=0), tl.sum(both, axis=0)
    mean_slope, mix = tl.sum(slope, axis=0), 1.0
    if HAS_OVERLAP:
        mix = tl.exp(-3.0 * near) if NAME == LK else 0.0
        loss = mix * loss + (1.0 - mix) * (1.0 - near)
    tl.store(losses + row, loss)
    weight = tl.load(weights + row).to(tl.float32)
    for begin in range(0, num_columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        p, q, log_q = _p_q_log_q(logits, probs, top, total, column, num_columns)
        if NAME == REVERSE_KL:
            gradient = q * (_log_ratio(p, log_q) - loss)
        elif HAS_OVERLAP:
            gradient = mix * (whole * q - p) - (1.0 - mix) * q * (_is_less(p, q) - mean_slope)
        else:
            gradient = whole * q - p
        tl.store(logits + column, (gradient * weight).to(logits.dtype.element_ty), mask=column < num_columns)


def exit_loss(logits: Tensor, probs: Tensor, weights: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """See `exit_loss_reference.exit_loss`; the gradient returned is ``logits``, overwritten. Rows are in one piece."""
    check(logits, probs, weights, name)
    require_device(logits=logits, probs=probs, weights=weights)
    require_dtype("logits", logits, torch.float32, torch.float16, torch.bfloat16)
    if logits.stride(1) != 1:
        raise ValueError(f"a row of logits must lie in one piece, strides are {logits.stride()}")
    probs = probs if probs.stride(1) == 1 else probs.contiguous()
    losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    loss_row[(logits.shape[0],)](
        logits, probs, weights.contiguous(), losses, logits.shape[1], logits.stride(0), probs.stride(0),
        NAME=LOSSES.index(name), BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return losses, logits
