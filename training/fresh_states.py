"""Teacher states that are made when they are asked for, where there is no room to keep them."""

from collections.abc import Iterable, Sequence
from typing import overload

from selfspec.exit_module import ExitConfig
from selfspec.target import Target
from selfspec.training.data import Row
from selfspec.training.states import RowStates, collect


class FreshStates(Sequence[RowStates]):
    """The states of ``rows``, from a pass of the target over those that are asked for, each time."""

    def __init__(self, target: Target, config: ExitConfig, rows: Sequence[Row]) -> None:
        self.target, self.config, self.rows = target, config, rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> RowStates: ...

    @overload
    def __getitem__(self, index: slice) -> list[RowStates]: ...

    def __getitem__(self, index: int | slice) -> RowStates | list[RowStates]:
        if isinstance(index, slice):
            return self.take(range(*index.indices(len(self))))
        return self.take([range(len(self))[index]])[0]

    def take(self, indices: Iterable[int]) -> list[RowStates]:
        """The states of several rows, made together."""
        return collect(self.target, self.config, [self.rows[i] for i in indices])


def take(states: Sequence[RowStates], indices: Iterable[int]) -> list[RowStates]:
    """``states`` at ``indices``, in one pass where they are fresh."""
    return states.take(indices) if isinstance(states, FreshStates) else [states[i] for i in indices]


def num_positions(states: Sequence[RowStates]) -> list[int]:
    """Positions of each row."""
    if isinstance(states, FreshStates):
        return [len(row.ids) - 1 for row in states.rows]
    return [row.num_tokens for row in states]


def num_answer_tokens(states: Sequence[RowStates]) -> list[int]:
    """Positions of each row that carry the loss."""
    if isinstance(states, FreshStates):
        return [row.num_answer_tokens for row in states.rows]
    return [len(row.argmaxes) for row in states]
