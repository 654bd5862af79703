"""The kernels beside attention as operators of torch: a traced or compiled graph holds each of them as one node.

Which implementation runs is for `dispatch` to say. Arguments are those of the functions, of which see the references,
except that `compact` takes apart what a cache is held by and `rope_append` its norms, and that `exit_loss_` always
leaves the gradient in place.

Shapes: B sequences, R rows, K drafted tokens, D width, the rest any.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from . import dispatch
from .compact_reference import Held


def _implementation(name: str, tensor: Tensor) -> Any:
    kind = "triton" if dispatch.implementation(tensor.device) == "triton" else "reference"
    return importlib.import_module(f"{__package__}.{name}_{kind}")


@custom_op("selfspec::sample", mutates_args=())
def sample(
    scores: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: float,
    stream: int,
    columns: Tensor | None,
    is_probs: bool,
) -> Tensor:
    """Token ids [B, R]."""
    draw = _implementation("sample", scores).sample
    tokens: Tensor = draw(scores, seeds, positions, temperature, stream, columns, is_probs)
    return tokens


@sample.register_fake
def _(scores: Tensor, seeds: Tensor, positions: Tensor, *_: Any) -> Tensor:
    del scores, seeds
    return torch.empty_like(positions)


@custom_op("selfspec::verify_coupled", mutates_args=())
def verify_coupled(
    own: Tensor, tokens: Tensor, parents: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Path [B, K], number accepted [B], next token [B], new lengths [B]."""
    found: tuple[Tensor, Tensor, Tensor, Tensor]
    found = _implementation("verify", own).verify_coupled(own, tokens, parents, lengths)
    return found


@verify_coupled.register_fake
def _(own: Tensor, tokens: Tensor, parents: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del own, parents
    return _no_verdict(tokens, lengths)


@custom_op("selfspec::verify_rejection", mutates_args=())
def verify_rejection(
    target_probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Path [B, K], number accepted [B], next token [B], new lengths [B]."""
    found: tuple[Tensor, Tensor, Tensor, Tensor]
    judge = _implementation("verify", target_probs).verify_rejection
    found = judge(target_probs, tokens, parents, draft_probs, seeds, positions, lengths)
    return found


@verify_rejection.register_fake
def _(target_probs: Tensor, tokens: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del target_probs
    return _no_verdict(tokens, others[-1])


def _no_verdict(tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    path, made = tokens.new_empty(tokens.shape), lengths.new_empty
    return path, made(lengths.shape), made(lengths.shape), made(lengths.shape)


@custom_op("selfspec::compact", mutates_args=("tensors",))
def compact(
    tensors: Sequence[Tensor],
    table: Tensor,
    num_heads: int,
    num_bytes: int,
    alignment: int,
    path: Tensor,
    num_accepted: Tensor,
    first: Tensor,
) -> None:
    """Rows of ``tensors`` move, in place."""
    held = Held(tuple(tensors), table, tensors[0].shape[0], num_heads, num_bytes, alignment)
    _implementation("compact", path).compact(held, path, num_accepted, first)


@custom_op("selfspec::rope_append", mutates_args=("keys", "values"))
def rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Queries [B, H, R, D]; ``keys`` and ``values`` get the rows' own."""
    turn = _implementation("rope_append", qkv).rope_append
    norms = None if query_norm is None or key_norm is None else (query_norm, key_norm)
    queries: Tensor = turn(qkv, cos, sin, positions, keys, values, slots, norms, eps)
    return queries


@rope_append.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, keys: Tensor, *_: Any) -> Tensor:
    del cos, sin, positions
    (batch, rows, size), groups, width = qkv.shape, keys.shape[1], keys.shape[3]
    return qkv.new_empty(batch, size // width - 2 * groups, rows, width)


@custom_op("selfspec::add_rms_norm", mutates_args=())
def add_rms_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, is_offset: bool) -> tuple[Tensor, Tensor]:
    """The sum and its norm, [..., D]."""
    found: tuple[Tensor, Tensor]
    found = _implementation("add_rms_norm", residual).add_rms_norm(residual, delta, weight, eps, is_offset)
    return found


@add_rms_norm.register_fake
def _(residual: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


@custom_op("selfspec::rms_norm", mutates_args=())
def rms_norm(total: Tensor, weight: Tensor, eps: float, is_offset: bool) -> Tensor:
    """The norm, [..., D]."""
    normed: Tensor = _implementation("add_rms_norm", total).rms_norm(total, weight, eps, is_offset)
    return normed


@rms_norm.register_fake
def _(total: Tensor, *_: Any) -> Tensor:
    return total.new_empty(total.shape)


@custom_op("selfspec::exit_loss_", mutates_args=("logits",))
def exit_loss_(logits: Tensor, probs: Tensor, weights: Tensor, name: str) -> Tensor:
    """Losses [A]; the gradient takes the place of ``logits``."""
    losses: Tensor
    losses, gradient = _implementation("exit_loss", logits).exit_loss(logits, probs, weights, name)
    if gradient.data_ptr() != logits.data_ptr():
        logits.copy_(gradient)
    return losses


@exit_loss_.register_fake
def _(logits: Tensor, probs: Tensor, weights: Tensor, name: str) -> Tensor:
    del probs, weights, name
    return logits.new_empty(logits.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))
