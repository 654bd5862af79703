"""Files read line by line with their errors named, and files that are never seen half-written."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

LOCK_FILE = ".lock"
HUB_DATASET = re.compile(r"[\w.-]+/[\w.-]+(@[\w.\[\]:%-]+)?")


def cache_folder() -> Path:
    """Where what can be made again is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "selfspec"


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file:line", object) for each line that is not blank; raise ValueError naming the line otherwise."""
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8").strip()
                record = json.loads(line) if line else None
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 (byte {error.start} of the line)") from error
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: bad JSON, {error.msg} at column {error.colno}") from error
            if not line:
                continue
            if not isinstance(record, dict):
                raise ValueError(f"{where}: expected an object, got {type(record).__name__}")
            yield where, record


def read_records(
    source: str | os.PathLike[str], split: str = "train", config: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, record) from a jsonl file, or from a data set on the hub: owner/name, or owner/name@split.

    Raises ValueError where `datasets` is needed and missing, OSError where the data set is not to be had.
    """
    text = str(source)
    if Path(source).exists() or text.endswith((".json", ".jsonl")) or not HUB_DATASET.fullmatch(text):
        yield from read_jsonl(source)
        return
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(f"data set {text}: pip install 'selfspec[datasets]', or give a file") from error
    name, _, part = text.partition("@")
    try:
        rows = load_dataset(name, config, split=part or split)
    except Exception as error:  # of many kinds; all mean that it is not to be had
        raise OSError(
            f"cannot fetch data set {text!r}: {first_line(error)}; check name and network, or give a file"
        ) from error
    for number, record in enumerate(rows, 1):
        yield f"{text}:{number}", record


def first_line(error: Exception) -> str:
    """What an error says, in a line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def write_atomically(path: Path, data: bytes) -> None:
    """Write and fsync a temporary sibling, then rename it over path: readers see the old file or the new, whole one."""
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer a folder, which is made if need be; the lock goes with the process, however it ends.

    Raises BlockingIOError while another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / LOCK_FILE, timeout=0):
            yield
    except filelock.Timeout as error:
        raise BlockingIOError(f"{folder}: another process is writing there") from error


def check_writable(path: Path) -> None:
    """Raise OSError, in one line, where `write_atomically` could not write ``path``: no such folder, no permission."""
    if path.is_dir():
        raise OSError(f"cannot write {path}: it is a folder")
    try:
        _temporary(path).touch()
        _temporary(path).unlink()
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror}") from error


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")  # processes that run one target together write alike
