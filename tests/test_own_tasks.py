"""Tasks made of the target's own answers: what they are made of, and rows of them beside the rows they come from."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec.target import Target
from selfspec.training import kept_states
from selfspec.training.config import DataConfig, TrainConfig
from selfspec.training.data import Row, load_shards, prompt_ids, read_manifest
from selfspec.training.generate_data import content_hash
from selfspec.training.own_tasks import own_tasks
from selfspec.training.rows import OWN_TASKS, interleave, load_rows
from selfspec.training.run import split, train_exits
from tests.conftest import byte_tokenizer
from tests.test_data import CHATML, EOS

WORDS = [
    "ash",
    "birch",
    "cedar",
    "elder",
    "fir",
    "hazel",
    "ivy",
    "larch",
    "maple",
    "oak",
    "pine",
    "rowan",
    "rush",
    "yew",
]
BY_DEFAULT = "{{ '<s>system\nBe brief.</s>\n' }}"


def row_of(tokenizer, answer, *said):
    """A row in which ``said`` is what user and assistant said in turn before ``answer``."""
    chat = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    prompt = prompt_ids(tokenizer, chat)
    return Row(np.array([*prompt, *tokenizer.encode(answer, add_special_tokens=False), EOS]), len(prompt))


def answer_of(number):
    return f"About {WORDS[number]}. " + f"It is said that {WORDS[number]} grows by rivers and on hills. " * 3


@pytest.mark.parametrize("template", [CHATML, None], ids=["chat", "plain"])
def test_tasks_are_made_of_answers_of_use_each_as_often_as_the_others(template) -> None:
    tokenizer = byte_tokenizer(template)
    answers = [answer_of(i).strip() for i in range(12)]
    rows = [row_of(tokenizer, answer, f"What of {WORDS[i]}?") for i, answer in enumerate(answers)]
    useless = [answer_of(12)[:149], "```" + answer_of(13)]
    rows += [row_of(tokenizer, answer, "What else?") for answer in useless]
    tasks = own_tasks(rows, tokenizer, 90, seed=3)
    assert tasks == own_tasks(rows, tokenizer, 90, seed=3) != own_tasks(rows, tokenizer, 90, seed=4)
    assert Counter(task.category for task in tasks) == {"summary": 30, "question": 30, "translation": 30}
    used: dict[str, Counter[str]] = {kind: Counter() for kind in ("summary", "question", "translation")}
    for task in tasks:
        text = task.messages[0]["content"]
        found = [answer for answer in answers if answer in text]
        assert all(text.count(answer) == 1 for answer in found)
        used[task.category].update(found)
        if task.category == "question":
            (asked,) = {WORDS[i] for i in range(14) if f"What of {WORDS[i]}?" in text}
            assert any(asked in answer for answer in found)
        elif task.category == "summary":
            assert "What of" not in text
        else:
            assert any(len(part) > 40 and part in text for answer in answers for part in answer.split(". "))
        assert len(text) - sum(map(len, found)) < 200  # the rest is the task
        assert "What else" not in text
        assert not any(WORDS[i] in text for i in (12, 13))
    for kind in ("summary", "question"):
        assert max(used[kind].values()) - min(used[kind].values()) <= 1
        assert len(used[kind]) == 12


@pytest.mark.parametrize("template", [CHATML, BY_DEFAULT + CHATML], ids=["bare", "system"])
def test_the_question_is_the_last_one_of_a_conversation(template) -> None:
    """Whatever stood before it: another turn, a system message; and without a question there are other tasks."""
    tokenizer = byte_tokenizer(template)
    later = row_of(tokenizer, answer_of(1), "What of oaks?", "Much.", "What of ash?")
    system = row_of(byte_tokenizer(CHATML), answer_of(2), "What of elms?")
    before = tokenizer.encode("<s>system\nBe kind.</s>\n", add_special_tokens=False)
    system = Row(np.array([*before, *system.ids]), system.answer_start + len(before))
    texts = "".join(task.messages[0]["content"] for task in own_tasks([later, system], tokenizer, 40))
    assert "What of ash?" in texts
    assert "What of elms?" in texts
    assert not any(text in texts for text in ("oaks", "Much.", "Be kind", "Be brief", "user", "assistant", "<s>"))
    unasked = Row(np.array([0, *tokenizer.encode(answer_of(1), add_special_tokens=False)]), 1)
    assert {task.category for task in own_tasks([unasked], tokenizer, 10)} == {"summary", "translation"}
    with pytest.raises(ValueError, match="no tasks to be made of 1 answers"):
        own_tasks([row_of(tokenizer, "Yes.", "Is it?")], tokenizer, 10)


def test_rows_of_two_kinds_are_spread_over_the_whole() -> None:
    many, few = ([Row(np.array([kind, i]), 1) for i in range(size)] for kind, size in ((0, 90), (1, 10)))
    mixed = [row.ids.tolist() for row in interleave(many, few)]
    assert [pair for pair in mixed if pair[0]] == [[1, i] for i in range(10)]
    assert [pair for pair in mixed if not pair[0]] == [[0, i] for i in range(90)]
    for start in range(0, 100, 10):
        assert sum(kind for kind, _ in mixed[start : start + 10]) == 1


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(CHATML)


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """Of a model, and of prompts for it."""
    place = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=EOS, bos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    (place / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"What of {i}?"}) + "\n" for i in range(99)))
    (place / "eval.jsonl").write_text('{"prompt": "What of everything else?"}\n')
    return place


def config_of(folder, output, own_task_tokens=0, num_tokens=1000, **changes):
    data = DataConfig(
        num_tokens=num_tokens, prompts=str(folder / "prompts.jsonl"), batch_size=6, max_new_tokens=180,
        own_task_tokens=own_task_tokens, own_task_prompt_tokens=1000, avoid=(str(folder / "eval.jsonl"),),
    )  # fmt: skip
    return TrainConfig(
        model=str(folder), recall_layers=(1, 2), num_steps=1, draft_vocab_size=None, lora_rank=2, data=data,
        output=str(output), max_steps=2, eval_fraction=0.3, **changes,
    )  # fmt: skip


def test_rows_of_tasks_go_on_where_they_stopped_and_leave_the_others_as_they_are(folder, tokenizer, tmp_path) -> None:
    target = Target(LlamaForCausalLM.from_pretrained(folder).eval())

    def load(name, **settings):
        config = config_of(folder, tmp_path / name, **settings)
        return load_rows(config, target, tokenizer, tmp_path / name)

    plain = load("plain")
    files = {path.name: path.read_bytes() for path in (tmp_path / "plain/data").iterdir()}
    load("parts", own_task_tokens=200)
    both = load("parts", own_task_tokens=900)
    whole = load("whole", own_task_tokens=900)
    assert {path.name: path.read_bytes() for path in (tmp_path / "parts/data").iterdir() if path.is_file()} == files
    parts = load_shards(tmp_path / "parts/data" / OWN_TASKS)
    assert len(read_manifest(tmp_path / "parts/data" / OWN_TASKS)["shards"]) == 2
    assert [row.ids.tolist() for row in both] == [row.ids.tolist() for row in whole]
    assert sorted(row.ids.tolist() for row in both) == sorted(row.ids.tolist() for row in plain + parts)
    assert max(len(row.ids) for row in parts) > 512 >= max(len(row.ids) for row in plain)
    own = {row.ids.tobytes() for row in parts}
    assert {row.temperature for row in parts} == {0.0, float(np.float32(0.8))}
    assert any(row.ids.tobytes() in own for row in both[: len(plain)])
    train, held = split(both, config_of(folder, tmp_path))
    for side in (train, held):
        assert {row.ids.tobytes() in own for row in side} == {True, False}
    for wanted in (200, 900, 1200):  # whether or not there are enough already
        with pytest.raises(ValueError, match=r"own-tasks holds data of other settings \(prompts_sha256: "):
            load("parts", own_task_tokens=wanted, num_tokens=2600)


def test_a_run_learns_from_both_and_says_so(folder, tmp_path, monkeypatch) -> None:
    """The target's states were kept while it wrote; the sidecar has what the tasks were and what was other there."""
    monkeypatch.setattr(kept_states, "teach", lambda *_: pytest.fail("a second pass over the rows"))
    saved = train_exits(config_of(folder, tmp_path / "run", own_task_tokens=900))
    training = json.loads((saved / "selfspec_config.json").read_text())["training"]
    assert training["num_answer_tokens"] + training["num_held_out_answer_tokens"] >= 1000 + 900
    own = read_manifest(tmp_path / "run/data" / OWN_TASKS)["settings"]
    assert training["data"]["own_tasks"] == {
        "kind": "prompts", "prompts_sha256": own["prompts_sha256"], "batch_size": 3, "max_prompt_tokens": 1000,
    }  # fmt: skip
    assert own["avoid_sha256"] == [content_hash(folder / "eval.jsonl")]
    assert f"prompts_sha256: {own['prompts_sha256']}" in (saved / "README.md").read_text()
