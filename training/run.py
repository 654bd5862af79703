"""`train_exits`: data, teacher pass with the closed-form bridge, training, evaluation, a saved exit."""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import PeftModel
from transformers import PreTrainedTokenizerBase

from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.files import LOCK_FILE, locked, write_atomically
from selfspec.pretrained import load_target_model
from selfspec.provenance import versions
from selfspec.storage import load_exits, save_exit
from selfspec.target import Target
from selfspec.training.closed_form import start_from_chance, start_from_ridge
from selfspec.training.confidence import fit_confidence
from selfspec.training.config import TrainConfig
from selfspec.training.data import Row, num_rows_for
from selfspec.training.fresh_states import FreshStates
from selfspec.training.keep_best import KeepBest
from selfspec.training.kept_states import collect_cached
from selfspec.training.layerskip import train_copy
from selfspec.training.metrics import Metrics, calibration_error
from selfspec.training.noise_scale import fit_noise_scale
from selfspec.training.plan import choose, measure_costs, predict
from selfspec.training.ranks import is_main, join, main_first, num_processes
from selfspec.training.rows import describe_data, kept_states, load_rows
from selfspec.training.scores import evaluate, score_rows
from selfspec.training.states import RowStates, choose_vocab
from selfspec.training.student import Student
from selfspec.training.trainer import ExitTrainer
from selfspec.training.workers import num_workers_for

logger = logging.getLogger(__name__)

RUN_FILE = "run.yaml"
RECORDED_STEPS = 4  # draft steps of a chain whose acceptance the sidecar has, for machines where drafting far pays


@dataclass(frozen=True)
class TrainedExit:
    """What a run leaves in memory."""

    exit_head: ExitHead
    metrics: Metrics
    at_start: Metrics  # before the first gradient step


def train_exits(config: TrainConfig) -> Path:
    """Train what ``config`` says; returns the folder of the saved exit, OUTPUT/NAME (OUTPUT, where there are several).

    Raises FileExistsError when the output folder holds another run, BlockingIOError while one is at work there,
    ValueError for data or layers that do not fit.
    """
    folder = claim(config)
    dtype = config.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    model, tokenizer = load_target_model(config.model, config.revision, dtype=dtype, **config.load)
    target = Target(model)
    check_processes(config, target)
    runs = config.each_exit()
    for run in runs:
        run.exit_config(target.num_layers, None).check(target.num_layers)
        load_start(target, run)
    join(is_cpu=target.device.type == "cpu")
    with locked(folder) if is_main() else contextlib.nullcontext():
        with main_first(target.is_split):
            if is_main():
                record(config, folder)
            rows = load_rows(config, target, tokenizer, folder)
        if config.layerskip is not None:
            return train_copy(model, tokenizer, rows, config, folder)
        for run in runs:
            if len(runs) > 1:
                logger.info("exit %s: layer %d, %s", run.exit, run.exit_layer, run.form)
            _train_one(run, target, rows, folder, folder if run is runs[0] else folder / "runs" / run.exit, tokenizer)
    return folder / config.exit if len(runs) == 1 else folder


def check_processes(config: TrainConfig, target: Target) -> None:
    """Raise ValueError where the processes cannot share the work in the way that is asked for."""
    if target.is_split and (config.fsdp or config.layerskip):
        raise ValueError("a target that several processes hold together trains exits, without fsdp and layerskip")
    size = getattr(getattr(target.config, "distributed_config", None), "tp_size", None)
    if target.is_split and size not in (None, num_processes()):
        raise ValueError(
            f"tp_size is {size} of {num_processes()} processes: all of them have to hold the target together"
        )


