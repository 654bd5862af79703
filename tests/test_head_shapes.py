"""Heads of other shapes: no block, several, attention alone, trained whole, from chance; and very deep targets."""

import json
from pathlib import Path

import pytest
import torch

from selfspec.exit_module import ExitConfig, build_adapter, unwrap
from selfspec.exits import ExitHead
from selfspec.model import EarlyExitModel
from selfspec.storage import load_exits, save_exit
from selfspec.target import Target
from selfspec.training.run import load_start, train_exits, train_on_rows
from selfspec.training.states import collect, kept_depths
from tests.conftest import build_model, byte_tokenizer, prompt_of
from tests.test_training import VOCAB, base_hash, build, settings, written_rows

SHAPES = {
    "lens": {"num_blocks": 0},
    "two-blocks": {"num_blocks": 2},
    "attention": {"has_mlp": False, "lora_rank": 0},
    "whole": {"lora_rank": 0},
    "two-whole": {"num_blocks": 2, "lora_rank": 0},
}


def shaken(target: Target, **shape: object) -> ExitHead:
    """An exit of that shape whose trained weights are not where they began."""
    config = ExitConfig(**{"exit_layer": 1, "recall_layers": (2, 4), "num_steps": 2, "lora_rank": 4, **shape})
    adapter, generator = build_adapter(target, config), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in adapter.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return ExitHead(target, "made", config, adapter)


@pytest.mark.parametrize(
    ("shape", "family"), [*((shape, "llama") for shape in SHAPES), ("two-blocks", "gemma3_text"), ("two-whole", "gpt2")]
)
def test_any_shape_drafts_losslessly_and_comes_back_from_disk(shape: str, family: str, tmp_path: Path) -> None:
    """The base is untouched; what is loaded drafts as what was saved did; gemma3's layers see different windows."""
    target, prompt = Target(build_model(family)), torch.tensor([prompt_of(9)])
    before = base_hash(target.base)
    head = shaken(target, **SHAPES[shape])
    save_exit(head, target, tmp_path / "made")
    loaded = load_exits(target, tmp_path / "made")["made"]
    made, again = (
        EarlyExitModel(target, {"made": h}).generate(prompt, max_new_tokens=30, draft_len=3) for h in (head, loaded)
    )
    plain = EarlyExitModel(target, {"made": head}).generate(prompt, max_new_tokens=30, draft="off")
    assert made.sequences.tolist() == again.sequences.tolist() == plain.sequences.tolist()
    assert made.stats.accepted_histogram == again.stats.accepted_histogram
    assert made.stats.num_drafted > 0
    assert base_hash(target.base) == before


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "lens"])
def test_any_shape_learns(shape: str, tmp_path: Path) -> None:
    model = build()
    before = base_hash(model)
    done = train_on_rows(Target(model), written_rows(model, 30), settings(tmp_path, **SHAPES[shape]), tmp_path, VOCAB)
    assert done.metrics.loss < done.at_start.loss - 0.03
    assert base_hash(model) == before


def test_a_tuned_lens_sees_more_than_the_logit_lens(tmp_path: Path) -> None:
    """In closed form already, on rows that it was not fitted on."""
    target, rows = Target(build()), written_rows(build(), 40)
    config = settings(tmp_path, recall_layers=(), num_steps=1, draft_vocab_size=None, max_steps=0, **SHAPES["lens"])
    tuned = train_on_rows(target, rows, config, tmp_path, VOCAB).metrics.agreement[0]
    plain = ExitHead.untrained(target, 1)
    states = collect(target, plain.config, rows)
    with torch.no_grad():
        guesses = [plain.head(plain.norm(s.taps[s.answer_start - 1 :].float()[None]))[0].argmax(-1) for s in states]
    right = torch.cat([guess == s.argmaxes for guess, s in zip(guesses, states, strict=True)])
    assert tuned > float(right.float().mean()) + 0.05


def test_borrowed_blocks_are_called_like_the_layers_they_were() -> None:
    """Two blocks after a bridge that hands on the state before the last two layers give the target's own last state."""
    target = Target(build_model("gemma3_text"))  # its layers differ in window and rotary table
    module = unwrap(build_adapter(target, ExitConfig(exit_layer=4, num_blocks=2)))
    ids = torch.tensor([prompt_of(20)])
    with torch.no_grad():
        hidden = target.run_uncached(target.layers[:4], target.embed(ids), range(4))
        whole = target.run_uncached(target.layers[4:], hidden, range(4, 6))
        assert torch.equal(module(target, hidden), target.norm(whole))


