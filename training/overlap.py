"""Keeping evaluation text out of training: shared runs of words."""

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from selfspec.files import read_records

RUN = 10  # words; fewer than that in a row are shared by chance


class Overlap:
    """Tells texts that share a run of 10 words with given ones; a shorter text must be there as a whole."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._runs = {run for text in texts for run in _runs(text)}

    @classmethod
    def of_files(cls, sources: Iterable[str | os.PathLike[str]]) -> "Overlap | None":
        """All texts of jsonl files or data sets; None of none."""
        sources = list(sources)
        return (
            cls(text for source in sources for _, record in read_records(source) for text in texts_of(record))
            if sources
            else None
        )

    def touches(self, texts: Iterable[str]) -> bool:
        """Whether one of ``texts`` shares a run."""
        return any(run in self._runs for text in texts for run in _runs(text))


def texts_of(value: Any) -> Iterator[str]:
    """All strings of some length in a record, however deep: roles, categories and ids are short."""
    if isinstance(value, str) and " " in value.strip():
        yield value
    elif isinstance(value, dict):
        for held in value.values():
            yield from texts_of(held)
    elif isinstance(value, list | tuple):
        for held in value:
            yield from texts_of(held)


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    for begin in range(max(len(words) - RUN, 0) + 1):
        run = tuple(words[begin : begin + RUN])
        if run:
            yield run
