"""Teacher states on disk: read back as they were, made again where they are broken, shared by exits."""

import json
import operator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from selfspec.exit_module import ExitConfig
from selfspec.model import EarlyExitModel
from selfspec.target import Target
from selfspec.training import kept_states
from selfspec.training.kept_states import KeptStates, collect_cached
from selfspec.training.on_disk import load
from selfspec.training.run import train_exits
from selfspec.training.states import RowStates, collect, teach
from tests.conftest import build_model, byte_tokenizer
from tests.test_training import build, settings, written_rows


def assert_alike(made: RowStates, kept: RowStates, rtol: float = 1e-2) -> None:
    """Kept in bfloat16, and made in other batches: a rounding may fall the other way."""
    assert vars(made).keys() == vars(kept).keys()
    for name, value in vars(made).items():
        if name == "recalled":
            for a, b in zip(value, kept.recalled, strict=True):
                torch.testing.assert_close(load(b), a, rtol=rtol, atol=1e-4)
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            torch.testing.assert_close(load(getattr(kept, name)), value, rtol=rtol, atol=1e-4)
        else:
            same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
            assert same(getattr(kept, name), value), name


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """The teacher passes: rows and depths of each."""
    seen: list[tuple[int, list[int]]] = []

    def run(target: Target, depths: list[int], rows: list, *args: int):
        seen.append((len(rows), [*depths]))
        return teach(target, depths, rows, *args)

    monkeypatch.setattr(kept_states, "teach", run)
    return seen


@pytest.mark.parametrize("damage", ["short", "flipped"])
@pytest.mark.parametrize("recall_layers", [(2, 4), ()])
def test_kept_states_are_read_back_and_broken_ones_made_again(tmp_path, recall_layers, watched, caplog, damage) -> None:
    target, config = Target(build()), ExitConfig(exit_layer=1, recall_layers=recall_layers)
    rows = written_rows(target.base, 5)

    def check(expected: list[int]) -> None:
        held = collect_cached(target, KeptStates(tmp_path, "this target"), config, rows, 2)
        for made, kept in zip(collect(target, config, rows), held, strict=True):
            assert_alike(made, kept)
        assert [count for count, _ in watched] == expected

    check([2, 2, 1])
    check([2, 2, 1])
    broken = sorted(tmp_path.iterdir())[0]
    size, data = len(kept_states._about(broken)[0]), broken.read_bytes()
    broken.write_bytes(data[:-7] if damage == "short" else data[:-7] + bytes([data[-7] ^ 1]) + data[-6:])
    check([2, 2, 1, size])
    assert "is broken" in caplog.text
    assert all(path.suffix == ".safetensors" for path in tmp_path.iterdir())


def test_an_exit_at_another_layer_costs_a_shallow_pass(tmp_path, watched) -> None:
    """Only the depths that are missing are made, and no layer behind the deepest of them is run."""
    target, rows = Target(build()), written_rows(build(), 5)
    kept = KeptStates(tmp_path, "this target")
    collect_cached(target, kept, ExitConfig(exit_layer=1, recall_layers=(2, 4)), rows)
    calls = []
    hooks = [layer.register_forward_hook(lambda *_, i=i: calls.append(i)) for i, layer in enumerate(target.base_layers)]
    other = ExitConfig(exit_layer=0, recall_layers=(2, 3))
    found = collect_cached(target, kept, other, rows)
    assert watched[1:] == [(5, [0])]
    assert calls == []
    for hook in hooks:
        hook.remove()
    for made, held in zip(collect(target, other, rows), found, strict=True):
        assert_alike(made, held)


def test_states_in_8_bits_stay_close(tmp_path) -> None:
    """Half of what bfloat16 takes; answers stay as they are. An error is half a step of 3 bits, or of the smallest."""
    target, rows = Target(build()), written_rows(build(), 5)
    config, kept = ExitConfig(exit_layer=1, recall_layers=(2, 4)), KeptStates(tmp_path, "this target", is_small=True)
    made = collect_cached(target, kept, config, rows)
    (path,) = tmp_path.iterdir()
    states = {name: tensor for name, tensor in load_file(path).items() if name.split(".")[-1].isdigit()}
    assert {tensor.dtype for tensor in states.values()} == {torch.float8_e4m3fn}
    assert len(states) == 5 * 4
    for exact, held in zip(collect(target, config, rows), made, strict=True):
        largest = exact.taps.float().abs().amax(-1, keepdim=True)
        error = (load(held.taps).float() - exact.taps.float()).abs()
        assert bool((error <= (2**-4 + 2**-8) * exact.taps.float().abs() + largest / 448 * 2**-10).all())
        assert error.any()
        assert torch.equal(held.argmaxes, exact.argmaxes)


def test_several_exits_from_one_run(tmp_path: Path, watched: list[tuple[int, list[int]]]) -> None:
    """The target writes once and keeps what all of them need; every exit is saved under its name and loads."""
    tokenizer = byte_tokenizer(None)
    build_model("llama", vocab_size=len(tokenizer), eos_token_id=1).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "x" * (1 + i % 7) + str(i)}) + "\n" for i in range(40)))
    changes = {"deep": {"exit_layer": 2, "recall_layers": (3, 6)}, "other": {"form": "recursive", "exit_layer": 0}}
    config = settings(
        tmp_path / "run", model=str(tmp_path / "model"), data={"num_tokens": 300, "prompts": str(prompts)}, max_steps=2,
        also=changes, exit="first", draft_vocab_size=None,
    )  # fmt: skip
    folder = train_exits(config)
    assert watched == []
    model = EarlyExitModel.from_pretrained(tmp_path / "model", exits=str(folder))
    assert {name: (head.exit_layer, head.config.form) for name, head in model.exits.items()} == {
        "first": (1, "chain"), "deep": (2, "chain"), "other": (0, "recursive"),
    }  # fmt: skip
    with pytest.raises(ValueError, match="also: states is for the whole run"):
        settings(tmp_path / "run", also={"x": {"states": "elsewhere"}})