def test_the_closed_form_aims_at_the_input_of_the_borrowed_layers() -> None:
    target, rows = Target(build()), written_rows(build(), 3)
    for num_blocks in (0, 1, 3):
        config = ExitConfig(exit_layer=1, num_blocks=num_blocks)
        depth = target.num_layers - num_blocks
        assert depth in kept_depths(target.num_layers, config)
        ids = torch.from_numpy(rows[0].ids[:-1])[None]
        with torch.no_grad():
            wanted = target.run_uncached(target.layers[:depth], target.embed(ids), range(depth))[0]
        torch.testing.assert_close(collect(target, config, rows)[0].wanted.float(), wanted, rtol=1e-2, atol=1e-2)


def test_a_start_from_chance_knows_nothing_and_learns(tmp_path: Path) -> None:
    rows = written_rows(build(), 30)
    for name in ("borrowed", "random"):
        (tmp_path / name).mkdir()
    kinds = {"borrowed": {}, "random": {"start": "random"}}
    runs = {
        name: train_on_rows(
            Target(build()), rows, settings(tmp_path / name, lora_rank=0, **kind), tmp_path / name, VOCAB
        )
        for name, kind in kinds.items()
    }
    assert runs["random"].at_start.agreement[0] < runs["borrowed"].at_start.agreement[0]
    assert runs["random"].metrics.loss < runs["random"].at_start.loss - 0.1
    with pytest.raises(ValueError, match="random blocks are trained whole"):
        settings(tmp_path, start="random")


def test_a_trained_exit_is_trained_on(tmp_path: Path) -> None:
    """It starts as good as the exit is and keeps its vocabulary; it may grow, and a smaller shape is refused."""
    target, rows, saved = Target(build()), written_rows(build(), 60), tmp_path / "first" / "exit"
    runs = []
    for name, start in (("first", "borrowed"), ("second", str(saved))):
        (tmp_path / name).mkdir()
        config = settings(tmp_path / name, max_steps=12, start=start)
        runs.append(
            train_on_rows(
                target,
                rows,
                config,
                tmp_path / name,
                VOCAB,
                lambda head, metrics, facts, name=name: save_exit(
                    head, target, tmp_path / name / "exit", None, facts, metrics.flat()
                ),
            )
        )
    first, second = runs
    assert second.at_start.loss == pytest.approx(first.metrics.loss, abs=0.01)  # saved in bfloat16
    assert second.at_start.loss < first.at_start.loss - 0.05
    assert second.exit_head.config.draft_vocab == first.exit_head.config.draft_vocab
    facts = json.loads((tmp_path / "second" / "metrics.json").read_text())["start"]
    assert facts["weights_sha256"] == load_exits(target, saved)["exit"].metadata["weights_sha256"]
    with pytest.raises(ValueError, match="has num_steps 2, not 1"):
        load_start(target, settings(tmp_path, start=str(saved), num_steps=1))
    (tmp_path / "grown").mkdir()
    larger = {"form": "parallel", "num_steps": 3, "correction_rank": 4, "max_steps": 0}
    config = settings(tmp_path / "grown", start=str(saved), **larger)
    grown = train_on_rows(target, rows, config, tmp_path / "grown", VOCAB)
    assert len(grown.metrics.agreement) == 3
    assert grown.metrics.agreement[0] == pytest.approx(first.metrics.agreement[0], abs=0.02)  # what it had is as it was


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="7 blocks cannot be borrowed from 6 layers"):
        ExitConfig(exit_layer=1, num_blocks=7).check(6)
    with pytest.raises(ValueError, match="num_blocks"):
        ExitConfig(exit_layer=1, num_blocks=-1)


def test_eighty_layers_from_training_to_text(tmp_path: Path) -> None:
    """The depth of the largest targets, narrow: data, several exits, saving, loading, generating."""
    tokenizer = byte_tokenizer(None)
    sizes = {"num_hidden_layers": 80, "hidden_size": 16, "intermediate_size": 24, "vocab_size": len(tokenizer)}
    build_model("llama", **sizes, eos_token_id=1).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i} and {i * i}"}) + "\n" for i in range(24)))
    config = settings(
        tmp_path / "run", model=str(tmp_path / "model"), exit="n8", exit_layer=8, recall_layers=None, max_steps=2,
        data={"num_tokens": 1400, "max_new_tokens": 60, "prompts": str(prompts)}, draft_vocab_size=None,
        also={"n20": {"exit_layer": 20, "form": "parallel"}},
    )  # fmt: skip
    folder = train_exits(config)
    model = EarlyExitModel.from_pretrained(tmp_path / "model", exits=str(folder), dtype="float32")
    assert {name: (h.exit_layer, h.recall_layers) for name, h in model.exits.items()} == {
        "n8": (8, (27, 53, 80)), "n20": (20, (27, 53, 80)),
    }  # fmt: skip
    ids = torch.tensor([prompt_of(7)])
    plain = model.generate(ids, max_new_tokens=12, draft="off").sequences
    for name in model.exits:
        drafted = model.generate(ids, max_new_tokens=12, exit=name, draft_len=2)
        assert torch.equal(drafted.sequences, plain)
        assert drafted.stats.num_drafted > 0
