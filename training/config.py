"""Settings of one training run: a YAML file (by path, or by bare name from configs/train) and dotted overrides."""

import difflib
import importlib.resources
import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from selfspec.exits import ExitConfig
from selfspec.storage import NAME


class DataConfig(BaseModel):
    """Where the training rows come from: written by the target itself (default), or a jsonl with answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str | None = None  # shards of self-written rows; None: OUTPUT/data
    num_tokens: int = Field(default=300_000, ge=1)  # answer tokens
    prompts: str | None = None  # jsonl of prompts to answer; None: the target writes those too
    temperatures: tuple[float, ...] = (0.0, 0.8)
    jsonl: str | None = None  # rows that already have answers
    max_row_tokens: int = Field(default=512, ge=2)


class TrainConfig(BaseModel):
    """One run of `train_exits`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None  # hub id or folder; None: the default model
    revision: str | None = None
    exit: str = Field(default="exit", pattern=f"^{NAME.pattern}$")  # its name, and its folder's
    exit_layer: int = Field(default=1, ge=0)
    recall_layers: tuple[int, ...] | None = None  # None: a third, two thirds and all of the layers
    num_steps: int = Field(default=3, ge=1)
    draft_vocab_size: int | None = Field(default=8192, ge=1)  # None: the whole vocabulary
    draft_len: int | None = Field(default=None, ge=1)  # None: chosen with min_confidence from costs measured at the end
    min_confidence: float | None = Field(default=None, ge=0, le=1)
    lora_rank: int = Field(default=64, ge=1)
    lora_alpha: int = Field(default=64, ge=1)
    data: DataConfig = DataConfig()
    output: str = "runs/exit"
    max_steps: int | None = Field(default=None, ge=0)  # 0: stop after the closed-form start
    max_minutes: float | None = Field(default=None, gt=0)  # of training; the schedule then follows the clock
    epochs: float = Field(default=8.0, gt=0)
    batch_tokens: int = Field(default=2048, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)  # LoRA and norm
    bridge_learning_rate: float = Field(default=5e-4, gt=0)
    warmup_ratio: float = Field(default=0.02, ge=0, lt=1)
    step_decay: float = Field(default=0.8, gt=0, le=1)  # loss weight of draft step j is step_decay ** (j - 1)
    seed: int = 0
    eval_fraction: float = Field(default=0.05, gt=0, lt=1)
    eval_tokens: int = Field(default=4000, ge=1)  # held-out answer tokens that choose the best state; others judge it
    eval_minutes: float = Field(default=2.0, gt=0)  # how often the held-out rows are measured and the best state saved
    save_steps: int = Field(default=100, ge=1)  # checkpoints, from which the same run goes on
    ridge: float = Field(default=1e-3, gt=0)
    ridge_tokens: int = Field(default=100_000, ge=1)  # that the closed-form start is fitted on
    states: str | None = None  # folder of kept teacher states, to be shared by runs; None: OUTPUT/states

    def exit_config(self, num_layers: int, draft_vocab: tuple[int, ...] | None) -> ExitConfig:
        """The head that this run trains, for a target of ``num_layers`` layers."""
        recall = self.recall_layers
        if recall is None:
            recall = tuple(sorted({max(1, round(num_layers * i / 3)) for i in (1, 2, 3)} | {num_layers}))
            recall = tuple(layer for layer in recall if layer >= self.exit_layer)
        return ExitConfig(
            exit_layer=self.exit_layer, recall_layers=recall, num_steps=self.num_steps, draft_vocab=draft_vocab,
            lora_rank=self.lora_rank, lora_alpha=self.lora_alpha, draft_len=self.draft_len or 2,
            min_confidence=self.min_confidence or 0.0,
        )  # fmt: skip


def load_train_config(source: str | os.PathLike[str] | None = None, overrides: list[str] | None = None) -> TrainConfig:
    """Read a YAML file (path or bare name), apply ``key.key=value`` overrides (values are YAML), check everything.

    Raises FileNotFoundError naming the bare names there are, ValueError naming each wrong key or value.
    """
    values = {} if source is None else _read(source)
    for override in overrides or []:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ValueError(f"override {override!r} is not of the form key=value")
        place = values
        *parents, last = key.split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"override {override!r}: {parent} is no group of settings")
        place[last] = _number(_parse(text, f"override {override!r}"))
    try:
        return TrainConfig(**values)
    except ValidationError as error:
        raise ValueError("; ".join(_explain(problem) for problem in error.errors())) from None


def config_names() -> list[str]:
    """Bare names of the configs that come with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in _packaged().iterdir() if p.name.endswith(".yaml"))


def _packaged() -> Any:
    return importlib.resources.files("selfspec.configs") / "train"


def _read(source: str | os.PathLike[str]) -> dict[str, Any]:
    path: Any = Path(source)
    if not path.is_file():
        path = _packaged() / f"{source}.yaml"
    if not path.is_file():
        names = ", ".join(config_names())
        raise FileNotFoundError(f"no training config {str(source)!r}: pass a file or one of {names}")
    values = _parse(path.read_text(encoding="utf-8"), str(source)) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{source}: expected settings, got {type(values).__name__}")
    return values


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not valid YAML ({' '.join(str(error).split())})") from error


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 (without a dot) as text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _explain(problem: Any) -> str:
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] != "extra_forbidden":
        return f"{key}: {problem['msg']} (got {problem['input']!r})"
    fields = (DataConfig if problem["loc"][0] == "data" else TrainConfig).model_fields
    close = difflib.get_close_matches(str(problem["loc"][-1]), fields, n=1)
    return f"unknown setting {key!r}" + (f", did you mean {close[0]!r}?" if close else f"; known: {', '.join(fields)}")
