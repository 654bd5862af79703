"""How a family calls its layers, recorded once and cut to the rows of each pass.

Shapes: B sequences, R rows of a pass, T slots, S recorded positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.kernels import dispatch
from selfspec.kernels.row_view import RowView
from selfspec.masks import MaskRule, Tree, padded_row_mask, row_mask, row_view, sliding_window, tree_shape

Call = tuple[tuple[Any, ...], dict[str, Any]]
_CACHE = object()  # placeholder for the cache in a recorded call


class Recorder(nn.Module):
    """Stands in a layer's place: notes how the family calls it, passes the hidden state on (or ``replacement``)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["layer"] = layer  # not a submodule: its parameters are none of the shell's business
        self.call: Call | None = None
        self.hidden: Tensor | None = None
        self.replacement: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)  # attention_type and the like

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.hidden, self.call = hidden, (args, kwargs)
        return hidden if self.replacement is None else self.replacement


@dataclass(frozen=True, eq=False)
class Place:
    """Where the rows of a pass stand: in slots first, first + 1, ..., looking at slots [0, read_end).

    ``first`` may be a tensor [1] on the device, which a captured pass reads anew whenever it is replayed: of a chain or
    of a ``tree``, on the device as well. Otherwise ``parents`` gives the rows of a draft tree (None: a chain).
    ``pads`` [B] are the slots before each sequence's start, ``width`` is the number of rows of exact mode.
    """

    first: int | Tensor
    num_rows: int
    read_end: int
    parents: tuple[int, ...] | None = None
    pads: Tensor | None = None
    width: int | None = None
    tree: Tree | None = None

    def is_same(self, other: "Place") -> bool:
        """Whether a pass at ``other`` makes the calls of one here."""
        mine, theirs = ((p.first, p.num_rows, p.read_end, p.parents, p.width) for p in (self, other))
        return mine == theirs and self.pads is other.pads


class LayerCalls:
    """The calls of all layers over positions 0 .. S - 1: rotary tables whole, masks as rules."""

    def __init__(self, recorders: Sequence[Recorder], cache: Any, size: int) -> None:
        self.size = size
        calls = [recorder.call for recorder in recorders]
        self.table: list[Call] = [
            (tuple(_CACHE if a is cache else a for a in args), {k: _CACHE if v is cache else v for k, v in kw.items()})
            for args, kw in (call for call in calls if call is not None)
        ]
        self._last: tuple[Place, list[Call]] | None = None

    def require_windows(self) -> None:
        """Raise NotImplementedError for a rule of attention that is no window: it needs to know its rows."""
        held = [value for args, kwargs in self.table for value in (*args, *kwargs.values())]
        rules = {id(rule): rule for rule in held if isinstance(rule, MaskRule)}
        if any(sliding_window(rule, self.size) is None for rule in rules.values()):
            raise NotImplementedError("a rule of attention that is no window")

    def at(self, place: Place, device: torch.device, mask: Tensor | None = None) -> list[Call]:
        """The layers' calls for the rows at ``place``; alike layers share one. ``mask`` replaces the family's own."""
        if mask is not None or isinstance(place.first, Tensor):
            return _Cut(self.size, place, device, mask).calls(self.table)
        if self._last is None or not self._last[0].is_same(place):
            self._last = (place, _Cut(self.size, place, device, None).calls(self.table))
        return self._last[1]


class _Cut:
    """Cuts recorded arguments down to the rows of one place."""

    def __init__(self, size: int, place: Place, device: torch.device, mask: Tensor | None) -> None:
        self.size, self.place, self.mask = size, place, mask
        # padding rows of exact mode may stand beyond the context
        if isinstance(place.first, Tensor):
            steps = torch.arange(place.num_rows, device=device) if place.tree is None else place.tree.depths
            self.ancestors = None if place.tree is None else place.tree.ancestors
            self.positions = (place.first + steps).clamp(max=size - 1)
        else:
            depths, self.ancestors = tree_shape(place.parents, place.num_rows)
            self.positions = torch.tensor([min(place.first + d, size - 1) for d in depths], device=device)  # [R]
        if place.pads is not None:
            self.positions = (self.positions - place.pads[:, None]).clamp(min=0)  # [B, R]
        self._made: dict[int, Any] = {}

    def calls(self, table: Sequence[Call]) -> list[Call]:
        shared: dict[tuple[Any, ...], Call] = {}
        calls = []
        for args, kwargs in table:
            key = (*map(id, args), *kwargs, *map(id, kwargs.values()))
            if key not in shared:
                shared[key] = (tuple(self._cut(a) for a in args), {k: self._cut(v) for k, v in kwargs.items()})
            calls.append(shared[key])
        return calls

    def _cut(self, value: Any) -> Any:
        is_rule, is_table = isinstance(value, MaskRule), isinstance(value, Tensor) and self.size in value.shape
        if isinstance(value, tuple):
            return tuple(self._cut(v) for v in value)
        if not is_rule and not is_table:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._see(value) if is_rule else self._rows(value, value.shape.index(self.size))
        return self._made[id(value)]

    def _see(self, rule: MaskRule) -> Tensor | RowView | None:
        place = self.place
        if self.mask is not None:
            return self.mask
        if isinstance(place.first, Tensor) or dispatch.takes_views(self.positions.device, place.num_rows):
            window = sliding_window(rule, self.size)
            if window is not None:
                return row_view(window, self.positions, place.first, self.ancestors, place.pads, place.width)
        assert isinstance(place.first, int)
        if place.pads is not None:
            return padded_row_mask(rule, self.positions, place.pads, place.read_end)
        return row_mask(rule, self.positions, place.first, place.read_end, self.ancestors)

    def _rows(self, table: Tensor, dim: int) -> Tensor:
        place = self.place
        if place.pads is not None:
            rows = table.index_select(dim, self.positions.flatten()).unflatten(dim, self.positions.shape)
            rows = rows.movedim(dim, 0)
            return rows.squeeze(1) if dim else rows  # [B, ..., R, ...]: tables were made for one sequence
        if place.parents is None and isinstance(place.first, int) and place.first + place.num_rows <= self.size:
            return table.narrow(dim, place.first, place.num_rows)
        return table.index_select(dim, self.positions)


def call_layer(layer: nn.Module, hidden: Tensor, call: Call, cache: Any) -> Tensor:
    """Call ``layer`` as recorded, with this cache (or none); some families return more than the hidden state."""
    args = [cache if a is _CACHE else a for a in call[0]]
    kwargs = {k: cache if v is _CACHE else v for k, v in call[1].items()}
    output = layer(hidden, *args, **kwargs)
    return output[0] if isinstance(output, tuple) else output
