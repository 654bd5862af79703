"""Keys and values in eight bits: e4m3 (4 bits of exponent, 3 of mantissa) times a scale per layer and head.

Scales are powers of two, so that nothing is rounded but by e4m3 itself, wherever they are multiplied in. They are made
of the prompt's keys and values and then stay for the text: what a position's states are stored as depends on nothing
that was drafted.

Shapes: B sequences, Hkv key/value heads, R rows, D head width.
"""

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
HEADROOM = 2.0  # for what comes behind the prompt; larger values are cut off
LEAST = 2.0**-6  # so that up to 7 can be stored in any case: the first token's values are small


def scale_of(states: Tensor) -> Tensor:
    """The scale, float32 [B, Hkv, 1, 1], of a prompt's ``states`` [B, Hkv, R, D]."""
    largest = states.float().abs().amax((2, 3), keepdim=True)
    return torch.exp2(torch.ceil(torch.log2(largest * (HEADROOM / LARGEST)))).clamp(min=LEAST)


def to_bytes(states: Tensor, scale: Tensor) -> Tensor:
    """``states`` [B, Hkv, R, D] as they are stored, uint8: what is too large becomes the largest, NaN stays NaN."""
    return (states.float() / scale).clamp(-LARGEST, LARGEST).to(DTYPE).view(torch.uint8)


def from_bytes(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``stored`` [B, Hkv, S, D] stands for."""
    return stored.view(DTYPE).to(dtype) * scale.to(dtype)
