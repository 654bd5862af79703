"""Settings of one evaluation run."""

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from selfspec.config import load_config


class MethodSpec(BaseModel):
    """One column of the comparison: a method of `METHODS` with options, under a name of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    name: str
    options: dict[str, Any] = {}


class EvalConfig(BaseModel):
    """One run of `evaluate`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None  # hub id or folder; None: the default model with its shipped exit
    revision: str | None = None
    exits: str | tuple[int, ...] | None = None  # folder, hub id, or layers for untrained exits
    dtype: str | None = None
    device: str | None = None
    threads: int | None = Field(default=1, ge=1)  # None: torch's own choice
    tasks: tuple[str, ...] = ("quick",)  # a name of TASKS, a file of questions, or NAME:FILE, NAME:DATASET-ID
    methods: tuple[MethodSpec, ...] = ()  # none: a first choice, see `methods.DEFAULT`
    limit: int | None = Field(default=None, ge=1)  # questions of each category; None: all
    max_turns: int = Field(default=1, ge=1)  # of a conversation
    max_new_tokens: int = Field(default=64, ge=2)
    temperatures: tuple[float, ...] = (0.0,)
    template: str = Field(default="chat", pattern="^(chat|plain)$")
    seed: int = 0
    engine_rounds: int = Field(default=0, ge=0)  # interleaved runs that time passes and plain decoding by context
    bootstrap: int = Field(default=2000, ge=100)  # resamples of the confidence intervals
    output: str = "runs/eval"  # folder of results.json

    @field_validator("methods", mode="before")
    @classmethod
    def _named(cls, values: Any) -> Any:
        """A method may be written as its name alone, or as {method, name, option: value, ...}."""
        if not isinstance(values, list | tuple):
            return values
        specs = []
        for value in values:
            if isinstance(value, str):
                value = {"method": value}
            if isinstance(value, dict) and "options" not in value:
                known = {key: value[key] for key in ("method", "name") if key in value}
                rest = {key: held for key, held in value.items() if key not in known}
                value = {"name": known.get("method"), **known, "options": rest}
            specs.append(value)
        return specs

    @field_validator("methods")
    @classmethod
    def _distinct(cls, specs: tuple[MethodSpec, ...]) -> tuple[MethodSpec, ...]:
        names = [spec.name for spec in specs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two methods are named {', '.join(twice)}; give each a name")
        return specs

    @field_validator("tasks", "temperatures", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | int | float) else value

    @field_validator("temperatures")
    @classmethod
    def _not_negative(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if not values or min(values) < 0:
            raise ValueError("temperatures must be >= 0, and at least one")
        return values


def load_eval_config(source: str | os.PathLike[str] | None = None, overrides: list[str] | None = None) -> EvalConfig:
    """The settings of an evaluation; see `load_config`."""
    return load_config(EvalConfig, "eval", source, overrides or [])
