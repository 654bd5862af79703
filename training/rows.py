"""The rows of a run, written where they are not there yet, and where the target's states of them are kept."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.storage import fingerprint
from selfspec.target import Target
from selfspec.training.config import DataConfig, TrainConfig
from selfspec.training.data import Prompt, Row, load_shards, num_rows_for, read_manifest, rows_from_jsonl
from selfspec.training.generate_data import content_hash, write_data
from selfspec.training.kept_states import KeptStates
from selfspec.training.overlap import Overlap
from selfspec.training.own_tasks import own_tasks
from selfspec.training.states import kept_depths
from selfspec.training.workers import num_workers_for

OWN_TASKS = "own-tasks"  # in the folder of the rows that they are made of


def load_rows(config: TrainConfig, target: Target, tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[Row]:
    """The rows that the config asks for, written where they are not there yet, with the states that its exits need."""
    data = config.data
    if data.jsonl:
        given = rows_from_jsonl(data.jsonl, tokenizer, data.max_row_tokens, avoid=Overlap.of_files(data.avoid))
        return _first(given, data.num_tokens)
    shards = _shards(config, folder)
    write = partial(_write, config, target, tokenizer, folder)
    if _num_written(shards) < data.num_tokens:
        write(
            shards, data.num_tokens, data.prompts, batch_size=data.batch_size,
            max_prompt_tokens=data.max_prompt_tokens, max_turns=data.max_turns,
        )  # fmt: skip
    written = load_shards(shards)
    rows = _first([row for row in written if len(row.ids) <= data.max_row_tokens], data.num_tokens)
    if not data.own_task_tokens:
        return rows
    sources = _first(written, data.num_tokens)  # however many more are written later
    tasks = own_tasks(sources, tokenizer, len(sources), read_manifest(shards)["settings"]["seed"])
    own = shards / OWN_TASKS
    if _num_written(own) < data.own_task_tokens or _prompts_hash(own) != content_hash(tasks):  # others are refused
        longest = data.own_task_prompt_tokens
        write(own, data.own_task_tokens, tasks, batch_size=_batch_size_for(longest, data), max_prompt_tokens=longest)
    return interleave(rows, _first(load_shards(own), data.own_task_tokens))


def _write(
    config: TrainConfig,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    shards: Path,
    num_tokens: int,
    prompts: str | list[Prompt] | None,
    **settings: int,
) -> None:
    """`write_data` with what all rows of the run have in common."""
    data, heads = config.data, [run.exit_config(target.num_layers, None) for run in config.each_exit()]
    write_data(
        target.base, tokenizer, shards, num_tokens, prompts, data.temperatures, seed=config.seed,
        num_workers=num_workers_for(target.base, config.workers),
        kept=kept_states(config, target, folder) if config.keep_states and not config.layerskip else None,
        max_new_tokens=data.max_new_tokens, avoid=data.avoid,
        depths=sorted({depth for head in heads for depth in kept_depths(target.num_layers, head)}), **settings,
    )  # fmt: skip


def interleave(*parts: Sequence[Row]) -> list[Row]:
    """The rows of all ``parts``, each part's in their order and spread evenly over the whole."""
    placed = [((i + 0.5) / len(part), row) for part in parts for i, row in enumerate(part)]
    return [row for _, row in sorted(placed, key=lambda pair: pair[0])]


def describe_data(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """Where the rows came from, for the sidecar: hash of the jsonl, or the settings that generated the shards.

    Of tasks made of own answers, what is other there.
    """
    if config.data.jsonl:
        return {"jsonl_sha256": content_hash(config.data.jsonl)}
    shards = _shards(config, folder)
    settings: dict[str, Any] = read_manifest(shards)["settings"]
    if not config.data.own_task_tokens:
        return settings
    own = read_manifest(shards / OWN_TASKS)["settings"]
    return {**settings, "own_tasks": {key: own[key] for key in own if key == "kind" or own[key] != settings.get(key)}}


def kept_states(config: TrainConfig, target: Target, folder: Path) -> KeptStates:
    """Where the run keeps the target's states."""
    place = Path(config.states or folder / "states")
    return KeptStates(place, fingerprint(target.base), config.state_dtype == "float8")


def _shards(config: TrainConfig, folder: Path) -> Path:
    return Path(config.data.folder) if config.data.folder else folder / "data"


def _num_written(shards: Path) -> int:
    """Answer tokens that are there."""
    return int(read_manifest(shards)["num_answer_tokens"]) if (shards / "manifest.json").is_file() else 0


def _prompts_hash(shards: Path) -> str | None:
    return read_manifest(shards)["settings"]["prompts_sha256"]


def _batch_size_for(max_prompt_tokens: int, data: DataConfig) -> int:
    """Prompts that fill as many slots of a cache, hence as much memory, as a batch of the others."""
    slots = data.batch_size * (data.max_prompt_tokens + data.max_new_tokens)
    return max(1, slots // (max_prompt_tokens + data.max_new_tokens))


def _first(rows: Sequence[Row], num_tokens: int) -> list[Row]:
    """The first of ``rows``, as many as reach ``num_tokens`` answer tokens."""
    return list(rows[: num_rows_for([row.num_answer_tokens for row in rows], num_tokens)])
