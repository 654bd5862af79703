"""Whole texts through the target, many at a time, for the states at chosen depths.

Shapes: B rows of a batch, S positions, D hidden.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from selfspec.target import Target


@dataclass(frozen=True)
class Pass:
    """One batch of texts: which ones, and their states by depth (the number of layers behind them)."""

    indices: list[int]
    states: dict[int, Tensor]  # [B, S, D]; what stands behind a text's end is padding


def batches_of(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices grouped by length, each group at most ``batch_tokens`` padded tokens (or a single row)."""
    groups: list[list[int]] = [[]]
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if groups[-1] and (len(groups[-1]) + 1) * lengths[index] > batch_tokens:
            groups.append([])
        groups[-1].append(index)
    return [group for group in groups if group]


def packs_of(lengths: Sequence[int], batch_tokens: int, seed: int) -> list[list[int]]:
    """Indices in a random order, grouped to at most ``batch_tokens`` tokens (or a single row)."""
    groups, room = list[list[int]](), 0
    for index in torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist():
        if lengths[index] > room:
            groups.append([])
            room = batch_tokens
        groups[-1].append(index)
        room -= lengths[index]
    return groups


@torch.no_grad()
def passes(target: Target, texts: Sequence[Tensor], depths: Iterable[int], batch_tokens: int = 2048) -> Iterator[Pass]:
    """Run token ids ``texts`` [S] each, batch by batch, and keep the states at ``depths`` in 0..L."""
    for group in batches_of([len(ids) for ids in texts], batch_tokens):
        # right padding needs no mask: causal attention never looks at what comes after a row
        ids = pad_sequence([texts[i] for i in group], batch_first=True).to(target.device)
        hidden, start = target.embed(ids), 0
        held = {}
        for depth in sorted(set(depths)):
            hidden = target.run_uncached(target.layers[start:depth], hidden, range(start, depth))
            held[depth], start = hidden, depth
        yield Pass(group, held)
