"""Measuring: tokens are counted once, figures in README are those of the results file, bad files are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec import costs
from selfspec.eval import speed, table

ROOT = Path(__file__).parent.parent
RESULTS = "docs/results/cpu_speed.json"


@pytest.mark.skipif(not (ROOT / RESULTS).is_file(), reason="nothing measured yet")
def test_readme_shows_the_figures_of_the_results_file():
    readme = (ROOT / "README.md").read_text()
    results = json.loads((ROOT / RESULTS).read_text())
    assert table.insert(readme, table.render(results, RESULTS)) == readme
    details = (ROOT / "docs" / "speed.md").read_text()
    assert table.insert(details, table.render_details(results, RESULTS)) == details


def row(category: str, **methods: Any) -> dict[str, Any]:
    held = {
        name: {"tokens": t, "seconds": s, "num_cycles": c, "num_drafted": 2 * c, "num_accepted": t - c}
        for name, (t, s, c) in methods.items()
    }
    for values in held.values():
        values["same_text"] = True
    return {"category": category, "same_as_transformers": True, **held}


def test_summary_divides_sums_by_sums():
    """Speed is summed tokens over summed seconds (not a mean of ratios), tau is tokens per cycle."""
    rows = [
        row("a", transformers=(10, 2.0, 10), ar=(10, 1.0, 10), default=(10, 0.5, 5)),
        row("b", transformers=(30, 2.0, 30), ar=(30, 1.0, 30), default=(30, 1.5, 20)),
    ]
    summary = speed.summarise(rows, ["ar", "default"])
    assert summary["ar"]["tokens_per_second"] == 20
    assert summary["default"]["tokens_per_second"] == 20
    assert summary["default"]["over_ar"] == 1
    assert summary["default"]["over_transformers"] == 2
    assert summary["default"]["tau"] == 40 / 25
    assert summary["default"]["acceptance_rate"] == 15 / 50
    assert summary["default"]["same_text"] == 2


def test_the_clock_leaves_the_prompt_and_the_first_token_out(monkeypatch):
    """Four new tokens that come at 3, 4, 5 and 6 seconds: three tokens in three seconds."""
    ticks = iter([1.0, 3.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(ticks))
    clock = speed._Clock()
    for _ in range(5):  # the prompt is put first
        clock.put(torch.tensor([0]))
    assert clock.decode == (3, 3.0)


def test_methods_take_turns_in_rotating_order():
    order: list[str] = []
    runs = costs.interleave({name: (lambda name=name: order.append(name)) for name in "abc"}, rounds=3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert {len(values) for values in runs.values()} == {3}


def test_a_bad_line_is_named_with_its_number(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"category": "a", "turns": ["x"]}\n{"category": "a"}\n')
    with pytest.raises(ValueError, match=r"q\.jsonl:2: "):
        speed.read_questions(path, 5)
    path.write_text("")
    with pytest.raises(ValueError, match="no questions"):
        speed.read_questions(path, 5)
