"""Targets that are not simply in memory: weights on disk, or quantised. Exits train on them and draft losslessly."""

from pathlib import Path
from typing import Any

import pytest
import torch

from selfspec.model import EarlyExitModel
from selfspec.pretrained import load_target_model
from selfspec.storage import fingerprint
from selfspec.training.run import train_exits
from tests.conftest import build_model, byte_tokenizer, prompt_of
from tests.test_training import settings

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer(None)
    build_model("llama", vocab_size=len(tokenizer), eos_token_id=1, **SIZES).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


def trained(folder: Path, run: Path, **load: Any) -> tuple[EarlyExitModel, Path]:
    """A model loaded so, with an exit that was trained on it loaded so."""
    rows = run / "rows.jsonl"
    run.mkdir()
    rows.write_text("".join(f'{{"prompt": "{i} and", "completion": "{i + 1} or so"}}\n' for i in range(12)))
    config = settings(run / "out", model=str(folder), load=load, data={"jsonl": str(rows)}, max_steps=2, exit="made")
    saved = train_exits(config)
    return EarlyExitModel.from_pretrained(folder, exits=str(saved), dtype="float32", **load), saved


def drafts_losslessly(model: EarlyExitModel) -> None:
    ids = torch.tensor([prompt_of(9)])
    drafted = model.generate(ids, max_new_tokens=24, draft_len=2, exact=False)
    assert drafted.sequences.tolist() == model.generate(ids, max_new_tokens=24, draft="off").sequences.tolist()
    assert drafted.stats.num_drafted > 0


@pytest.mark.parametrize("on_disk", [range(6), range(3, 6)], ids=["all-layers", "last-layers"])
def test_layers_on_disk(folder: Path, tmp_path: Path, on_disk: range) -> None:
    """The exit's block, borrowed from a layer on disk, is in memory and is not that layer; fingerprints agree."""
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i in on_disk else "cpu" for i in range(6)}
    model, _ = trained(folder, tmp_path / "run", device_map=places, offload_folder=str(tmp_path / "offload"))
    assert model.base.get_parameter("model.layers.5.mlp.up_proj.weight").is_meta
    plain, _ = load_target_model(folder, dtype="float32")
    assert fingerprint(model.base) == fingerprint(plain)
    drafts_losslessly(model)
    ids = torch.tensor([prompt_of(9)])
    expected = EarlyExitModel.from_target(plain).generate(ids, max_new_tokens=24, draft="off").sequences
    assert model.generate(ids, max_new_tokens=24).sequences.tolist() == expected.tolist()


def test_weights_of_four_bits(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="pip install selfspec[quantised]")
    four = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    model, _ = trained(folder, tmp_path / "run", quantization_config=four)
    assert type(model.base.get_submodule("model.layers.0.mlp.up_proj")).__name__ == "Linear4bit"
    drafts_losslessly(model)


def test_weights_of_eight_bits(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="pip install selfspec[quantised]")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    model, _ = trained(folder, tmp_path / "run", quantization_config=TorchAoConfig(Int8WeightOnlyConfig()).to_dict())
    assert type(model.base.get_parameter("model.layers.0.mlp.up_proj.weight")) is not torch.nn.Parameter
    drafts_losslessly(model)
