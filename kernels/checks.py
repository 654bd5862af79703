"""What the launchers of kernels demand of their arguments, with the values in the message."""

import torch
from torch import Tensor


def require_shape(name: str, tensor: Tensor, *shape: int) -> None:
    """Raise ValueError unless ``tensor`` is of ``shape``."""
    if tensor.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")


def require_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raise TypeError unless ``tensor`` is of one of ``dtypes``."""
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")


def require_device(**tensors: Tensor | None) -> None:
    """Raise ValueError unless all ``tensors`` lie on one device."""
    places = {name: str(tensor.device) for name, tensor in tensors.items() if tensor is not None}
    if len(set(places.values())) > 1:
        raise ValueError(f"tensors lie on several devices: {places}")
