"""`selfspec eval`: every method on the same prompts, in turn, prompt by prompt; an interrupted run goes on.

results.json is {settings, num_prompts, failures, notes, summary, by_temperature, by_category, skipped, engine, rows,
provenance}; `summary.py` says what is in a summary, `runner.py` what in a row.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils import logging as transformers_logging

from selfspec.costs import pass_costs
from selfspec.eval.config import EvalConfig, MethodSpec
from selfspec.eval.contexts import plain_decoding
from selfspec.eval.engine import AR, Engine, ar_wide, wide_name
from selfspec.eval.journal import FORMAT_VERSION, Journal
from selfspec.eval.measure import Clock, Method, SkippedMethodError
from selfspec.eval.methods import DEFAULT, METHODS
from selfspec.eval.runner import Runner
from selfspec.eval.summary import summarise
from selfspec.eval.tasks import load_questions
from selfspec.model import EarlyExitModel
from selfspec.provenance import commit, provenance


def evaluate(config: EvalConfig, clock: Clock = time.perf_counter) -> dict[str, Any]:
    """Run ``config``, or what is left of it; returns the results, which OUTPUT/results.json then holds.

    Raises ValueError, OSError or FileNotFoundError, in one line, before any work: for unknown methods and tasks, bad
    questions, a folder that cannot be written or holds another run.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    specs = method_specs(config)
    questions = [q for entry in config.tasks for q in load_questions(entry, config.limit, config.max_turns)]
    asked = hashlib.sha256(json.dumps([question.turns for question in questions]).encode()).hexdigest()
    identity = {"questions_sha256": asked, "commit": commit()["commit"]}
    settings = {**config.model_dump(mode="json", exclude={"output"}), **identity}
    journal = Journal(Path(config.output), settings)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = EarlyExitModel.from_pretrained(config.model, config.exits, config.revision, config.dtype, config.device)
    if config.template == "chat" and (model.tokenizer is None or not model.tokenizer.chat_template):
        raise ValueError("the model has no chat template; pass template=plain")
    methods, skipped = build_methods(model, specs)
    runner = Runner(model, methods, config, clock)
    runner.warm_up(questions[0])
    with progress_bar() as bar:
        task = bar.add_task("measuring", total=len(questions), completed=min(len(journal.done), len(questions)))
        for question in questions:
            if (key := f"{question.task}/{question.id}") not in journal.done:
                journal.add(key, runner.ask(question))
                bar.advance(task)
    rows = journal.rows
    results = {
        "format_version": FORMAT_VERSION,
        "settings": {**config.model_dump(mode="json"), "methods": [spec.model_dump(mode="json") for spec in specs],
                     "dtype": str(model.target.dtype).removeprefix("torch."), "model_name": model.target.name,
                     "exit": model.default_exit and model.default_exit.name, "questions_sha256": asked},
        **summarise(rows, {name: method.is_ar for name, method in methods.items()}, config),
        "skipped": skipped,
        "engine": engine_costs(model, config),
        "rows": rows,
        "provenance": provenance(model.target.device),
    }  # fmt: skip
    journal.finish(results)
    return results


def method_specs(config: EvalConfig) -> list[MethodSpec]:
    """The methods asked for, behind plain decoding, which every comparison needs."""
    specs = list(config.methods) or [MethodSpec(method=name, name=name) for name in DEFAULT]
    unknown = sorted({spec.method for spec in specs} - METHODS.keys())
    if unknown:
        raise ValueError(f"unknown method {', '.join(unknown)}; choose of {', '.join(METHODS)}")
    named_ar = [spec for spec in specs if spec.name == AR] or [MethodSpec(method=AR, name=AR)]
    if named_ar[0].method != AR:
        raise ValueError(f"the name {AR} belongs to the method {AR}")
    return named_ar + [spec for spec in specs if spec.name != AR]


def build_methods(model: EarlyExitModel, specs: Sequence[MethodSpec]) -> tuple[dict[str, Method], dict[str, str]]:
    """The methods that run here by name, those they are held against too, and why others do not run.

    Raises ValueError for options that a method does not take.
    """
    methods: dict[str, Method] = {}
    skipped: dict[str, str] = {}
    for spec in specs:
        try:
            methods[spec.name] = METHODS[spec.method](model, **spec.options)
        except SkippedMethodError as error:
            skipped[spec.name] = str(error)
        except TypeError as error:
            raise ValueError(f"method {spec.name}: {error}") from None
    widths = {m.width for m in methods.values() if isinstance(m, Engine) and m.width is not None}
    for width in sorted((widths or {2}) - {1}):  # where rows are exact as they come, every width is width 1
        if wide_name(width) not in methods and wide_name(width) not in skipped:
            try:
                methods[wide_name(width)] = ar_wide(model, width)
            except SkippedMethodError as error:
                skipped[wide_name(width)] = str(error)
    return methods, skipped


def engine_costs(model: EarlyExitModel, config: EvalConfig) -> dict[str, Any] | None:
    """What passes and draft steps cost by context, and plain decoding against transformers'; None if not asked for."""
    rounds = config.engine_rounds
    if not rounds:
        return None
    return {
        "pass_costs": pass_costs(model, 3 * rounds),
        "plain_decoding": plain_decoding(model, rounds, config.max_new_tokens),
    }


def progress_bar() -> Progress:
    """Prompts done, time spent and time left, on stderr."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True),
    )  # fmt: skip
