"""The target writes its own training data, in batches, into shards that a later call continues."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.files import locked, read_records, write_atomically
from selfspec.target import Target
from selfspec.training.batch import Written, write_batch
from selfspec.training.data import (
    FORMAT_VERSION,
    Prompt,
    Row,
    prompt_ids,
    read_manifest,
    read_prompts,
    write_shard,
)
from selfspec.training.kept_states import KeptStates
from selfspec.training.overlap import Overlap
from selfspec.training.ranks import is_main
from selfspec.training.states import TeacherStates
from selfspec.training.user_turns import eos_ids, first_turns, next_turns
from selfspec.training.workers import in_order

logger = logging.getLogger(__name__)

PATIENCE = 16  # batches without one usable answer, after which the model is given up
WINDOW = 8  # batches are cut from windows of this many, sorted by length, so that little is padding


@dataclass
class _Progress:
    """What has been written; the manifest is this, plus the settings."""

    shards: list[dict[str, Any]] = field(default_factory=list)
    num_batches: int = 0
    num_answer_tokens: int = 0
    num_rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


def write_data(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: str | os.PathLike[str],
    num_tokens: int,
    prompts: str | os.PathLike[str] | list[Prompt] | None = None,
    temperatures: Sequence[float] = (0.0, 0.8),
    batch_size: int = 64,
    max_new_tokens: int = 160,
    max_prompt_tokens: int = 512,
    shard_tokens: int = 20_000,
    seed: int = 0,
    num_workers: int = 1,
    kept: KeptStates | None = None,
    depths: Sequence[int] = (),
    avoid: Sequence[str] = (),
    max_turns: int = 1,
) -> dict[str, Any]:
    """Let the target write num_tokens answer tokens into out_dir; returns the manifest.

    prompts None: user turns are sampled at T=.8 from the bare chat template. Otherwise prompts, a jsonl or a data set
    of them (see read_prompts), in an order that keeps every category's share in any prefix; what is there twice, or
    shares a run of words with the files ``avoid``, is left out. With ``max_turns`` the target also writes what a user
    says next, and answers that. Rows of a batch take the temperatures in turn. A second call with the same settings
    continues where the first stopped, and ends with the same rows as one whole call: noise depends on (seed, batch
    number) alone. ``num_workers`` processes write batches side by side. ``kept`` keeps the target's states at
    ``depths`` as it writes, so that training needs no pass of its own over the rows.

    Raises ValueError when out_dir holds data of other settings or the model writes only empty answers, BlockingIOError
    when another process writes there.
    """
    folder = Path(out_dir)
    settings: dict[str, Any] = {
        "model": Path(str(model.config.name_or_path)).name, "dtype": str(model.dtype).removeprefix("torch."),
        "tokenizer_sha256": hashlib.sha256(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()).hexdigest(),
        "kind": "prompts" if prompts else "self",
        "prompts_sha256": content_hash(prompts) if prompts else None,
        "temperatures": list(temperatures), "batch_size": batch_size, "max_new_tokens": max_new_tokens,
        "max_prompt_tokens": max_prompt_tokens, "shard_tokens": shard_tokens, "seed": seed,
    }  # fmt: skip
    if avoid:
        settings["avoid_sha256"] = [content_hash(source) for source in avoid]
    if max_turns > 1:
        settings["max_turns"] = max_turns
    overlap = Overlap.of_files(avoid)
    done: Counter[str] = Counter()
    context = getattr(model.config.get_text_config(), "max_position_embeddings", max_prompt_tokens + max_new_tokens)
    longest = min(max_prompt_tokens, context - max_new_tokens)
    plan = None
    if prompts:
        found = prompts if isinstance(prompts, list) else read_prompts(prompts)
        plan = _plan(_distinct(found, overlap, done), tokenizer, batch_size, longest, seed, done)
    with locked(folder) if is_main() else contextlib.nullcontext(), _bar() as bar, contextlib.ExitStack() as stack:
        state = _resume(folder, settings) or _Progress(skipped=done)
        task = bar.add_task("generating", total=num_tokens, completed=state.num_answer_tokens, speed=0.0)
        start_tokens, num_barren = state.num_answer_tokens, 0
        pending: list[Row] = []
        tasks = _tasks(tokenizer, plan, settings, state.num_batches, kept, depths)
        batches = stack.enter_context(contextlib.closing(in_order(model, _write_batch, tasks, num_workers)))
        while state.num_answer_tokens + _count(pending) < num_tokens:
            written = next(batches, None)
            if written is None:
                logger.warning("all prompts used: %d answer tokens of %d", state.num_answer_tokens, num_tokens)
                break
            rows, skipped = written
            if overlap is not None:  # what the target wrote itself may have it by heart
                clean = [row for row in rows if not overlap.touches([tokenizer.decode(row.ids)])]
                skipped["found in what is to be avoided"] += len(rows) - len(clean)
                rows, skipped = clean, +skipped
            state.num_batches += 1
            state.skipped.update(skipped)
            pending, num_barren = pending + rows, 0 if rows else num_barren + 1
            if num_barren == PATIENCE:
                raise ValueError(f"{settings['model']} wrote no answer in {PATIENCE} batches: {dict(state.skipped)}")
            total = state.num_answer_tokens + _count(pending)
            elapsed = bar.tasks[task].elapsed or 1e-9
            bar.update(task, completed=total, speed=(total - start_tokens) / elapsed)
            if _count(pending) >= shard_tokens or total >= num_tokens:
                _save(folder, settings, state, pending, model.config.get_text_config().vocab_size)
                pending = []
        if pending:
            _save(folder, settings, state, pending, model.config.get_text_config().vocab_size)
    return read_manifest(folder)


def _tasks(
    tokenizer: PreTrainedTokenizerBase,
    plan: list[list[list[int]]] | None,
    settings: dict[str, Any],
    first: int,
    kept: KeptStates | None,
    depths: Sequence[int],
) -> Iterator[tuple[Any, ...]]:
    """What `_write_batch` takes, from batch number ``first`` on."""
    for number in itertools.count(first) if plan is None else range(first, len(plan)):
        yield tokenizer, settings, number, None if plan is None else plan[number], kept, depths


def _write_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: dict[str, Any],
    number: int,
    prompts: list[list[int]] | None,
    kept: KeptStates | None,
    depths: Sequence[int],
) -> tuple[list[Row], Counter[str]]:
    """Rows of batch ``number``, and how many were left out for what reason; prompts None: they are written first.

    Each turn of a conversation is a row of its own.
    """
    skipped: Counter[str] = Counter()
    target = Target(model, check=False)
    generator = torch.Generator(model.device).manual_seed(settings["seed"] * 1_000_003 + number)
    if prompts is None:
        prompts = first_turns(target, tokenizer, settings["batch_size"], generator, skipped)
    choices, rows = settings["temperatures"], list[Row]()
    for turn in range(settings.get("max_turns", 1)):
        if turn and prompts:
            prompts = next_turns(target, tokenizer, rows[-len(prompts) :], settings["max_prompt_tokens"], generator)
        if not prompts:
            break
        temperatures = [choices[(number + row + turn) % len(choices)] for row in range(len(prompts))]
        made = write_batch(
            target, prompts, torch.tensor(temperatures), settings["max_new_tokens"], generator, eos_ids(model), depths
        )
        answers = [
            answer for answer in zip(prompts, made, temperatures, strict=True) if not _is_empty(model, answer[1])
        ]
        skipped["empty answer"] += len(made) - len(answers)
        new = [Row(np.array(prompt + written.answer), len(prompt), heat) for prompt, written, heat in answers]
        if kept and new:
            held = zip(new, answers, strict=True)
            kept.keep(new, [TeacherStates.of(row, w.states, w.log_sums, w.argmaxes) for row, (_, w, _) in held])
        prompts = [prompt for prompt, _, _ in answers]
        rows += new
    return rows, +skipped


def _is_empty(model: PreTrainedModel, written: Written) -> bool:
    return all(token in eos_ids(model) for token in written.answer)


def _distinct(prompts: list[Prompt], avoid: Overlap | None, skipped: Counter[str]) -> list[Prompt]:
    """Each prompt once, and none that touches what is to be avoided."""
    found: dict[str, Prompt] = {}
    for prompt in prompts:
        if avoid is not None and avoid.touches(message["content"] for message in prompt.messages):
            skipped["found in what is to be avoided"] += 1
        elif found.setdefault(json.dumps(prompt.messages), prompt) is not prompt:
            skipped["twice"] += 1
    return list(found.values())


def content_hash(source: str | os.PathLike[str] | list[Prompt]) -> str:
    """sha256 of a file, of the records of a data set, or of prompts."""
    if isinstance(source, list):
        records = [asdict(prompt) for prompt in source]
    elif Path(source).is_file():
        return hashlib.sha256(Path(source).read_bytes()).hexdigest()
    else:
        records = [record for _, record in read_records(source)]
    return hashlib.sha256(json.dumps(records, sort_keys=True, default=str).encode()).hexdigest()


def _plan(
    prompts: list[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    max_prompt_tokens: int,
    seed: int,
    skipped: Counter[str],
) -> list[list[list[int]]]:
    """Batches of prompt ids: shuffled, every category spread evenly, alike lengths together within a window."""
    rng = np.random.default_rng(seed)
    fitting = []
    for prompt in prompts:
        ids = prompt_ids(tokenizer, prompt.messages)
        if len(ids) <= max_prompt_tokens:
            fitting.append((prompt.category, ids))
        else:
            skipped["over-long prompt"] += 1
    ordered = [fitting[i][1] for i in _stratified([category for category, _ in fitting], rng)]
    batches = []
    for begin in range(0, len(ordered), WINDOW * batch_size):
        window = sorted(ordered[begin : begin + WINDOW * batch_size], key=len)
        cut = [window[i : i + batch_size] for i in range(0, len(window), batch_size)]
        batches += [cut[i] for i in rng.permutation(len(cut))]
    return batches


def _stratified(categories: list[str], rng: np.random.Generator) -> list[int]:
    """A random order in which every category's members are spread evenly over the whole."""
    strata = defaultdict(list)
    for index, category in enumerate(categories):
        strata[category].append(index)
    keyed: list[tuple[float, int]] = []
    for category in sorted(strata):
        members = strata[category]
        keys = (rng.permutation(len(members)) + rng.random()) / len(members)
        keyed += zip(keys.tolist(), members, strict=True)
    return [index for _, index in sorted(keyed)]


