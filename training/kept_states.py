"""Teacher states kept on disk: an interrupted pass goes on, later data costs only its own, exits and runs share them.

A file holds rows that were made together at some depths; for row i the tensors `i.DEPTH`, where the last layer was run
also `i.finals`, `i.log_sums` and `i.argmaxes` (see `TeacherStates`), and in its metadata the depths and what tells each
row, so that a row is found whatever rows were made beside it. Its name is a hash of its content, checked when the rows
are looked for; their states stay in it until a batch needs them.
"""

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.progress import track
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.exit_module import ExitConfig
from selfspec.files import write_atomically
from selfspec.target import Target
from selfspec.training.data import Row
from selfspec.training.on_disk import Held, load, tensors_in
from selfspec.training.states import RowStates, TeacherStates, kept_depths, teach
from selfspec.training.workers import in_order

logger = logging.getLogger(__name__)

CHUNK_ROWS = 64  # rows a file holds
ANSWERS = ("finals", "log_sums", "argmaxes")
LARGEST = 448.0  # of float8_e4m3fn


@dataclass(frozen=True)
class KeptStates:
    """A folder of states of the target that ``label`` names; ``is_small`` keeps new ones in 8 bits a number."""

    folder: Path
    label: str
    is_small: bool = False

    def keep(self, rows: Sequence[Row], states: Sequence[TeacherStates]) -> Path:
        """Write the states of ``rows`` into a file of their own, which is returned."""
        self.folder.mkdir(parents=True, exist_ok=True)
        about = {"rows": json.dumps([self.name(row) for row in rows]), "depths": json.dumps([*states[0].by_depth])}
        data = save(_tensors(states, self.is_small), metadata=about)
        path = self.folder / f"states-{_digest(data)}.safetensors"
        write_atomically(path, data)
        return path

    def find(self, rows: Sequence[Row], depths: Sequence[int]) -> list[TeacherStates]:
        """What is kept of each of ``rows`` at ``depths``."""
        places = {self.name(row): i for i, row in enumerate(rows)}
        found = [TeacherStates({}) for _ in rows]
        for path in sorted(self.folder.glob("states-*.safetensors")):
            names, held = _about(path)
            if places.keys().isdisjoint(names) or not {*held} & {*depths}:
                continue
            for name, states in zip(names, _read(path, depths), strict=False):
                if name in places:
                    found[places[name]] = found[places[name]].joined(states)
        return [found[places[self.name(row)]] for row in rows]

    def name(self, row: Row) -> str:
        """What tells ``row``."""
        return hashlib.sha256(json.dumps([self.label, row.answer_start]).encode() + row.ids.tobytes()).hexdigest()[:20]


def collect_cached(
    target: Target,
    kept: KeptStates,
    config: ExitConfig,
    rows: Sequence[Row],
    chunk: int = CHUNK_ROWS,
    num_workers: int = 1,
) -> list[RowStates]:
    """`collect`, of what ``kept`` lacks alone, chunk by chunk, ``num_workers`` processes side by side.

    Where only shallow depths are missing, as for an exit at another layer, the target is run no further than those.
    """
    wanted = kept_depths(target.num_layers, config)
    states, lacking = kept.find(rows, wanted), defaultdict[tuple[int, ...], list[int]](list)
    for i, held in enumerate(states):
        lacking[tuple(depth for depth in wanted if depth not in held.by_depth)].append(i)
    lacking.pop((), None)
    parts = [(depths, ids[i : i + chunk]) for depths, ids in lacking.items() for i in range(0, len(ids), chunk)]
    tasks = [(kept, depths, [rows[i] for i in part]) for depths, part in parts]
    made = in_order(target.base, _teach, tasks, num_workers)
    shown = track(made, description="teacher pass", total=len(parts), disable=not parts)
    for (depths, part), path in zip(parts, shown, strict=True):
        for i, new in zip(part, _read(path, depths), strict=True):
            states[i] = states[i].joined(new)
    return [held.for_exit(config, row) for held, row in zip(states, rows, strict=True)]


def _teach(model: PreTrainedModel, kept: KeptStates, depths: Sequence[int], rows: Sequence[Row]) -> Path:
    return kept.keep(rows, teach(Target(model, check=False), depths, rows))


def _about(path: Path) -> tuple[list[str], list[int]]:
    """What tells the rows in ``path``, and their depths; none, and a warning, where the file is broken."""
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
    except SafetensorError as error:
        _give_up(path, str(error))
        return [], []
    return json.loads(about.get("rows", "[]")), json.loads(about.get("depths", "[]"))


def _give_up(path: Path, reason: str) -> None:
    logger.warning("%s is broken (%s): its rows go through the target again", path, reason)
    path.unlink(missing_ok=True)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:20]


def _tensors(states: Sequence[TeacherStates], is_small: bool) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for i, held in enumerate(states):
        for depth, state in ((depth, load(state)) for depth, state in held.by_depth.items()):
            if is_small:  # a position's largest number takes the largest of 8 bits
                scale = (state.float().abs().amax(-1) / LARGEST).clamp(min=1e-12)
                tensors[f"{i}.{depth}.scale"] = scale
                state = (state.float() / scale[:, None]).to(torch.float8_e4m3fn)
            tensors[f"{i}.{depth}"] = state
        tensors |= {f"{i}.{name}": load(getattr(held, name)) for name in ANSWERS if held.finals is not None}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _read(path: Path, depths: Sequence[int]) -> list[TeacherStates]:
    """The rows of ``path`` at those of ``depths`` that it has; none where its content is not what was written."""
    if f"states-{_digest(path.read_bytes())}" != path.stem:
        _give_up(path, "its sha256 is another")
        return []
    held, found = tensors_in(path), list[TeacherStates]()
    for i in range(len(_about(path)[0])):
        states: dict[int, Held] = {
            depth: replace(held[f"{i}.{depth}"], scale=held.get(f"{i}.{depth}.scale"))
            for depth in depths
            if f"{i}.{depth}" in held
        }
        log_sums, argmaxes = (held[f"{i}.{name}"].load() if f"{i}.{name}" in held else None for name in ANSWERS[1:])
        found.append(TeacherStates(states, held.get(f"{i}.{ANSWERS[0]}"), log_sums, argmaxes))
    return found
