"""What a wheel carries, and that the folder kernels/ is never taken for Hugging Face's package of that name."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
FOLDERS = ("selfspec", "kernels", "training", "eval", "configs")
CODE_FOLDERS = ("selfspec", "kernels", "training", "eval")


def run(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def expected_files(root: Path) -> set[str]:
    """Names inside the wheel of everything that must be in it: modules, templates, configs, the shipped exits."""
    modules = {
        path for folder in CODE_FOLDERS for kind in ("py", "html") for path in (root / folder).rglob(f"*.{kind}")
    }
    exits = {path for path in (root / "selfspec" / "exits_data").rglob("*") if path.is_file()}
    names = {path.relative_to(root).as_posix() for path in modules | exits | set((root / "configs").rglob("*.yaml"))}
    return {name if name.startswith("selfspec/") else f"selfspec/{name}" for name in names} | {"selfspec/py.typed"}


def wheel_problems(names: set[str], expected: set[str]) -> list[str]:
    inside = {name for name in names if ".dist-info/" not in name}
    strangers = {name for name in inside if not name.startswith("selfspec/")}
    return [f"not under selfspec/: {name}" for name in sorted(strangers)] + [
        f"missing: {name}" for name in sorted(expected - inside)
    ]


def layout_problems(root: Path) -> list[str]:
    """Files that would break the folder map or hide an installed package."""
    forbidden = [root / "conftest.py", *(root / folder / "__init__.py" for folder in (".", "kernels", "tests"))]
    sources = [path for folder in CODE_FOLDERS for path in (root / folder).rglob("*.py")]
    hiding = [path for path in [*sources, *root.glob("*.py")] if path.name in ("triton.py", "datasets.py")]
    return sorted(path.relative_to(root).as_posix() for path in [*forbidden, *hiding] if path.is_file())


def kernels_taken_from(root: Path) -> str | None:
    """The file that `import kernels` would run if it lies in `root`, None otherwise."""
    code = "from importlib.util import find_spec as f; s = f('kernels'); print(s.origin or '' if s else '')"
    origin = run(code, cwd=root)
    return origin if origin and Path(origin).resolve().is_relative_to(root.resolve()) else None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # from a copy: setuptools leaves build/ in the tree, whose stale files would get into the next wheel
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(CHECKOUT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for pattern in ("pyproject.toml", "setup.cfg", "LICENSE", "README.md", "MANIFEST.in"):
        for path in CHECKOUT.glob(pattern):
            shutil.copy(path, source)
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", out]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, source], check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_wheel_carries_all_of_selfspec_and_nothing_else(wheel: Path):
    expected = expected_files(CHECKOUT)
    assert any(name.startswith("selfspec/configs/train/") for name in expected)
    assert wheel_problems(set(zipfile.ZipFile(wheel).namelist()), expected) == []


@pytest.mark.parametrize("is_wheel", [True, False], ids=["unpacked wheel", "checkout"])
def test_all_parts_and_configs_are_found(wheel: Path, tmp_path: Path, is_wheel: bool):
    root = tmp_path if is_wheel else CHECKOUT
    if is_wheel:
        zipfile.ZipFile(wheel).extractall(root)
    code = (
        "from importlib.resources import files; from importlib.util import find_spec\n"
        "import selfspec; print(selfspec.__file__)\n"
        "print(all(find_spec(f'selfspec.{name}') for name in ('kernels', 'training', 'eval')))\n"
        "print(len([p for p in (files('selfspec.configs') / 'train').iterdir() if p.name.endswith('.yaml')]))"
    )
    location, has_parts, num_configs = run(code, cwd=root).splitlines()
    assert Path(location).is_relative_to(root)
    assert has_parts == "True"
    assert int(num_configs) == len(list((CHECKOUT / "configs" / "train").glob("*.yaml")))


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ({"selfspec/__init__.py", "kernels/dispatch.py"}, "not under selfspec/: kernels/dispatch.py"),
        ({"selfspec-0.1.0.dist-info/METADATA"}, "missing: selfspec/__init__.py"),
    ],
)
def test_planted_wheel_problem_is_found(names: set[str], problem: str):
    assert wheel_problems(names, {"selfspec/__init__.py"}) == [problem]


def test_kernels_is_not_taken_for_the_hugging_face_package():
    assert kernels_taken_from(CHECKOUT) is None


def test_planted_kernels_package_is_found(tmp_path: Path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    assert kernels_taken_from(tmp_path) is not None


def test_no_file_breaks_the_folder_map():
    assert layout_problems(CHECKOUT) == []


@pytest.mark.parametrize("path", ["conftest.py", "kernels/__init__.py", "tests/__init__.py", "training/datasets.py"])
def test_planted_layout_problem_is_found(tmp_path: Path, path: str):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).touch()
    assert layout_problems(tmp_path) == [path]
