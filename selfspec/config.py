"""Settings files: one YAML file is one run, by path or by bare name of those shipped, with dotted overrides on top."""

import difflib
import importlib.resources
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

Config = TypeVar("Config", bound=BaseModel)


def load_config(
    kind: type[Config], group: str, source: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Read a YAML file (a path, or a bare name in configs/``group``), apply ``key.key=value`` overrides, check all.

    Values of overrides are YAML. Raises FileNotFoundError naming the bare names there are, ValueError naming each
    wrong key or value.
    """
    values = {} if source is None else _read(source, group)
    for override in overrides:
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
        return kind(**values)
    except ValidationError as error:
        raise ValueError("; ".join(_explain(kind, problem) for problem in error.errors())) from None


def config_names(group: str) -> list[str]:
    """Bare names of the configs of a group ("train", "eval") that come with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in _packaged(group).iterdir() if p.name.endswith(".yaml"))


def _packaged(group: str) -> Any:
    return importlib.resources.files("selfspec.configs") / group


def _read(source: str | os.PathLike[str], group: str) -> dict[str, Any]:
    path: Any = Path(source)
    if not path.is_file():
        path = _packaged(group) / f"{source}.yaml"
    if not path.is_file():
        names = ", ".join(config_names(group))
        raise FileNotFoundError(f"no {group} config {str(source)!r}: pass a file or one of {names}")
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


def _explain(kind: type[BaseModel], problem: Any) -> str:
    place = problem["loc"]
    key = ".".join(map(str, place))
    if problem["type"] != "extra_forbidden":
        return f"{key}: {problem['msg'].removeprefix('Value error, ')} (got {problem['input']!r})"
    known: list[str] = list(kind.model_fields)
    group = kind.model_fields[place[0]].annotation if len(place) > 1 and place[0] in known else None
    if isinstance(group, type) and issubclass(group, BaseModel):
        known = list(group.model_fields)
    close = difflib.get_close_matches(str(place[-1]), known, n=1)
    return f"unknown setting {key!r}" + (f", did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}")
