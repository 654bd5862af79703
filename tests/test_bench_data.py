"""bench-data on a tiny model: rates and comparisons are what they say, and another text is seen."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from selfspec.cli import app
from selfspec.training import bench
from tests.conftest import chat_model


def test_the_command_writes_rates_and_a_comparison(chat_folder: Path, tmp_path: Path) -> None:
    """Both write the same greedy answers in float32 behind prompts of several lengths; figures follow from runs."""
    options = ["--prompts", str(chat_folder / "prompts.jsonl"), "--model", str(chat_folder), "--output", str(tmp_path)]
    settings = ["--batch-size", "4", "--max-new-tokens", "12", "--rounds", "3", "--dtype", "float32", "--device", "cpu"]
    done = CliRunner().invoke(app, ["bench-data", *options, *settings])
    assert done.exit_code == 0, done.output
    assert "4 texts equal" in " ".join(done.output.split())
    held = json.loads((tmp_path / "results.json").read_text())
    assert held["texts"] == {"equal": 4, "near_ties": 0, "others": 0, "largest_gap_ulp": 0.0}
    assert len(held["prompt_tokens"]) == held["batch_size"] == 4
    assert max(held["prompt_tokens"]) < 200  # the long one is left out
    assert len(set(held["answer_tokens"].values())) == 1
    assert {name: len(runs) for name, runs in held["runs"].items()} == {"selfspec": 3, "transformers": 3}
    for name, runs in held["runs"].items():
        assert sorted(runs)[1] == held["tokens_per_second"][name] > 0
    rates = held["tokens_per_second"]
    assert held["ratio"] == pytest.approx(rates["selfspec"] / rates["transformers"])
    assert len(held["prompts_sha256"]) == 64
    assert held["provenance"]["versions"]["torch"]


def test_an_answer_ends_with_its_end_token_and_a_wrong_one_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a batch's padding are not counted; a changed token is no near-tie."""
    model = chat_model()
    monkeypatch.setattr(bench, "eos_ids", lambda _: list(range(3, 40)))
    held = bench.run(model.base, model.tokenizer, batch_size=3, max_new_tokens=8, rounds=1)
    assert held["texts"]["equal"] == held["batch_size"]
    assert held["answer_tokens"]["selfspec"] == held["answer_tokens"]["transformers"] < 8 * held["batch_size"]
    write = bench.write_batch

    def wrong(*arguments: object) -> list[object]:
        made = write(*arguments)
        made[0].answer[0] = (made[0].answer[0] + 1) % 200
        return made

    monkeypatch.setattr(bench, "write_batch", wrong)
    held = bench.run(model.base, model.tokenizer, batch_size=3, max_new_tokens=8, rounds=1)
    assert held["texts"]["others"] == 1
    assert held["texts"]["largest_gap_ulp"] > 4


def test_without_a_prompt_that_is_short_enough_it_says_so(chat_folder: Path) -> None:
    model = chat_model()
    with pytest.raises(ValueError, match="no prompt of at most 2 tokens"):
        bench.run(model.base, model.tokenizer, chat_folder / "prompts.jsonl", max_prompt_tokens=2)
