"""Checkpoints that can be trusted.

Hugging Face's Trainer writes a checkpoint file by file. Here it counts once it is sealed: flushed to disk, with the
hashes of its files and what the run was fed beside them. A run goes on from the newest one that is as it was sealed.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfspec.files import write_atomically

logger = logging.getLogger(__name__)

SEAL = "seal.json"


def seal(folder: Path, facts: Mapping[str, Any]) -> None:
    """Declare the checkpoint ``folder`` whole; ``facts`` are kept with it."""
    hashes = {}
    for path in sorted(p for p in folder.iterdir() if p.is_file() and p.name != SEAL):
        hashes[path.name] = _digest(path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    write_atomically(folder / SEAL, json.dumps({"files": hashes, "facts": dict(facts)}, indent=1).encode())


def newest_whole(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is as it was sealed, and its facts; a notice names every newer one that is not."""
    found = [p for p in folder.glob("checkpoint-*") if p.is_dir() and p.name.rpartition("-")[2].isdigit()]
    for checkpoint in sorted(found, key=lambda p: int(p.name.rpartition("-")[2]), reverse=True):
        facts, flaw = _read(checkpoint)
        if not flaw:
            return checkpoint, facts
        logger.warning("%s is passed over: %s", checkpoint, flaw)
    return None


def check_facts(checkpoint: Path, held: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ValueError where a run would go on with other data or processes; warn of other library versions."""
    changed = [f"{k}: {held.get(k)} -> {now[k]}" for k in now if k != "versions" and held.get(k) != now[k]]
    if changed:
        remedy = "choose another output, or force=true"
        raise ValueError(f"{checkpoint} belongs to a run with other {'; '.join(changed)}: {remedy}")
    before, after = held.get("versions", {}), now.get("versions", {})
    drifted = [f"{name} {before.get(name)} -> {after[name]}" for name in after if before.get(name) != after[name]]
    if drifted:
        logger.warning("going on with other versions than before: %s", ", ".join(drifted))


def _read(checkpoint: Path) -> tuple[dict[str, Any], str]:
    """The facts of a checkpoint, and what is wrong with it."""
    try:
        sealed = json.loads((checkpoint / SEAL).read_text())
        files, facts = dict(sealed["files"]), dict(sealed["facts"])
    except FileNotFoundError:
        return {}, "it was not finished"
    except (OSError, ValueError, KeyError, TypeError):
        return {}, f"{SEAL} cannot be read"
    for name, digest in files.items():
        path = checkpoint / name
        if not path.is_file() or _digest(path) != digest:
            return {}, f"{name} is {'damaged' if path.is_file() else 'missing'}"
    return facts, ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
