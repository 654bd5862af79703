"""bench-engine on small shapes: every part is timed, ratios are what they say, wrong texts stop it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from selfspec.cli import app
from selfspec.device_cycle import DeviceCycle, DeviceVerdict
from selfspec.device_draft import DeviceDraft
from selfspec.eval import bench_engine as bench

TINY = bench.Shape(
    "tiny",
    {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97,
     "max_position_embeddings": 512, "num_hidden_layers": 3},
    (1,),
)  # fmt: skip


def test_the_command_writes_results_a_plot_and_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "shapes", lambda _: [TINY])
    run = bench.run
    monkeypatch.setattr(bench, "run", lambda *a: run(*a, rounds=3, context=40, num_tokens=8))
    done = CliRunner().invoke(app, ["bench-engine", "--output", str(tmp_path), "--device", "cpu", "--dtype", "float32"])
    assert done.exit_code == 0, done.output
    assert "tiny" in done.output
    held = json.loads((tmp_path / "results.json").read_text())
    (row,) = held["models"]
    assert row["same_text"] == {"layer-1": True}
    assert row["is_random"]
    assert not row["speedups"]
    assert row["verify_over_1"]["1"] == 1.0
    costs = row["exits"]["layer-1"]
    for k in bench.DRAFT_LENS:
        assert costs["cycle_over_step"][str(k)] == pytest.approx(costs["cycle_ms"][str(k)] / row["step_ms"])
        best = costs["simulated_speedup"]["0.7"]
        assert best >= bench._tau(0.7, k) / costs["cycle_over_step"][str(k)] - 1e-9
    assert row["plain"]["over"]["transformers"] > 0
    assert held["provenance"]["versions"]["torch"]
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


def test_a_text_that_drafts_change_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = DeviceCycle.judge

    def generous(cycle: DeviceCycle, logits: torch.Tensor, draft: DeviceDraft) -> DeviceVerdict:
        made = judge(cycle, logits, draft)
        return replace(made, num_accepted=made.num_drafted, length=cycle.held.first + made.num_drafted + 1)

    monkeypatch.setattr(DeviceCycle, "judge", generous)  # accepts whatever was drafted
    with pytest.raises(FloatingPointError, match="tiny: drafts changed the text"):
        list(bench.run(torch.device("cpu"), torch.float32, [], [TINY], rounds=1, context=20, num_tokens=4))


def test_tau_of_a_chain() -> None:
    """All rows of a cycle of two drafts at one half: 1 + 1/2 + 1/4."""
    assert bench._tau(0.5, 2) == pytest.approx(1.75)
