"""Whole runs of the harness: they resume, lose nothing, and hold what a reader needs."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from selfspec.cli import app
from selfspec.eval import methods as registry
from selfspec.eval import run as eval_run
from selfspec.eval.config import EvalConfig, load_eval_config
from selfspec.eval.journal import Journal
from selfspec.eval.run import evaluate, method_specs
from selfspec.eval.runner import Runner
from selfspec.eval.tasks import Question
from selfspec.model import EarlyExitModel
from tests.conftest import chat_model


@pytest.fixture
def model() -> EarlyExitModel:
    return chat_model()


@pytest.fixture
def questions(tmp_path, model, monkeypatch) -> Path:
    """A file of three questions, and `EarlyExitModel.from_pretrained` giving the tiny model."""
    monkeypatch.setattr(EarlyExitModel, "from_pretrained", staticmethod(lambda *_: model))
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"category": f"c{i % 2}", "turns": [f"say {i}"]}) + "\n" for i in range(3)))
    return path


def config_of(questions: Path, *overrides: str) -> EvalConfig:
    output = questions.parent / "out"
    settings = [f"tasks={questions}", f"output={output}", "methods=[selfspec]", "max_new_tokens=6", "threads=1"]
    return load_eval_config(None, [*settings, *overrides])


def test_an_interrupted_run_goes_on_where_it_stopped(questions, monkeypatch):
    config, asked = config_of(questions), []
    ask = Runner.ask

    def stop_at_the_third(self: Runner, question: Question) -> Any:
        asked.append(question.id)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return ask(self, question)

    monkeypatch.setattr(Runner, "ask", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        evaluate(config)
    with pytest.raises(ValueError, match=r"unfinished run of other settings \(max_new_tokens: 6 -> 7\)"):
        evaluate(config_of(questions, "max_new_tokens=7"))
    journal = Path(config.output) / "journal.jsonl"
    journal.write_text(journal.read_text() + '{"key": "torn')  # killed while writing
    results = evaluate(config)
    assert asked == ["1", "2", "3", "3"]
    assert results["num_prompts"] == 3
    assert [row["question"] for row in results["rows"] if row["method"] == "ar"] == ["1", "2", "3"]
    assert json.loads((Path(config.output) / "results.json").read_text()) == json.loads(json.dumps(results))
    assert not journal.exists()
    with pytest.raises(ValueError, match="finished run"):
        evaluate(config)


def test_results_hold_what_a_reader_needs(questions):
    results = evaluate(config_of(questions, "temperatures=[0, 1]"))
    figures = results["summary"]["selfspec"]
    assert {"speedup", "tau", "acceptance_rate", "tokens_per_second", "lossless", "breakdown"} <= figures.keys()
    assert figures["lossless"] is True
    assert set(results["by_temperature"]) == {"0.0", "1.0"}
    assert results["by_temperature"]["1.0"]["selfspec"]["num_compared_texts"] == 3  # coupled, float32: promised
    assert set(results["by_category"]) == {"c0", "c1"}
    assert {"commit", "dirty", "versions", "device", "command"} <= results["provenance"].keys()
    assert "say 0" not in json.dumps(results)  # results, not the questions' text


def test_a_full_disk_loses_nothing_that_was_measured(questions, monkeypatch):
    config, write = config_of(questions), Journal._append

    def full(self: Journal, entry: dict[str, Any]) -> None:
        if entry.get("key", "").endswith("/3"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, entry)

    monkeypatch.setattr(Journal, "_append", full)
    with pytest.raises(OSError, match="No space"):
        evaluate(config)
    monkeypatch.undo()
    journal = Journal(Path(config.output), json.loads((Path(config.output) / "journal.jsonl").open().readline()))
    assert len(journal.done) == 2


def test_shipped_configs_are_valid():
    for name in ("quick", "spec-bench"):
        specs = method_specs(load_eval_config(name))
        assert {spec.method for spec in specs} <= registry.METHODS.keys()


def test_a_mistake_is_one_line(tmp_path, capsys, monkeypatch):
    from typer.testing import CliRunner

    monkeypatch.setattr(eval_run.EarlyExitModel, "from_pretrained", lambda *_: pytest.fail("worked before checking"))
    file = tmp_path / "file"
    file.write_text("")
    for arguments, message in (
        (["methods=[magic]"], "unknown method magic"),
        (["tasks=[nope]"], "unknown task 'nope'"),
        (["tassks=[quick]"], "did you mean 'tasks'"),
        ([f"tasks={file}"], "no questions"),
        ([f"output={file}/x"], "Not a directory"),
        (["temperatures=[-1]"], "temperatures must be >= 0"),
    ):
        result = CliRunner().invoke(app, ["eval", *arguments])
        assert result.exit_code == 2, arguments
        assert message in result.stderr, arguments
        assert result.stderr.count("\n") == 1, arguments