def _count(rows: list[Row]) -> int:
    return sum(row.num_answer_tokens for row in rows)


def _save(folder: Path, settings: dict[str, Any], state: _Progress, rows: list[Row], vocab_size: int) -> None:
    name = f"shard-{len(state.shards):05d}.safetensors"
    digest = write_shard(folder / name, rows, vocab_size)
    state.shards.append({"file": name, "sha256": digest, "num_rows": len(rows), "num_answer_tokens": _count(rows)})
    state.num_rows += len(rows)
    state.num_answer_tokens += _count(rows)
    manifest = {"format_version": FORMAT_VERSION, "settings": settings, **vars(state)}
    write_atomically(folder / "manifest.json", json.dumps(manifest, indent=1).encode())


def _resume(folder: Path, settings: dict[str, Any]) -> _Progress | None:
    if not (folder / "manifest.json").is_file():
        return None
    manifest = read_manifest(folder)
    old = manifest["settings"]
    keys = [*settings, *(key for key in old if key not in settings)]
    changed = [f"{key}: {old.get(key)} -> {settings.get(key)}" for key in keys if old.get(key) != settings.get(key)]
    if changed:
        raise ValueError(f"{folder} holds data of other settings ({'; '.join(changed)}); choose another folder")
    state = {key: manifest[key] for key in ("shards", "num_batches", "num_answer_tokens", "num_rows")}
    return _Progress(**state, skipped=Counter(manifest["skipped"]))


def _bar() -> Progress:
    speed = TextColumn("{task.fields[speed]:.0f} tokens/s")
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), speed,
        TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True),
    )  # fmt: skip