def _train_one(
    config: TrainConfig,
    target: Target,
    rows: Sequence[Row],
    output: Path,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """One exit, saved in ``output``; checkpoints and logs go to ``folder``, states lie in ``output``."""

    def write(head: ExitHead, metrics: Metrics, training: dict[str, Any]) -> None:
        about = {**training, "data": describe_data(config, output)}
        save_exit(head, target, output / config.exit, tokenizer, about, metrics.flat())

    folder.mkdir(parents=True, exist_ok=True)
    config = config.model_copy(update={"states": config.states or str(output / "states")})
    train_on_rows(target, rows, config, folder, len(tokenizer), write, tokenizer.decode)


def train_on_rows(
    target: Target,
    rows: Sequence[Row],
    config: TrainConfig,
    folder: Path,
    num_tokens: int,
    write: Callable[[ExitHead, Metrics, dict[str, Any]], None] | None = None,
    decode: Callable[[list[int]], str] | None = None,
) -> TrainedExit:
    """The run after the data. ``num_tokens`` is the tokenizer's size, ``write(head, metrics, training)`` saves.

    With ``decode``, token ids to text, TensorBoard shows a held-out answer with its accepted drafts.
    """
    train_rows, held_rows = split(rows, config)
    begun = load_start(target, config)
    vocab = (
        begun.config.draft_vocab
        if begun is not None
        else choose_vocab(train_rows, config.draft_vocab_size, num_tokens, target.vocab_size)
    )
    exit_config = config.exit_config(target.num_layers, vocab)
    kept = kept_states(config, target, folder)
    workers = num_workers_for(target.base, config.workers)
    with main_first(target.is_split):  # what it makes, the others find
        held_out = collect_cached(target, kept, exit_config, held_rows, num_workers=workers)
        states: Sequence[RowStates] = (
            collect_cached(target, kept, exit_config, train_rows, num_workers=workers)
            if config.keep_states
            else FreshStates(target, exit_config, train_rows)
        )
    choosing, judging = halve(held_out, config.eval_tokens)
    torch.manual_seed(config.seed)  # the same start in every process, whatever each has done before
    adapter = build_adapter(target, exit_config, torch.float32)
    if config.start == "random":
        start_from_chance(adapter, config.seed)
    elif begun is None or grown(begun.config, exit_config):
        start_from_ridge(target, adapter, exit_config, states, choosing, config.ridge, config.ridge_tokens)
    if begun is not None:
        assert begun.adapter is not None  # it was loaded
        own, had = adapter.state_dict(), begun.adapter.state_dict()
        adapter.load_state_dict({name: had.get(name, tensor) for name, tensor in own.items()})
    student = Student(target, adapter, exit_config)
    summary: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "num_rows": len(train_rows),
        "num_answer_tokens": sum(row.num_answer_tokens for row in train_rows),
        "num_held_out_rows": len(held_rows),
        "num_held_out_answer_tokens": sum(row.num_answer_tokens for row in held_rows),
        "num_choosing_rows": len(choosing),  # held-out rows that chose the state; the metrics are of the others
        "draft_vocab_coverage": round(coverage(held_rows, vocab), 4),
    }
    if begun is not None:
        had = begun.metadata["training"]
        summary["start"] = {key: had[key] for key in ("num_rows", "num_answer_tokens", "start") if key in had} | {
            "weights_sha256": begun.metadata["weights_sha256"]
        }
    logger.info("%s", {k: v for k, v in summary.items() if k != "config"})

    def save(metrics: Metrics, is_last: bool = False) -> None:
        if write is None or (is_shared and not is_last):  # shared weights are put together at the end
            return
        if is_main() or target.is_split:  # a head takes weights of the target, which all processes hold together
            head = build_head(target, config, exit_config, adapter)
            head.metadata["base"] = {"fingerprints": [kept.label]}
            if is_main():
                write(head, metrics, summary)

    is_shared = config.fsdp and num_processes() > 1
    measures = config.draft_len is None and (is_main() or target.is_split)
    costs = measure_costs(target, exit_config) if measures else None
    if costs is not None and config.draft_width is not None:
        costs = replace(costs, min_branch=None)
    keeper = KeepBest(student, choosing, config, folder, save, costs, decode)
    keeper.begin()
    at_start = evaluate(student, judging, config)
    summary["at_start"] = at_start.flat()
    if config.max_steps != 0:
        facts = {"rows": digest(train_rows), "processes": num_processes(), "versions": versions()}
        trainer = ExitTrainer(student, states, config, folder, facts)
        trainer.add_callback(keeper)
        keeper.trainer, keeper.began = trainer, trainer.began
        logger.info("training: %d steps of %d tokens", trainer.num_steps_planned, config.batch_tokens)
        trainer.go_on()
        summary["num_steps"] = trainer.state.global_step
        keeper.measure(trainer.state.global_step)
        if is_shared:
            adapter = build_adapter(target, exit_config, torch.float32)
            student = Student(target, adapter, exit_config)
        student.load_trained_state(keeper.best_state)
    summary["confidence_cross_entropy"] = round(fit_confidence(student, states, choosing, config), 4)
    exit_config = exit_config.model_copy(update={"noise_scale": fit_noise_scale(student, choosing, config)})
    judged = score_rows(student, judging, config)
    metrics = replace(judged.metrics(), calibration_error=calibration_error(judged.greedy_rows))
    if student.is_chain and config.num_steps < RECORDED_STEPS:  # it drafts on behind the steps it was trained for
        further = score_rows(student, judging, config, RECORDED_STEPS).metrics()
        metrics = replace(metrics, acceptance=further.acceptance, tau=further.tau)
    if costs is not None:
        plan = choose(score_rows(student, choosing, config).greedy_rows, costs)
        chosen = {"draft_len": plan.draft_len, "min_confidence": plan.min_confidence}
        chosen |= {"draft_width": plan.draft_width} if config.draft_width is None else {}
        exit_config = exit_config.model_copy(update=chosen)
        speedup = predict(judged.greedy_rows, costs, plan.draft_len, plan.min_confidence, plan.draft_width)
        metrics = replace(metrics, speedup=speedup)
        summary["costs"] = {**asdict(costs), "threads": torch.get_num_threads()}
        logger.info("drafting: %s", {**asdict(plan), "held_out_speedup": round(speedup, 3)})
    save(metrics, is_last=True)
    if is_main():
        (folder / "metrics.json").write_text(json.dumps({"metrics": metrics.flat(), **summary}, indent=1) + "\n")
    return TrainedExit(build_head(target, config, exit_config, adapter), metrics, at_start)


