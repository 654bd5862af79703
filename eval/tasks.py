"""Questions to measure on: Spec-Bench, MT-Bench, GSM8K and HumanEval formats, any jsonl, and a set of our own.

A question has one or more user turns. Formats are told apart by their fields: `turns` (Spec-Bench, MT-Bench), `prompt`
(HumanEval; a list of turns in MT-Bench on the hub), `question` (GSM8K), `messages`, `text`.
"""

import importlib.resources
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from selfspec.files import read_jsonl, read_records


@dataclass(frozen=True)
class Question:
    """What the model is asked, turn by turn."""

    task: str
    id: str
    category: str
    turns: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """Where a named task's questions come from when no file is given, and how a prompt becomes a request."""

    dataset: str | None = None  # id on the hub
    config: str | None = None
    split: str = "test"
    request: str = "{}"


TASKS = {
    "quick": Task(),  # 60 questions that come with the package
    "spec-bench": Task(),
    "mt-bench": Task("HuggingFaceH4/mt_bench_prompts", split="train"),
    "gsm8k": Task("openai/gsm8k", "main"),
    "humaneval": Task("openai/openai_humaneval", request="Complete this Python function:\n\n{}"),
}


def load_questions(entry: str, limit: int | None = None, max_turns: int = 1) -> list[Question]:
    """Questions of one entry of `EvalConfig.tasks`, the first ``limit`` of each category.

    ``entry`` is a task's name, a file, or NAME:SOURCE with a file or the id of a data set. Raises ValueError (a bad
    line is named FILE:LINE) or FileNotFoundError, in one line.
    """
    name, source = _divide(entry)
    task = TASKS.get(name, Task())
    counts: Counter[str] = Counter()
    questions, seen = list[Question](), set[str]()
    for number, (where, record) in enumerate(_records(name, task, source), 1):
        question = _question(name, task, where, record, number, max_turns)
        if question.id in seen:
            question = replace(question, id=f"{question.id}-{number}")
        seen.add(question.id)
        counts[question.category] += 1
        if limit is None or counts[question.category] <= limit:
            questions.append(question)
    if not questions:
        raise ValueError(f"{source or entry}: no questions")
    return questions


def _divide(entry: str) -> tuple[str, str | None]:
    """Name and source of an entry."""
    if entry in TASKS:
        return entry, None
    name, colon, source = entry.partition(":")
    if colon and name in TASKS:
        return name, source
    if Path(entry).is_file():
        return Path(entry).stem, entry
    if entry.endswith((".json", ".jsonl")) or "/" in entry:
        raise FileNotFoundError(f"{entry}: no such file of questions")
    raise ValueError(f"unknown task {entry!r}; choose one of {', '.join(TASKS)}, a jsonl file, or NAME:FILE")


def _records(name: str, task: Task, source: str | None) -> Iterable[tuple[str, dict[str, Any]]]:
    if name == "quick" and source is None:
        with importlib.resources.as_file(importlib.resources.files("selfspec.eval") / "quick.jsonl") as path:
            return list(read_jsonl(path))
    if source is None and task.dataset is None:
        raise ValueError(f"{name} needs its file of questions: tasks=[{name}:FILE]")
    source = source or str(task.dataset)
    return read_records(source, task.split, task.config if source == task.dataset else None)


def _question(name: str, task: Task, where: str, record: dict[str, Any], number: int, max_turns: int) -> Question:
    turns = _turns(where, record)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{where}: empty or non-text turns")
    identity = next((record[k] for k in ("question_id", "prompt_id", "task_id", "id") if k in record), number)
    category = str(record.get("category") or name)
    return Question(name, str(identity), category, tuple(task.request.format(turn) for turn in turns[:max_turns]))


def _turns(where: str, record: dict[str, Any]) -> list[Any]:
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ValueError(f"{where}: `messages` must be a list of objects with role and content")
        return [message.get("content") for message in messages if message["role"] == "user"]
    for field in ("turns", "prompt", "question", "text"):
        if field in record:
            value = record[field]
            return value if isinstance(value, list) else [value]
    fields = ", ".join(record) or "none"
    raise ValueError(f"{where}: needs `turns`, `prompt`, `question`, `messages` or `text`; its fields: {fields}")
