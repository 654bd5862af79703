"""Conversations of several turns, both sides written by the target."""

from pathlib import Path

import pytest
import torch

from selfspec.target import Target
from selfspec.training import generate_data, user_turns
from selfspec.training.batch import Written
from selfspec.training.data import Row, load_shards, prompt_ids
from selfspec.training.generate_data import write_data
from selfspec.training.user_turns import next_turns
from tests.conftest import build_model, byte_tokenizer
from tests.test_data import CHATML

EOS = 1


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(CHATML)


@pytest.fixture(scope="module")
def target(tokenizer):
    return Target(build_model("llama", vocab_size=len(tokenizer), eos_token_id=EOS, max_position_embeddings=512))


def test_the_next_turn_stands_where_the_template_has_it(tokenizer, target, monkeypatch) -> None:
    """What comes out is the template's own rendering of the whole conversation; an answer that was cut off ends it."""
    said = tokenizer.encode("And then?", add_special_tokens=False)
    starts = []

    def write(_target: Target, prompts: list[list[int]], *_: object) -> list[Written]:
        starts.extend(prompts)
        return [Written([*said, EOS], {}, torch.empty(0), torch.empty(0)) for _ in prompts]

    monkeypatch.setattr(user_turns, "write_batch", write)
    chat = [{"role": "user", "content": "Tell me."}]
    prompt = prompt_ids(tokenizer, chat)
    answer = tokenizer.encode("A tale.", add_special_tokens=False)
    whole, cut = (Row(torch.tensor(prompt + answer + end).numpy(), len(prompt)) for end in ([EOS], []))
    made = next_turns(target, tokenizer, [whole, cut], 400, torch.Generator())
    chat += [{"role": "assistant", "content": "A tale."}, {"role": "user", "content": "And then?"}]
    assert made == [prompt_ids(tokenizer, chat)]
    assert len(starts) == 1
    assert next_turns(target, tokenizer, [whole], 140, torch.Generator()) == []  # no room for another turn
    assert next_turns(target, byte_tokenizer(None), [whole], 400, torch.Generator()) == []


def test_rows_of_later_turns_go_on_from_earlier_ones(tokenizer, target, tmp_path: Path, monkeypatch) -> None:
    """Each turn is a row whose prompt is all that was said before; a second call goes on with the same settings."""
    for module in (generate_data, user_turns):
        monkeypatch.setattr(module, "eos_ids", lambda _: list(range(1, 60)))  # turns soon end
    arguments = (target.base, tokenizer, tmp_path / "data")
    settings = {"batch_size": 16, "max_new_tokens": 24, "max_turns": 3, "max_prompt_tokens": 400}
    manifest = write_data(*arguments, 900, **settings)
    rows = load_shards(tmp_path / "data")
    opening = tokenizer.encode("<s>user", add_special_tokens=False)

    def num_turns(row: Row) -> int:
        text = row.ids[: row.answer_start].tolist()
        return sum(text[i : i + len(opening)] == opening for i in range(len(text)))

    assert {num_turns(row) for row in rows} == {1, 2, 3}
    for row in rows:
        if num_turns(row) > 1:
            earlier = [r for r in rows if num_turns(r) == num_turns(row) - 1]
            assert any(row.ids[: len(r.ids) - 1].tolist() == r.ids[:-1].tolist() for r in earlier)
    assert manifest["settings"]["max_turns"] == 3
    with pytest.raises(ValueError, match="max_turns: 3 -> None"):
        write_data(*arguments, 1200, **{**settings, "max_turns": 1})
