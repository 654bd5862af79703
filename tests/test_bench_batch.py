"""bench-batch on a tiny model: figures follow from runs, and another text is counted."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from selfspec.cli import app
from selfspec.eval import bench_batch as bench
from tests.conftest import chat_model


def arguments(chat_folder: Path, output: Path, sizes: str) -> list[str]:
    options = [
        "--model",
        str(chat_folder),
        "--output",
        str(output),
        "--sizes",
        sizes,
        "--exits",
        "2",
        "--dtype",
        "float32",
    ]
    return ["bench-batch", str(chat_folder / "prompts.jsonl"), *options, "--max-new-tokens", "6", "--rounds", "1"]


def test_the_command_writes_rates_and_compares_texts(chat_folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, arguments(chat_folder, tmp_path, "1,3"))
    assert done.exit_code == 0, done.output
    held = json.loads((tmp_path / "results.json").read_text())
    assert [batch["size"] for batch in held["batches"]] == [1, 3]
    for batch in held["batches"]:
        rates = batch["tokens_per_second"]
        assert {name: runs[0] for name, runs in batch["runs"].items()} == rates  # of one round
        assert batch["over_one_by_one"] == pytest.approx(rates["together"] / rates["one by one"])
        assert batch["over_transformers"] == pytest.approx(rates["together"] / rates["transformers"])
        assert batch["same_text_as_alone"] == batch["transformers"]["same_text"] == batch["size"]
    assert held["provenance"]["versions"]["torch"]


@pytest.mark.parametrize(("sizes", "says"), [("1,x", "numbers from 1 on"), ("0", "numbers from 1 on"), ("9", "not 9")])
def test_sizes_that_cannot_be_are_one_line(chat_folder: Path, tmp_path: Path, sizes: str, says: str) -> None:
    done = CliRunner().invoke(app, arguments(chat_folder, tmp_path, sizes))
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())
    assert not (tmp_path / "results.json").exists()


def test_another_text_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chat_model()
    monkeypatch.setattr(bench, "_prompts", lambda *_: [[5, 6, 7], [8, 9]])
    ours = bench._ours

    def wrong(model: object, count: int, prompts: list[list[int]]) -> list[list[int]]:
        texts = ours(model, count, prompts)  # type: ignore[arg-type]
        return [[3, *texts[0][1:]], *texts[1:]] if len(prompts) == 2 else texts

    monkeypatch.setattr(bench, "_ours", wrong)
    (batch,) = bench.run(model, "quick", [2], 4, 1)["batches"]
    assert batch["same_text_as_alone"] == 1
    assert batch["transformers"]["same_text"] == 1


def test_what_pads_a_batch_behind_an_end_is_no_token_of_the_text() -> None:
    model = chat_model()
    ends = model.base.generation_config.eos_token_id
    model.base.generation_config.eos_token_id = 9
    try:
        made = torch.tensor([[1, 2, 5, 9, 0, 0], [1, 2, 5, 6, 7, 8]])
        assert bench._new_tokens(model, made, made[:, :2]) == [[5, 9], [5, 6, 7, 8]]
    finally:
        model.base.generation_config.eos_token_id = ends
