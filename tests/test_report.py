"""Reports: figures in README are those of the results file, model text is escaped, a page needs nothing else."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfspec.cli import app
from selfspec.eval import report
from selfspec.eval.config import EvalConfig
from selfspec.eval.summary import summarise

ROOT = Path(__file__).parent.parent
RESULTS = "docs/results/spec_bench_cpu_lookup/results.json"


@pytest.mark.skipif(not (ROOT / RESULTS).is_file(), reason="nothing measured yet")
def test_readme_and_docs_show_the_figures_of_the_results_file():
    results = report.load_results(ROOT / RESULTS)
    for name, made in (("README.md", report.markdown(results, RESULTS)), ("docs/speed.md", report.details(results))):
        text = (ROOT / name).read_text()
        assert report.insert(text, made) == text, name


@pytest.fixture
def results(tmp_path) -> Path:
    """Results with a method that failed in an ugly way, and a category that is a script."""
    rows = []
    for i, category in enumerate(("plain", "<script>alert(1)</script>")):
        row = {
            "task": "t", "question": str(i), "category": category, "turn": 0, "temperature": 0.0, "num_cycles": 10,
            "num_decoded": 10, "prefill_seconds": 1.0, "peak_bytes": None,
        }  # fmt: skip
        compared = {"identical": True, "is_near_tie": False, "num_compared": 11, "gap_ulp": None}
        spec = {"draft_seconds": 1.0, "verify_seconds": 3.0, "num_drafted": [2] * 5, "num_accepted": [1] * 5}
        plain = {"draft_seconds": 0.0, "verify_seconds": 9.0, "num_drafted": [0] * 10, "num_accepted": [0] * 10}
        rows += [
            {**row, **compared, **plain, "method": "ar", "decode_seconds": 10.0},
            {**row, **compared, **spec, "method": "selfspec", "decode_seconds": 5.0, "num_cycles": 5},
            {key: row[key] for key in ("task", "question", "category", "turn", "temperature")}
            | {"method": "bad", "error": "<script>alert(2)</script>"},
        ]
    config = EvalConfig()
    found = {
        "format_version": 1,
        "settings": {**config.model_dump(mode="json"), "methods": [], "model_name": "m<b>", "dtype": "float32"},
        **summarise(rows, {"ar": True, "selfspec": False, "bad": False}, config),
        "skipped": {"peer": "no <i>compiler</i>"},
        "engine": None,
        "rows": rows,
        "provenance": {"versions": {}, "commit": "c" * 40, "date": "2026-11-21T00", "threads": 1, "device": "cpu"},
    }
    path = tmp_path / "results.json"
    path.write_text(json.dumps(found))
    return path


def test_a_page_is_escaped_and_self_contained(results):
    page = report.write_report([results], results.parent / "page").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "&lt;script&gt;alert(2)" in page
    assert "<i>compiler" not in page
    assert "m<b>" not in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert page.count("data:image/png;base64,") == 4
    assert {p.name for p in (results.parent / "page").glob("*.png")} >= {"speedup_by_category.png"}


def test_failures_stand_first(results):
    found = report.load_results(results)
    assert report.markdown(found, "r.json").startswith("**2 runs failed")
    cells = {row[0]: row[1:] for row in report.table_rows(found["summary"])}
    assert cells["selfspec"][1] == "2.00 (2.00-2.00)"
    assert cells["bad"][1] == "failed"
    assert "2.00 drafts at 0.100" in report.details(found)


def test_the_table_goes_between_the_markers_of_a_readme(results, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(f"a\n{report.BEGIN}\nold\n{report.END}\nb\n")
    command = ["report", str(results), "--readme", str(readme), "--output", str(tmp_path / "out")]
    assert CliRunner().invoke(app, command).exit_code == 0
    text = readme.read_text()
    assert text.startswith("a\n")
    assert text.endswith("\nb\n")
    assert "old" not in text
    assert "| selfspec | 2.0 | 2.00 (2.00-2.00) |  |" in text
    readme.write_text("no markers")
    failed = CliRunner().invoke(app, command)
    assert failed.exit_code == 2
    assert "markers" in failed.stderr
    assert readme.read_text() == "no markers"


def test_what_is_no_results_file_is_named(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{}")
    failed = CliRunner().invoke(app, ["report", str(path)])
    assert failed.exit_code == 2
    assert "x.json: not results of selfspec eval" in failed.stderr
