"""Teacher states kept on disk in chunks of rows: an interrupted pass goes on, and later data costs only its own pass.

A file holds, for row i of its chunk, the tensors `i.taps`, `i.recalls`, ... of `RowStates`, and for all of them
`answer_starts` and `temperatures`.
"""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.progress import track
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from selfspec.exits import ExitConfig
from selfspec.target import Target
from selfspec.training.data import Row
from selfspec.training.states import RowStates, collect
from selfspec.training.workers import in_order

logger = logging.getLogger(__name__)

CHUNK_ROWS = 64  # rows a file holds


def collect_cached(
    target: Target,
    config: ExitConfig,
    rows: Sequence[Row],
    folder: Path,
    label: str,
    chunk: int = CHUNK_ROWS,
    num_workers: int = 1,
) -> list[RowStates]:
    """`collect`, chunk by chunk through ``folder``, ``num_workers`` processes side by side.

    ``label`` names the target. Files are named by what they were made from, so two processes may share the work.
    """
    folder.mkdir(parents=True, exist_ok=True)
    identity = json.dumps([label, config.exit_layer, config.recall_layers])
    parts = [rows[start : start + chunk] for start in range(0, len(rows), chunk)]
    paths = [folder / f"states-{_digest(identity, part)}.safetensors" for part in parts]
    held = [_load(path) if path.is_file() else None for path in paths]
    missing = [i for i, states in enumerate(held) if states is None]
    made = in_order(target.base, _collect, [(config, parts[i], paths[i]) for i in missing], num_workers)
    for i, _ in zip(missing, track(made, description="teacher pass", total=len(missing)), strict=True):
        held[i] = _load(paths[i])
    return [state for states in held for state in states or []]


def _digest(identity: str, rows: Sequence[Row]) -> str:
    digest = hashlib.sha256(identity.encode())
    for row in rows:
        digest.update(row.ids.tobytes() + str(row.answer_start).encode())
    return digest.hexdigest()[:20]


def _collect(model: PreTrainedModel, config: ExitConfig, rows: Sequence[Row], path: Path) -> None:
    _save(collect(Target(model, check=False), config, rows), path)


def _save(states: Sequence[RowStates], path: Path) -> None:
    tensors = {f"{i}.{n}": v for i, s in enumerate(states) for n, v in vars(s).items() if isinstance(v, Tensor)}
    tensors["answer_starts"] = torch.tensor([s.answer_start for s in states])
    tensors["temperatures"] = torch.tensor([s.temperature for s in states], dtype=torch.float64)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
    os.replace(temporary, path)


def _load(path: Path) -> list[RowStates] | None:
    """The states in ``path``; None, and a warning, where the file is broken."""
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        logger.warning("%s is broken (%s): its rows go through the target again", path, error)
        return None
    starts, temperatures = tensors.pop("answer_starts").tolist(), tensors.pop("temperatures").tolist()
    rows: list[dict[str, Tensor]] = [{} for _ in starts]
    for name, tensor in tensors.items():
        index, field = name.split(".")
        rows[int(index)][field] = tensor
    return [
        RowStates(recalls=row.pop("recalls", None), answer_start=start, temperature=temperature, **row)
        for row, start, temperature in zip(rows, starts, temperatures, strict=True)
    ]
