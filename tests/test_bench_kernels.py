"""The kernel benchmark where there is no GPU: its cells, checks, figures and files, on small shapes."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from selfspec.cli import app
from selfspec.eval import bench_kernels
from selfspec.eval.bench_kernels import LLAMA_8B, SMOLLM2, Cell, cells, check, make, run
from selfspec.eval.kernel_report import plot_roofline, ratios

SMALL = [Cell(SMOLLM2, 24, 1), Cell(SMOLLM2, 24, 5), Cell(SMOLLM2, 24, 5, is_tree=True)]


def test_the_cells_of_a_gpu_are_those_of_the_specification() -> None:
    found = cells(torch.device("cuda"))
    assert {cell.context for cell in found} == {1024, 8192, 32768, 131072}
    assert {cell.rows for cell in found} == {1, 2, 5, 9, 17, 33, 64}
    assert len({cell.model.name for cell in found}) == 3
    assert any(cell.is_tree and cell.rows == 64 for cell in found)
    assert Cell(LLAMA_8B, 8192, 1).num_bytes == pytest.approx(2 * 8193 * 8 * 128 * 2, rel=0.01)


def test_a_kernel_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundredths off: the run ends before any time is taken."""

    def wrong(p: bench_kernels.Problem) -> bench_kernels.Call:
        right = bench_kernels.sdpa(p)
        return lambda: right() * 1.02

    assert check(make(SMALL[2], torch.device("cpu"), torch.float32))["selfspec"] <= bench_kernels.TOLERANCE
    monkeypatch.setitem(bench_kernels.WAYS, "selfspec", wrong)
    monkeypatch.setattr(bench_kernels, "measure", lambda *_: pytest.fail("timed"))
    with pytest.raises(FloatingPointError, match=r"of plain torch's, 2\.0 allowed"):
        list(run(torch.device("cpu"), torch.float32, SMALL))


def test_every_way_sees_the_same_tree() -> None:
    for cell in SMALL:
        problem = make(cell, torch.device("cpu"), torch.float64)
        made = [call() for way in bench_kernels.WAYS.values() if (call := way(problem)) is not None]
        assert len(made) >= 2
        for other in made[1:]:
            torch.testing.assert_close(made[0], other)


def test_the_command_writes_figures_with_their_provenance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "cells", lambda _: SMALL)
    monkeypatch.setattr(bench_kernels, "COPY_BYTES", 1 << 20)
    made = CliRunner().invoke(app, ["bench-kernels", "--output", str(tmp_path), "--dtype", "float32"])
    assert made.exit_code == 0, made.output
    held = json.loads((tmp_path / "results.json").read_text())
    assert [row["rows"] for row in held["rows"]] == [1, 5, 5]
    assert held["provenance"]["versions"]["torch"] == torch.__version__
    assert (tmp_path / "roofline.png").read_bytes()[:4] == b"\x89PNG"
    one, chain, tree = (row["us"]["selfspec"] for row in held["rows"])
    assert ratios(held["rows"])[0]["5 rows"] == pytest.approx(chain / one, abs=1e-2)
    assert ratios(held["rows"])[0]["5 rows, tree"] == pytest.approx(tree / one, abs=1e-2)
    assert plot_roofline(held) == plot_roofline(held)
