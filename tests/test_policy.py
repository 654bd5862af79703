"""How far to draft on this machine: chosen from planted costs, timed once, kept on disk, the same for draft="off"."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec import EarlyExitModel, policy
from selfspec.device_cycle import DeviceCycle
from selfspec.policy import CycleCosts, Policy, choose
from tests.engine_tools import PROMPT, quiet_model, trained_exit

FREE, DEAR, HOPELESS = ((1.0, 1.05, 1.1, 1.15), 0.01), ((1.0, 1.3, 2.0, 3.0), 0.3), ((1.0, 2.1, 3.2, 4.3), 0.3)
RECORDED = {"acceptance_1": 0.8, "acceptance_2": 0.75, "acceptance_3": 0.7}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EarlyExitModel:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return recorded_model()


def recorded_model() -> EarlyExitModel:
    """With an exit whose sidecar says how often it is right."""
    made = quiet_model("llama")
    made.exits["recorded"] = trained_exit(made.target, exit_layer=1, draft_len=2, min_confidence=0.1)
    made.exits["recorded"].metadata["metrics"] = dict(RECORDED)
    return made


def planted(monkeypatch: pytest.MonkeyPatch, costs: tuple[Any, float]) -> list[Any]:
    """Cycles take ``costs``; every time that they are asked for."""
    asked: list[Any] = []
    monkeypatch.setattr(policy, "measure", lambda *a: asked.append(a) or CycleCosts(*costs))
    return asked


def test_the_length_follows_costs_and_acceptance() -> None:
    """S(k) = tau(k) / cycle(k); none where that is below 1, the shortest of equals, stops at S x a row's cost."""
    rates = list(RECORDED.values())
    assert choose(rates, CycleCosts(*FREE)).draft_len == 3
    dear = choose(rates, CycleCosts(*DEAR))
    assert dear == Policy(1, round(1.8 / 1.3 * 0.3, 2), pytest.approx(1.8 / 1.3))
    assert choose(rates, CycleCosts(*HOPELESS)) == Policy(0, 0.0, 1.0)
    assert choose([0.0, 0.0, 0.0], CycleCosts(*FREE)).draft_len == 0
    assert choose([0.5, 0.0], CycleCosts((1.0, 1.2, 1.2))).draft_len == 1


@pytest.mark.parametrize(("costs", "draft_len"), [(FREE, 3), (DEAR, 1), (HOPELESS, 0)])
def test_auto_drafts_so_far_and_has_one_width_with_drafts_and_without(model, monkeypatch, costs, draft_len):
    asked = planted(monkeypatch, costs)
    monkeypatch.setenv("SELFSPEC_KERNELS", "reference")  # the CPU's kernels need no width
    settings = {"max_new_tokens": 12, "draft_len": "auto", "exact": True}
    drafter, state = model.prepare(PROMPT, **settings)
    assert getattr(drafter, "draft_len", 0) == draft_len
    assert state.cache.width == model.prepare(PROMPT, draft="off", **settings)[1].cache.width
    texts = [model.generate(PROMPT, draft=draft, **settings).sequences for draft in (None, "off")]
    assert torch.equal(*texts)
    assert len(asked) == 1
    stop = {3: 0.02, 1: 0.42}.get(draft_len, 0.0)
    assert getattr(drafter, "min_confidence", 0.0) == pytest.approx(stop, abs=0.01)
    assert getattr(model.prepare(PROMPT, min_confidence=0.7, **settings)[0], "min_confidence", 0.7) == 0.7


def test_times_are_kept_for_later_runs_of_the_same_kind(model, monkeypatch, tmp_path):
    asked = planted(monkeypatch, FREE)
    settings = {"max_new_tokens": 4, "draft_len": "auto", "exact": False}
    model.generate(PROMPT, **settings)
    later = recorded_model()
    assert later.prepare(PROMPT, **settings)[0].draft_len == 3
    assert len(asked) == 1
    (path,) = (tmp_path / "selfspec" / "costs").iterdir()
    held = json.loads(path.read_text())
    assert held["costs"]["cycles"] == list(FREE[0])
    assert held["key"]["dtype"] == "torch.float32"
    recorded_model().prepare(PROMPT, **settings | {"exact": True})
    assert len(asked) == 2
    path.write_text("{")
    recorded_model().prepare(PROMPT, **settings)
    assert len(asked) == 3
    other = recorded_model()
    with torch.no_grad():
        other.base.model.layers[0].mlp.down_proj.weight.add_(1.0)
    other.prepare(PROMPT, **settings)
    assert len(asked) == 4


def test_a_cache_that_cannot_be_written_is_said(model, monkeypatch, tmp_path, caplog):
    planted(monkeypatch, DEAR)
    (tmp_path / "selfspec").write_text("no folder")
    assert model.prepare(PROMPT, draft_len="auto")[0].draft_len == 1
    assert "cannot keep what cycles take" in caplog.text


@pytest.mark.parametrize("engine", ["off", "calls"])
@pytest.mark.parametrize("form", ["chain", "parallel"])
def test_cycles_are_timed_as_they_would_run(model, monkeypatch, caplog, engine, form):
    """By the loop or by the engine, at every length, in and out of exact mode; texts stay what they were."""
    monkeypatch.setenv("SELFSPEC_ENGINE", engine)
    monkeypatch.setattr(policy, "SECONDS", 0.0)  # the fewest rounds
    head = trained_exit(model.target, form=form, exit_layer=1, min_accepted=0.05)
    head.metadata["metrics"] = dict(RECORDED)
    model.exits = {"timed": head}
    expected = model.generate(PROMPT, max_new_tokens=12, draft_len=2).sequences
    ran: list[int] = []
    run = DeviceCycle.__call__
    monkeypatch.setattr(DeviceCycle, "__call__", lambda cycle: (ran.append(cycle.kind.draft_len), run(cycle))[1])
    for is_exact in (False, True):
        with caplog.at_level(logging.INFO):
            found = policy.measure(model.target, model.engine, head, 3, is_exact)
        assert found.cycles[0] == 1
        assert len(found.cycles) == 4
        assert all(cycle > 0 for cycle in found.cycles)
        assert found.row == 0 or engine == "off"
    assert set(ran) == ({0, 1, 2, 3} if engine == "calls" else set())
    assert "timing cycles of exit trained on cpu" in caplog.text
    assert torch.equal(model.generate(PROMPT, max_new_tokens=12, draft_len=2).sequences, expected)


def test_a_cycle_that_cannot_be_captured_is_timed_as_the_loop_runs_it(model, monkeypatch):
    monkeypatch.setenv("SELFSPEC_ENGINE", "calls")
    monkeypatch.setattr(policy, "SECONDS", 0.0)
    monkeypatch.setattr("selfspec.layer_calls.sliding_window", lambda *_: None)  # a rule that is no window
    found = policy.measure(model.target, model.engine, model.exits["recorded"], 1, True)
    assert len(found.cycles) == 2


def test_an_exit_of_which_nothing_is_recorded_keeps_its_own_settings(model, monkeypatch, caplog):
    asked = planted(monkeypatch, FREE)
    model.exits["recorded"].metadata["metrics"] = {}
    for _ in range(2):
        drafter, _ = model.prepare(PROMPT, draft_len="auto")
        assert (drafter.draft_len, drafter.min_confidence) == (2, 0.1)
    assert not asked
    assert caplog.text.count("has no recorded acceptance") == 1


def test_other_words_are_refused(model):
    with pytest.raises(ValueError, match="draft_len='far'; give a number or 'auto'"):
        model.generate(PROMPT, max_new_tokens=4, draft_len="far")
