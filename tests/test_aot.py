"""What the kernels compile to for four architectures, without a GPU: the gate holds, and it can fail."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from selfspec.cli import app

pytest.importorskip("triton", reason="triton is not installed")
aot = pytest.importorskip("selfspec.kernels.aot")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command writes; in a process of its own, since here kernels are interpreted."""
    output = tmp_path_factory.mktemp("aot") / "aot.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "selfspec", "kernels", "--quick", "--output", str(output)]
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=root)
    assert run.returncode == 0, run.stderr
    return json.loads(output.read_text())


def measured(row: dict[str, Any]) -> Any:
    case, config = aot.Case(**row["case"]), aot.attention.Config(**row["config"])
    return aot.Measured(**row | {"case": case, "config": config})


def test_the_gate_holds_on_every_architecture(compiled):
    assert compiled["failures"] == []
    found = [measured(row) for row in compiled["cases"]]
    assert [m.case for m in found] == aot.cases(is_quick=True)
    assert {m.case.arch for m in found} == set(aot.TARGETS) == set(aot.attention.CONFIGS)
    assert {m.block_m for m in found if m.matrix} >= {64}
    assert aot.gate(found) == []
    assert compiled["provenance"]["versions"]["triton"]


@pytest.mark.parametrize(("change", "message"), [
    ({"spills": 3}, "3 spills"), ({"shared": 300 << 10}, "307200 bytes"), ({"blocks": 0}, "0 blocks"),
    ({"wide_loads": 0}, "128 bits"), ({"narrow_loads": 16}, "16 loads of 16 bits"), ({"matrix": 0}, "matrix"),
    ({"layouts": 2}, "another order"),
])  # fmt: skip
def test_the_gate_finds_what_is_not_as_planned(compiled, change, message):
    for row in compiled["cases"]:
        found = measured(row)
        is_free = ("matrix" in change and found.block_m < 64) or ("layouts" in change and not found.case.is_exact)
        assert [message in failure for failure in aot.gate([replace(found, **change)])] == [True] * (not is_free)


def test_the_whole_table_has_every_feature_and_the_quick_one_is_quick():
    whole, quick = aot.cases(), aot.cases(is_quick=True)
    assert len(quick) <= 40
    assert len(set(whole)) == len(whole)
    for name in ("window", "has_cap", "has_pads", "is_exact"):
        assert any(getattr(case, name) for case in whole)
    assert {case.kv_dtype for case in whole} == {"bf16", "fp16", "fp32", "fp8e4nv"}


def test_the_choice_of_splits_is_plotted(tmp_path):
    run = CliRunner().invoke(app, ["kernels", "--splits", str(tmp_path / "splits.png")])
    assert run.exit_code == 0, run.output
    assert (tmp_path / "splits.png").read_bytes().startswith(b"\x89PNG")


def test_interpreted_kernels_are_not_compiled():
    if not aot.attention.IS_INTERPRETED:
        pytest.skip("kernels run on a GPU here")
    run = CliRunner().invoke(app, ["kernels", "--quick"])
    assert run.exit_code == 2
    assert "TRITON_INTERPRET" in run.output


def test_blocks_on_a_processor():
    """Figures from the vendors' occupancy tables."""
    assert aot._nvidia_blocks(128, 0, 4, "sm_90", 0) == 4
    assert aot._nvidia_blocks(32, 0, 4, "sm_90", 0) == 16
    assert aot._nvidia_blocks(32, 100 << 10, 4, "sm_90", 0) == 2
    assert aot._nvidia_blocks(32, 100 << 10, 4, "sm_80", 0) == 1
    assert aot._nvidia_blocks(64, 0, 4, "sm_100", 256) == 2
    assert aot._amd_blocks(128, 0, 4) == 4
    assert aot._amd_blocks(64, 40 << 10, 4) == 1
