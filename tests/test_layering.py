"""Floors import only downward: read from the syntax trees, so that an import inside a function counts too."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "selfspec": "selfspec",
    "kernels": "selfspec.kernels",
    "training": "selfspec.training",
    "eval": "selfspec.eval",
    "tests": "tests",
}
FLOOR_2 = ("selfspec.training", "selfspec.eval")
CLI = tuple(f"selfspec.{n}" for n in ("cli", "cli_generate", "cli_kernels", "cli_measure", "cli_options", "__main__"))


@dataclass(frozen=True)
class Import:
    importer: str  # dotted name of the importing module
    imported: str  # dotted, absolute; `from a import b` gives a.b
    line: int
    is_lazy: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def is_under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def imported_names(node: ast.AST, package: str) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            parents = package.split(".")
            base = parents[: len(parents) - level + 1] if level else []
            return [".".join([*base, *([module] if module else []), alias.name]) for alias in names]
        case ast.Call(func=ast.Name(id=call) | ast.Attribute(attr=call), args=[ast.Constant(value=str(name)), *_]):
            return [name] if call in ("import_module", "__import__") else []
    return []


def walk(node: ast.AST, is_lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, is_lazy
        yield from walk(child, is_lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def imports_of(root: Path) -> Iterator[Import]:
    for folder, package_name in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            module = ".".join([package_name, *parts]).removesuffix(".__init__")
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            for node, is_lazy in walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
                for name in imported_names(node, package):
                    yield Import(module, name, getattr(node, "lineno", 0), is_lazy)


def broken_rule(found: Import) -> str | None:
    """The rule that an import breaks, None if it breaks none."""
    importer, imported = found.importer, found.imported
    is_cli = is_under(importer, *CLI)
    is_core = is_under(importer, "selfspec") and not is_under(importer, "selfspec.kernels", *FLOOR_2) and not is_cli
    if imported.split(".")[0] in ("kernels", "training", "eval"):
        return "bare name"
    if is_under(importer, "selfspec.kernels") and is_under(imported, "selfspec"):
        return None if is_under(imported, "selfspec.kernels") else "kernels import nothing of selfspec"
    if is_core and is_under(imported, *FLOOR_2):
        return "the core imports neither training nor eval"
    if is_under(importer, "selfspec.eval") and is_under(imported, "selfspec.training"):
        return "eval never imports training"
    if is_under(importer, "selfspec.training") and is_under(imported, "selfspec.eval"):
        return "training never imports eval"
    if is_cli and is_under(imported, *FLOOR_2) and not found.is_lazy:
        return "the command line imports training and eval inside functions only"
    if is_under(importer, "selfspec") and not is_cli and is_under(imported, *CLI):
        return "nothing imports the command line"
    return None


def violations(root: Path) -> list[str]:
    return [f"{found} ({rule})" for found in imports_of(root) if (rule := broken_rule(found))]


def test_floors_import_only_downward():
    assert violations(CHECKOUT) == []


def test_the_checkout_was_read():
    assert any(found.importer == "selfspec" for found in imports_of(CHECKOUT))


@pytest.mark.parametrize(
    ("path", "code", "rule"),
    [
        ("kernels/a.py", "from selfspec.target import Target", "kernels import nothing"),
        ("kernels/a.py", "from .. import target", "kernels import nothing"),
        ("selfspec/model.py", "def f():\n    from selfspec.training.run import train", "the core imports"),
        ("selfspec/model.py", "from selfspec import eval", "the core imports"),
        ("selfspec/model.py", "import importlib\nimportlib.import_module('selfspec.training.run')", "the core imports"),
        ("selfspec/__init__.py", "from .training import run", "the core imports"),
        ("eval/run.py", "from selfspec.training.data import tokens", "eval never imports"),
        ("training/run.py", "import selfspec.eval.run", "training never imports"),
        ("selfspec/cli.py", "from selfspec.eval.run import run", "inside functions only"),
        ("selfspec/cli.py", "if True:\n    import selfspec.training.run", "inside functions only"),
        ("eval/run.py", "from selfspec.cli import app", "nothing imports the command line"),
        ("selfspec/verify.py", "import kernels.dispatch", "bare name"),
        ("tests/test_a.py", "def f():\n    from training.run import train", "bare name"),
        ("eval/run.py", "from eval import tasks", "bare name"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, path: str, code: str, rule: str):
    (tmp_path / path).parent.mkdir()
    (tmp_path / path).write_text(code)
    assert [rule in violation for violation in violations(tmp_path)] == [True]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("kernels/dispatch.py", "from . import attention_reference\nimport selfspec.kernels.attention_triton"),
        ("selfspec/cli.py", "def f():\n    from selfspec.training.run import train\n    import selfspec.eval.run"),
        ("selfspec/__main__.py", "from selfspec.cli import main"),
        ("training/run.py", "from selfspec.target import Target\nfrom selfspec.kernels.dispatch import attention"),
        ("selfspec/evaluate.py", "from selfspec.evaluation import training_data"),
    ],
)
def test_allowed_import_passes(tmp_path: Path, path: str, code: str):
    (tmp_path / path).parent.mkdir()
    (tmp_path / path).write_text(code)
    assert violations(tmp_path) == []
