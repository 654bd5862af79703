"""Tensors left in their safetensors file until they are needed.

States of a few million tokens are more than memory holds. They are read, not mapped: a page of a mapping comes alone,
and a row has hundreds.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


@dataclass(frozen=True)
class OnDisk:
    """Where a tensor lies; with a ``scale`` [S], a number a row of it, `load` gives their product in bfloat16."""

    path: Path
    offset: int  # in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: "OnDisk | None" = None

    def load(self) -> Tensor:
        """Read it."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = bytearray(file.read(prod(self.shape) * self.dtype.itemsize))
        tensor = torch.frombuffer(data, dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)
        tensor = tensor.view(self.shape)
        return tensor if self.scale is None else (tensor.float() * self.scale.load()[:, None]).bfloat16()


Held = Tensor | OnDisk


def load(held: Held) -> Tensor:
    """The tensor itself, wherever it is held."""
    return held if isinstance(held, Tensor) else held.load()


def tensors_in(path: Path) -> dict[str, OnDisk]:
    """What a safetensors file holds, by name: its header alone is read."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {
        name: OnDisk(path, 8 + size + about["data_offsets"][0], tuple(about["shape"]), DTYPES[about["dtype"]])
        for name, about in header.items()
        if name != "__metadata__"
    }
