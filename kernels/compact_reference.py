"""Compaction of a cache: the accepted rows of a draft tree move to where a chain would have them.

    tensor[b, :, first[b] + 1 + i] = tensor[b, :, first[b] + path[b, i]]      for i < num_accepted[b]

for the keys and values of all layers, which may differ in head count, width and dtype. The root, row 0 of the pass,
stays at slot first. A path increases, so no row moves up and none is overwritten before it has been read.

Shapes: B sequences, K drafted tokens, Hkv key/value heads, S slots, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import require_dtype, require_shape

FIELDS = 6  # of a line of the table


@dataclass(frozen=True)
class Held:
    """The tensors of a cache [B, Hkv, S, D] and where they lie, for kernels that go by addresses.

    A line of the table is (address, bytes a sequence, bytes a head, bytes a slot, heads, bytes of a row).
    """

    tensors: tuple[Tensor, ...]
    table: Tensor  # [N, 6] int64
    batch: int
    num_heads: int  # the most of any tensor
    num_bytes: int  # of the widest row
    alignment: int  # in bytes: a power of two that divides all addresses, strides and widths


def hold(tensors: Sequence[Tensor]) -> Held:
    """Made once for a cache. Raises ValueError for tensors of several batch sizes or with gaps within a row."""
    for tensor in tensors:
        if tensor.dim() != 4 or tensor.shape[0] != tensors[0].shape[0] or tensor.stride(3) != 1:
            raise ValueError(
                f"a cache of {tensors[0].shape[0]} sequences needs [B, Hkv, S, D] with rows in one piece, "
                f"got {list(tensor.shape)} with strides {tensor.stride()}"
            )
    lines = [[t.data_ptr(), *(t.element_size() * s for s in t.stride()[:3]), t.shape[1]] for t in tensors]
    widths = [t.element_size() * t.shape[3] for t in tensors]
    bits = 16
    for number in [*widths, *(number for line in lines for number in line[:4])]:
        bits |= number
    return Held(
        tensors=tuple(tensors),
        table=torch.tensor([[*line, w] for line, w in zip(lines, widths, strict=True)], device=tensors[0].device),
        batch=tensors[0].shape[0],
        num_heads=max(t.shape[1] for t in tensors),
        num_bytes=max(widths),
        alignment=bits & -bits,
    )


def compact(held: Held, path: Tensor, num_accepted: Tensor, first: Tensor) -> None:
    """Move the rows ``path`` [B, K] (of the pass that began at slot ``first`` [B]) of ``held``, in place; all int64."""
    check(held, path, num_accepted, first)
    order = torch.arange(path.shape[1], device=path.device)
    target = first[:, None] + 1 + order  # [B, K]
    source = torch.where(order < num_accepted[:, None], first[:, None] + path, target)
    sequence = torch.arange(held.batch, device=path.device)[:, None]
    for tensor in held.tensors:
        tensor[sequence, :, target] = tensor[sequence, :, source]  # [B, K, Hkv, D]


def check(held: Held, path: Tensor, num_accepted: Tensor, first: Tensor) -> None:
    """Raise for arguments that `compact` does not take."""
    require_shape("path", path, held.batch, path.shape[1])
    for name, tensor in {"num_accepted": num_accepted, "first": first}.items():
        require_shape(name, tensor, held.batch)
    for name, tensor in {"path": path, "num_accepted": num_accepted, "first": first}.items():
        require_dtype(name, tensor, torch.int64)
