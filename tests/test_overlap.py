"""What training data leaves out: evaluation text, and what is there twice; and where it may come from."""

import json
import logging
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from selfspec.files import read_records
from selfspec.training.data import load_shards, read_prompts, rows_from_jsonl
from selfspec.training.generate_data import content_hash, write_data
from selfspec.training.overlap import Overlap
from tests.conftest import build_model, byte_tokenizer

QUESTION = "How many cups of flour does the baker need for three loaves of bread and a cake"


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        (QUESTION, True),
        (f"Tell me, please: {QUESTION.lower().replace(' ', '  ')}?", True),  # case, spaces and what stands around
        ("how many cups of flour does the baker need for", True),  # ten words in a row
        ("how many cups of flour does the cook need for three loaves of bread", False),
        ("three loaves of bread and a cake", False),  # fewer than ten in a row
        ("What is it?", True),  # short ones count as a whole
        ("What is it good for?", False),
    ],
)
def test_a_shared_run_of_ten_words_is_found(tmp_path: Path, text: str, is_found: bool) -> None:
    file = write(tmp_path / "eval.jsonl", {"turns": [QUESTION, "What is it?"], "category": "math", "id": 4})
    overlap = Overlap.of_files([file])
    assert overlap is not None
    assert overlap.touches([text]) == is_found
    assert Overlap.of_files([]) is None


def test_evaluation_text_and_repeated_rows_stay_out_of_given_data(tmp_path: Path, caplog) -> None:
    chat = [{"role": "user", "content": f"Well then. {QUESTION}"}, {"role": "assistant", "content": "four"}]
    rows = [{"prompt": "a b", "completion": "c"}, {"messages": chat}, {"prompt": "a b", "completion": "c"}]
    file, avoid = write(tmp_path / "rows.jsonl", *rows), write(tmp_path / "eval.jsonl", {"prompt": QUESTION})
    skipped: Counter[str] = Counter()
    with caplog.at_level(logging.WARNING):
        found = rows_from_jsonl(file, byte_tokenizer(None), skipped=skipped, avoid=Overlap.of_files([avoid]))
    assert len(found) == 1
    assert skipped == {"found in what is to be avoided": 1, "twice": 1}
    assert "1 rows (twice)" in caplog.text
    assert len(rows_from_jsonl(file, byte_tokenizer(None))) == 2


def test_evaluation_text_and_repeated_prompts_are_not_answered(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(None)
    model = build_model("llama", vocab_size=len(tokenizer), eos_token_id=1)
    prompts = write(tmp_path / "p.jsonl", *({"prompt": f"x {i % 9}"} for i in range(12)), {"prompt": QUESTION})
    avoid = str(write(tmp_path / "eval.jsonl", {"prompt": QUESTION}))
    manifest = write_data(
        model, tokenizer, tmp_path / "data", 10**6, prompts, batch_size=4, max_new_tokens=3, avoid=[avoid]
    )
    assert manifest["num_rows"] + manifest["skipped"].get("empty answer", 0) == 9
    assert manifest["skipped"]["twice"] == 3
    assert manifest["skipped"]["found in what is to be avoided"] == 1
    assert manifest["settings"]["avoid_sha256"] == [content_hash(avoid)]


def test_what_the_target_writes_of_itself_is_held_against_evaluation_text_too(tmp_path: Path, monkeypatch) -> None:
    tokenizer = byte_tokenizer(None)
    model = build_model("llama", vocab_size=len(tokenizer), eos_token_id=1)
    settings = {"batch_size": 8, "max_new_tokens": 12, "temperatures": (0.8,)}
    write_data(model, tokenizer, tmp_path / "all", 60, **settings)
    texts = [tokenizer.decode(row.ids) for row in load_shards(tmp_path / "all")]
    overlap = Overlap([next(text for text in texts if len(re.findall(r"\w+", text)) > 1)])
    monkeypatch.setattr(Overlap, "of_files", classmethod(lambda *_: overlap))
    count = sum(overlap.touches([text]) for text in texts)
    manifest = write_data(model, tokenizer, tmp_path / "clean", 60, **settings)
    assert count > 0
    assert manifest["skipped"]["found in what is to be avoided"] >= count
    rows = load_shards(tmp_path / "clean")
    assert not any(overlap.touches([tokenizer.decode(row.ids)]) for row in rows)


def test_prompts_come_from_a_data_set_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, config: str | None, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        return [{"prompt": "one"}, {"prompt": "two", "category": "b"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    assert [p.messages[0]["content"] for p in read_prompts("owner/name")] == ["one", "two"]
    list(read_records("owner/name@test[:5%]"))
    assert asked == [("owner/name", None, "train"), ("owner/name", None, "test[:5%]")]
    assert content_hash("owner/name") == content_hash("owner/name")


def test_a_data_set_that_is_not_to_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such repository\n\nand much more")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fail))
    with pytest.raises(OSError, match=r"cannot fetch data set 'owner/name': no such repository; check name"):
        read_prompts("owner/name")
    with pytest.raises(FileNotFoundError):
        read_prompts("no-such-file.jsonl")