def load_start(target: Target, config: TrainConfig) -> ExitHead | None:
    """The trained exit that ``config`` goes on from, with its drafted vocabulary; None where it begins anew.

    It may be made for another form or for fewer steps: what it has not yet starts from the closed form. Raises
    ValueError where it has another shape than the settings say, OSError where it cannot be had.
    """
    if config.trained_start is None:
        return None
    found = load_exits(target, config.trained_start)
    if len(found) > 1:
        raise ValueError(f"start: {config.trained_start} holds several exits, name one: {', '.join(found)}")
    (head,) = found.values()
    wanted, had = config.exit_config(target.num_layers, head.config.draft_vocab), head.config
    chosen = {
        "draft_len",
        "min_confidence",
        "min_accepted",
        "draft_width",
        "min_branch",
        "noise_scale",
    }  # after training
    differing = set(_differing(had, wanted)) - chosen - grown(had, wanted)
    if differing:
        changed = (f"{name} {getattr(had, name)}, not {getattr(wanted, name)}" for name in sorted(differing))
        raise ValueError(f"start: {config.trained_start} has {'; '.join(changed)}")
    return head


def grown(had: ExitConfig, wanted: ExitConfig) -> set[str]:
    """In what an exit would be made larger, or made to draft otherwise; nothing where it would lose a part."""
    loses = had.correction_rank > 0 and bool(_differing(had, wanted, "correction", "correction_rank"))
    loses = loses or (had.form == "recursive" and wanted.form != "recursive")  # the map that it feeds itself with
    if wanted.num_steps < had.num_steps or wanted.num_maps < had.num_maps or loses:
        return set()
    return set(_differing(had, wanted, "form", "num_steps", "correction", "correction_rank"))


