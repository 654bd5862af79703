"""LayerSkip's recipe: a copy learns to be read early, the model itself stays as it is."""

from pathlib import Path

import pytest
import torch

from selfspec.model import EarlyExitModel
from selfspec.training.layerskip import MARK, drop_rates, layer_weights
from selfspec.training.run import train_exits
from tests.conftest import build_model, byte_tokenizer
from tests.test_training import base_hash, settings


def test_weights_and_rates_are_the_papers() -> None:
    """Of 5 layers and scale .2: 0, .2, .6, 1.2 and 4 + .2 x 6; dropping grows from 0 to the most."""
    raw = [0.0, 0.2, 0.6, 1.2, 5.2]
    assert layer_weights(5, 0.2) == pytest.approx([w / sum(raw) for w in raw])
    rates = drop_rates(5, 0.1)
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0.1)
    assert rates[2] == pytest.approx(0.1 * (2**0.5 - 1))


def test_a_copy_learns_to_be_read_early(tmp_path: Path) -> None:
    """More of its early exit's drafts stand than of the model's own; it is marked; it drafts losslessly for itself."""
    tokenizer = byte_tokenizer(None)
    model = build_model("llama", vocab_size=len(tokenizer), eos_token_id=1, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "abc", "completion": "defdefdefdefdefdef"}\n' * 1
        + "".join(f'{{"prompt": "abc{i}", "completion": "defdefdefdefdefdefdef"}}\n' for i in range(30))
    )
    before = base_hash(model)
    saved = train_exits(settings(
        tmp_path / "run", model=str(tmp_path / "model"), layerskip={}, data={"jsonl": str(tmp_path / "rows.jsonl")},
        max_steps=60, lora_rank=8, learning_rate=2e-2,
    ))  # fmt: skip
    changed = EarlyExitModel.from_pretrained(saved, exits=[2], dtype="float32")
    plain = EarlyExitModel.from_pretrained(tmp_path / "model", exits=[2], dtype="float32")
    assert base_hash(plain.base) == before != base_hash(changed.base)
    assert getattr(changed.base.config, MARK)["layer_dropout"] == 0.1
    ids = torch.tensor([tokenizer.encode("<s>abc4", add_special_tokens=False)])
    rates = []
    for held in (plain, changed):
        drafted = held.generate(ids, max_new_tokens=24, draft_len=2)
        assert torch.equal(drafted.sequences, held.generate(ids, max_new_tokens=24, draft="off").sequences)
        rates.append(drafted.stats.acceptance_rate)
    assert rates[1] > rates[0] + 0.2
