"""Teacher states kept on disk: an interrupted pass goes on, later data costs only its own pass, runs share them.

A file holds the rows that were made together; for row i the tensors `i.taps`, `i.recalls`, ... of `RowStates` (but its
tokens, which the row has), for all of them `answer_starts` and `temperatures`, and in its metadata what tells each row,
so that a row is found whatever rows were made beside it.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.exits import ExitConfig
from selfspec.files import write_atomically
from selfspec.target import Target
from selfspec.training.data import Row
from selfspec.training.states import RowStates, collect, scored_tokens
from selfspec.training.workers import in_order

logger = logging.getLogger(__name__)

CHUNK_ROWS = 64  # rows a file holds


@dataclass(frozen=True)
class KeptStates:
    """A folder of states of the target that ``label`` names, as exits of ``config`` are trained on."""

    folder: Path
    config: ExitConfig
    label: str

    def keep(self, rows: Sequence[Row], states: Sequence[RowStates]) -> Path:
        """Write the states of ``rows`` into a file of their own, which is returned."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names = [self._name(row) for row in rows]
        path = self.folder / f"states-{hashlib.sha256(''.join(names).encode()).hexdigest()[:20]}.safetensors"
        write_atomically(path, save(_tensors(states), metadata={"rows": json.dumps(names)}))
        return path

    def find(self, rows: Sequence[Row]) -> list[RowStates | None]:
        """The states of ``rows``, None for those that are not kept."""
        names = [self._name(row) for row in rows]
        wanted, found = dict(zip(names, rows, strict=True)), dict[str, RowStates]()
        for path in sorted(self.folder.glob("states-*.safetensors")):
            held = _names(path)
            if not wanted.keys().isdisjoint(held):
                states = _load(path, [wanted.get(name) for name in held])
                found.update((n, s) for n, s in zip(held, states, strict=True) if s is not None)
        return [found.get(name) for name in names]

    def _name(self, row: Row) -> str:
        temperature = f"{row.temperature:.4g}"  # shards keep it in single precision
        identity = [self.label, self.config.exit_layer, self.config.recall_layers, row.answer_start, temperature]
        return hashlib.sha256(json.dumps(identity).encode() + row.ids.tobytes()).hexdigest()[:20]


def collect_cached(
    target: Target, kept: KeptStates, rows: Sequence[Row], chunk: int = CHUNK_ROWS, num_workers: int = 1
) -> list[RowStates]:
    """`collect` of the rows that ``kept`` lacks, chunk by chunk, ``num_workers`` processes side by side."""
    states = kept.find(rows)
    missing = [i for i, state in enumerate(states) if state is None]
    parts = [missing[start : start + chunk] for start in range(0, len(missing), chunk)]
    made = in_order(target.base, _collect, [(kept, [rows[i] for i in part]) for part in parts], num_workers)
    for part, path in zip(parts, track(made, description="teacher pass", total=len(parts)), strict=True):
        for i, state in zip(part, _load(path, [rows[i] for i in part]), strict=True):
            states[i] = state
    return [state for state in states if state is not None]


def _collect(model: PreTrainedModel, kept: KeptStates, rows: Sequence[Row]) -> Path:
    return kept.keep(rows, collect(Target(model, check=False), kept.config, rows))


def _names(path: Path) -> list[str]:
    """What tells the rows in ``path``; none, and a warning, where the file is broken (it is removed)."""
    try:
        with safe_open(path, "pt") as file:
            names: list[str] = json.loads((file.metadata() or {}).get("rows", "[]"))
    except SafetensorError as error:
        logger.warning("%s is broken (%s): its rows go through the target again", path, error)
        path.unlink(missing_ok=True)
        return []
    return names


def _tensors(states: Sequence[RowStates]) -> dict[str, Tensor]:
    fields = [(i, n, v) for i, s in enumerate(states) for n, v in vars(s).items() if n != "tokens"]
    tensors = {f"{i}.{n}": v for i, n, v in fields if isinstance(v, Tensor)}
    tensors["answer_starts"] = torch.tensor([s.answer_start for s in states])
    tensors["temperatures"] = torch.tensor([s.temperature for s in states], dtype=torch.float64)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _load(path: Path, rows: Sequence[Row | None]) -> list[RowStates | None]:
    """The states in ``path``, whose rows are ``rows``; None for None."""
    tensors = load_file(path)
    starts, temperatures = tensors.pop("answer_starts").tolist(), tensors.pop("temperatures").tolist()
    held: list[dict[str, Tensor]] = [{} for _ in starts]
    for name, tensor in tensors.items():
        index, field = name.split(".")
        held[int(index)][field] = tensor
    return [
        None if row is None else RowStates(
            recalls=fields.pop("recalls", None), answer_start=start, temperature=temperature,
            tokens=scored_tokens(row), **fields,
        )
        for row, fields, start, temperature in zip(rows, held, starts, temperatures, strict=True)
    ]  # fmt: skip