def _differing(had: ExitConfig, wanted: ExitConfig, *among: str) -> list[str]:
    return [name for name in among or type(had).model_fields if getattr(wanted, name) != getattr(had, name)]


def build_head(target: Target, config: TrainConfig, exit_config: ExitConfig, adapter: PeftModel) -> ExitHead:
    """An `ExitHead` over the adapter as it stands now, in the target's dtype."""
    if target.dtype != torch.float32:
        trained, adapter = adapter, build_adapter(target, exit_config)
        adapter.load_state_dict(trained.state_dict())
    return ExitHead(target, config.exit, exit_config, adapter, {"training": {}, "metrics": {}})


def split(rows: Sequence[Row], config: TrainConfig) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, by a hash of the prompt: alike prompts stay together, more data moves no row.

    Where that leaves a side empty (few rows), the last row is held out.
    """
    train: list[Row] = []
    held: list[Row] = []
    for row in rows:
        digest = hashlib.sha256(f"{config.seed}".encode() + row.ids[: row.answer_start].tobytes()).digest()
        (held if int.from_bytes(digest[:4], "big") < config.eval_fraction * 2**32 else train).append(row)
    if train and held:
        return train, held
    if len(rows) < 2:
        raise ValueError(f"{len(rows)} rows are too few: at least two are needed, one of them held out")
    return list(rows[:-1]), list(rows[-1:])


def halve(held_out: Sequence[RowStates], max_tokens: int) -> tuple[Sequence[RowStates], Sequence[RowStates]]:
    """Held-out rows that choose the best state (the first half, at most ``max_tokens`` answer tokens), and the others,
    which no choice has seen and the reported metrics come from. A single row does both.
    """
    if len(held_out) < 2:
        return held_out, held_out
    count = min(num_rows_for([len(row.argmaxes) for row in held_out], max_tokens), len(held_out) // 2)
    return held_out[:count], held_out[count:]


def coverage(rows: Sequence[Row], vocab: tuple[int, ...] | None) -> float:
    """Share of answer tokens that the drafted vocabulary contains."""
    if vocab is None:
        return 1.0
    known = set(vocab)
    tokens = [t for row in rows for t in row.ids[row.answer_start :].tolist()]
    return sum(t in known for t in tokens) / max(len(tokens), 1)


def digest(rows: Sequence[Row]) -> str:
    """What tells the training rows of a run."""
    made = hashlib.sha256()
    for row in rows:
        made.update(str(row.answer_start).encode() + row.ids.tobytes())
    return made.hexdigest()[:16]


def claim(config: TrainConfig) -> Path:
    """Check that the run's folder is new, or holds a run of the same settings; how long to train may differ.

    Raises OSError, in one line, where the folder could not be written or is only a link.
    """
    folder, settings = Path(config.output), config.model_dump(mode="json")
    path = folder / RUN_FILE
    if folder.is_symlink():
        raise FileExistsError(f"{folder} is a link; name the folder itself")
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(f"cannot write {folder}: {nearest} is {'read-only' if nearest.is_dir() else 'a file'}")
    if folder.exists() and any(p.name not in ("data", "states", LOCK_FILE) for p in folder.iterdir()):
        old = yaml.safe_load(path.read_text()) if path.is_file() else None
        if old is None:
            raise FileExistsError(f"{folder} is not empty and holds no training run; choose another output")
        length = {"max_steps", "max_minutes", "epochs", "workers", "force"}
        differing = [k for k in settings if k not in length and old.get(k) != settings[k]]
        changed = [f"{k} ({old.get(k)} -> {settings[k]})" for k in differing]
        if changed and not config.force:
            remedy = "choose another output, or force=true"
            raise FileExistsError(f"{folder} holds a run with other {', '.join(changed)}: {remedy}")
    return folder


def record(config: TrainConfig, folder: Path) -> None:
    """Write the run's settings into its folder, which belongs to this run from now on."""
    write_atomically(folder / RUN_FILE, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).encode())
