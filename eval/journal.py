"""Finished questions on disk, so that an interrupted run loses at most the one under way.

OUTPUT/journal.jsonl    the settings, then a line per finished question; removed at the end
OUTPUT/results.json     written whole, at the end
"""

import json
import os
from pathlib import Path
from typing import Any

from selfspec.files import check_writable, write_atomically

FORMAT_VERSION = 1
JOURNAL, RESULTS = "journal.jsonl", "results.json"


class Journal:
    """The folder of one run. Raises ValueError where it holds another one, OSError where it cannot be written."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        if (folder / RESULTS).exists():
            raise ValueError(f"{folder / RESULTS} holds a finished run; choose another output, or remove it")
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder / JOURNAL)
        self._folder, self._path, self._settings = folder, folder / JOURNAL, settings
        self.rows: list[dict[str, Any]] = []
        self.done: set[str] = set()
        if self._path.exists():
            self._read(settings)

    def _read(self, settings: dict[str, Any]) -> None:
        lines = self._path.read_text(encoding="utf-8").split("\n")
        whole, torn = lines[:-1], lines[-1]  # a line that was cut off while it was written has no end
        if torn:
            write_atomically(self._path, "".join(f"{line}\n" for line in whole).encode())
        if not whole:
            return self._path.unlink()
        held = json.loads(whole[0])
        changed = [key for key in settings.keys() | held.keys() if settings.get(key) != held.get(key)]
        if changed:
            what = "; ".join(f"{key}: {held.get(key)} -> {settings.get(key)}" for key in sorted(changed))
            raise ValueError(
                f"{self._folder} holds an unfinished run of other settings ({what}); choose another output"
            )
        for line in whole[1:]:
            entry = json.loads(line)
            self.done.add(entry["key"])
            self.rows += entry["rows"]

    def add(self, key: str, rows: list[dict[str, Any]]) -> None:
        """Keep the rows of one question."""
        if not self._path.exists():
            self._append(self._settings)
        self._append({"key": key, "rows": rows})
        self.done.add(key)
        self.rows += rows

    def _append(self, entry: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, results: dict[str, Any]) -> None:
        """Write results.json, whole or not at all, and drop the journal."""
        rest = json.dumps({key: held for key, held in results.items() if key != "rows"}, indent=1)
        rows = ",\n".join(f"  {json.dumps(row)}" for row in results["rows"])  # a line each
        text = f'{rest[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'
        write_atomically(self._folder / RESULTS, text.encode())
        self._path.unlink(missing_ok=True)
