"""Exits on disk: what is saved comes back bit for bit, and whatever does not fit is refused in one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from selfspec import EarlyExitModel
from selfspec.drafter import DRAFTERS, ChainDrafter
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.pretrained import DEFAULT_HUB_ID
from selfspec.storage import SIDECAR, WEIGHTS, ExitMismatchError, fingerprint, load_exits, save_exit
from selfspec.target import Target
from tests.conftest import build_model, generate, prompt_of, target_of

CONFIG = ExitConfig(
    exit_layer=1, recall_layers=(2, 4, 6), num_steps=2, draft_vocab=tuple(range(3, 80)), lora_rank=4, lora_alpha=8
)


def trained_exit(target: Target, name: str = "small", config: ExitConfig = CONFIG) -> ExitHead:
    """An exit with random values in every trained tensor."""
    adapter = build_adapter(target, config)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in adapter.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter).mul(0.1).bfloat16())
    return ExitHead(target, name, config, adapter)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = target_of("llama")
    return save_exit(trained_exit(target), target, tmp_path / "small", metrics={"speedup": 1.5})


def edit(folder: Path, **changes: object) -> None:
    path = folder / SIDECAR
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_saved_exit_drafts_the_same_tokens(folder):
    """Saving and loading changes no draft: the same drafts are accepted in the same cycles."""
    target, prompt = target_of("llama"), prompt_of(9)
    before = generate(target, ChainDrafter(target, trained_exit(target), 3), prompt, 24)
    loaded = load_exits(target, folder)["small"]
    after = generate(target, ChainDrafter(target, loaded, 3), prompt, 24)
    assert after.tokens == before.tokens
    assert after.stats.accepted_histogram == before.stats.accepted_histogram
    assert loaded.metadata["metrics"] == {"speedup": 1.5}


@pytest.mark.parametrize("form", ["recursive", "parallel"])
def test_a_saved_exit_of_another_form_drafts_the_same_tokens(tmp_path, form):
    """Its feedback or correction comes back, and without being asked it drafts in its own form."""
    target, prompt = target_of("llama"), torch.tensor([prompt_of(9)])
    config = CONFIG.model_copy(update={"form": form, "correction_rank": 8 * (form == "parallel"), "draft_len": 3})
    made = trained_exit(target, "made", config)
    save_exit(made, target, tmp_path / "made")
    loaded = load_exits(target, tmp_path / "made")["made"]
    kept = [h.correction.after if form == "parallel" else h.bridge.feedback for h in (loaded, made)]
    assert torch.equal(kept[0].weight, kept[1].weight)
    before, after = (
        EarlyExitModel(target, {"made": exit_head}).generate(prompt, max_new_tokens=24) for exit_head in (made, loaded)
    )
    assert after.sequences.tolist() == before.sequences.tolist()
    assert after.stats.accepted_histogram == before.stats.accepted_histogram
    drafter, _ = EarlyExitModel(target, {"made": loaded}).prepare(prompt)
    assert type(drafter) is DRAFTERS[form]


def test_only_the_exit_is_written_and_a_bare_target_refuses_it(folder):
    """No base weight is in the file; PEFT cannot put the adapter on the bare model by mistake."""
    keys = load_file(folder / WEIGHTS)
    assert all("lora_" in k or any(n in k for n in ("bridge", "exit_norm", "confidence")) for k in keys)
    assert not any("embed" in k or "base_layer" in k for k in keys)
    with pytest.raises(ValueError, match="not found in the base model"):
        PeftModel.from_pretrained(build_model("llama"), folder)


def test_several_exits_live_in_one_folder_and_the_fastest_is_the_default(tmp_path):
    target = target_of("llama")
    for name, speedup in (("slow", 1.1), ("quick", 1.4)):
        save_exit(trained_exit(target, name), target, tmp_path / "all" / name, metrics={"speedup": speedup})
    model = EarlyExitModel.from_target(target.base, tmp_path / "all")
    assert sorted(model.exits) == ["quick", "slow"]
    assert model.default_exit is model.exits["quick"]
    model.save_pretrained(tmp_path / "again")
    assert sorted(p.name for p in (tmp_path / "again").iterdir()) == ["quick", "slow"]
    assert fingerprint(target.base) == fingerprint(build_model("llama"))


def test_another_base_of_the_same_shapes_is_refused_unless_allowed(folder):
    other = Target(build_model("llama", seed=1))
    with pytest.raises(ExitMismatchError, match=r"trained for other weights.*allow_base_mismatch=True"):
        load_exits(other, folder)
    assert load_exits(other, folder, allow_base_mismatch=True)["small"].exit_layer == 1


def test_the_fingerprint_ignores_dtype_and_sees_one_changed_tensor():
    model = build_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    before = fingerprint(model)
    assert fingerprint(model.bfloat16()) == before
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.mul_(1.5)
    assert fingerprint(model) != before


def test_other_shapes_are_refused_naming_both(folder):
    wide = Target(build_model("llama", hidden_size=64, num_hidden_layers=4))
    with pytest.raises(ExitMismatchError, match=r"6 layers, hidden 32.*4 layers, hidden 64"):
        load_exits(wide, folder)


def test_metadata_that_disagrees_with_the_adapter_is_refused(folder):
    head = json.loads((folder / SIDECAR).read_text())["head"]
    edit(folder, head={**head, "lora_rank": 8})
    with pytest.raises(ExitMismatchError, match=r"has r 4, the sidecar 8"):
        load_exits(target_of("llama"), folder)
    edit(folder, head={**head, "recall_layers": [2, 6]})
    with pytest.raises(ExitMismatchError, match="missing or misshapen"):
        load_exits(target_of("llama"), folder)


def test_a_layer_out_of_range_is_refused_with_the_range(folder):
    head = json.loads((folder / SIDECAR).read_text())["head"]
    edit(folder, head={**head, "exit_layer": 6})
    with pytest.raises(ValueError, match=r"exit layer 6 is not in 0\.\.5"):
        load_exits(target_of("llama"), folder)


def test_damaged_weights_are_refused_with_their_path(folder):
    path = folder / WEIGHTS
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ExitMismatchError, match=rf"{WEIGHTS}.*truncated"):
        load_exits(target_of("llama"), folder)
    flipped = bytearray(whole)
    flipped[-3] ^= 4
    path.write_bytes(flipped)
    with pytest.raises(ExitMismatchError, match="sha256"):
        load_exits(target_of("llama"), folder)


def test_missing_adapter_keys_are_refused(folder):
    import hashlib

    path = folder / WEIGHTS
    state = load_file(path)
    state.pop(next(k for k in state if "lora_B" in k))
    save_file(state, path)
    edit(folder, weights_sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(ExitMismatchError, match=r"1 tensors missing or misshapen.*lora_B"):
        load_exits(target_of("llama"), folder)


def test_a_pickle_is_never_loaded(folder):
    """With the safetensors file gone a pickle in its place is not touched."""
    torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(ExitMismatchError, match=WEIGHTS):
        load_exits(target_of("llama"), folder)


@pytest.mark.parametrize("source", ["../../nowhere", "a/../b", "no such/thing", "a/b/c", "-x/y"])
def test_names_that_leave_the_hub_are_refused(source):
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        load_exits(target_of("llama"), source)


def test_an_exit_name_with_odd_characters_is_refused(folder):
    odd = folder.with_name("a name")
    shutil.move(folder, odd)
    with pytest.raises(ValueError, match="only letters, digits"):
        load_exits(target_of("llama"), odd)


def test_an_unreachable_hub_is_one_line_with_a_remedy(monkeypatch):
    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host\nlong trace")

    monkeypatch.setattr("selfspec.storage.snapshot_download", offline)
    with pytest.raises(OSError, match=r"cannot fetch exits 'you/exits': no route to host; .*pass a folder") as caught:
        load_exits(target_of("llama"), "you/exits")
    assert "\n" not in str(caught.value)


def test_building_and_folding_an_exit_leaves_the_bases_parameters_alone():
    """PEFT freezes what it wraps; the base's own parameters keep their gradient flags, objects and values."""
    target = Target(build_model("llama"))
    before = {name: (id(p), p.requires_grad, p._version) for name, p in target.base.named_parameters()}
    assert any(flag for _, flag, _ in before.values())
    generate(target, ChainDrafter(target, trained_exit(target), 2), prompt_of(9), 8)
    assert {name: (id(p), p.requires_grad, p._version) for name, p in target.base.named_parameters()} == before


def test_untrained_exits_are_not_saved(tmp_path):
    model = EarlyExitModel.from_target(build_model("llama"), [2])
    with pytest.raises(ValueError, match="no trained exit"):
        model.save_pretrained(tmp_path)


def test_a_folder_of_something_else_is_not_overwritten(tmp_path):
    target = target_of("llama")
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        save_exit(trained_exit(target), target, tmp_path)
    assert (tmp_path / "note.txt").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["note.txt"]


def test_saving_that_fails_leaves_the_old_exit(folder, monkeypatch):
    """A full disk while writing the sidecar: the exit from before still loads, no half folder stays."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("selfspec.storage.save_file", full)
    target = target_of("llama")
    with pytest.raises(OSError, match="No space"):
        save_exit(trained_exit(target), target, folder)
    assert [p.name for p in folder.parent.iterdir()] == ["small"]
    assert load_exits(target, folder)["small"].name == "small"


@pytest.mark.parametrize("call", ["merge_adapter", "merge_and_unload"])
def test_merging_is_refused_and_writes_nothing(folder, call):
    """LoRA lies on the target's own weights: merging would change the target."""
    target = Target(build_model("llama"))
    adapter = load_exits(target, folder, allow_base_mismatch=True)["small"].adapter
    before = base_sum(target)
    with pytest.raises(NotImplementedError, match="refused"):
        getattr(adapter, call)()
    assert base_sum(target) == before


def base_sum(target: Target) -> list[float]:
    return [p.double().sum().item() for p in target.base.parameters()]


@pytest.mark.parametrize("name", ["../evil", "a name", "..", ".hidden", "a/b"])
def test_names_that_are_no_names_are_refused_before_anything_is_written(tmp_path, name):
    target = target_of("llama")
    model = EarlyExitModel(target, {name: trained_exit(target, name)})
    with pytest.raises(ValueError, match="exit name"):
        model.save_pretrained(tmp_path / "out")
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_an_exit_loads_from_inside_its_own_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert list(load_exits(target_of("llama"), ".")) == ["small"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metrics": None}, "metrics: "),
        ({"base": {"id": "x", "hidden_size": 32, "fingerprints": ["0"]}}, "base.num_layers: "),
        ({"base": {"id": "x", "hidden_size": 32, "num_layers": 6, "fingerprints": []}}, "base.fingerprints: "),
        ({"head": {**CONFIG.model_dump(), "draft_vocab": [5, 5]}}, "head.draft_vocab: .*once each"),
        ({"head": {**CONFIG.model_dump(), "draft_vocab": [-1, 5]}}, "head.draft_vocab: .*from 0 on"),
        ({"head": {**CONFIG.model_dump(), "draft_vocab": [5, 500]}}, "token 500 is beyond the vocabulary of 97"),
        ({"head": {**CONFIG.model_dump(), "lora_alpha": 800}}, "lora_alpha 8, the sidecar 800"),
    ],
)
def test_a_damaged_sidecar_is_one_line_that_names_the_entry(folder, change, message):
    edit(folder, **change)
    with pytest.raises(ExitMismatchError, match=message) as caught:
        load_exits(target_of("llama"), folder)
    assert "\n" not in str(caught.value)


def test_another_tokenizer_is_refused(tmp_path):
    """Row 5: ids would mean other tokens."""

    class Tokenizer:
        def __init__(self, size: int) -> None:
            self.vocab = {f"t{i}": i for i in range(size)}

        def get_vocab(self) -> dict[str, int]:
            return self.vocab

    target = target_of("llama")
    folder = save_exit(trained_exit(target), target, tmp_path / "small", Tokenizer(97))
    assert load_exits(target, folder, Tokenizer(97))
    with pytest.raises(ExitMismatchError, match="another tokenizer"):
        load_exits(target, folder, Tokenizer(96))


def test_another_copy_of_the_default_model_is_taken_with_a_notice(folder, monkeypatch, caplog):
    """Hub weights and those of the GGUF file have different fingerprints; the text is lossless with either."""
    sidecar = json.loads((folder / SIDECAR).read_text())
    edit(folder, base={**sidecar["base"], "id": DEFAULT_HUB_ID, "fingerprints": ["0"]})
    with pytest.raises(ExitMismatchError, match="other weights"):
        load_exits(target_of("llama"), folder)
    monkeypatch.setattr(Target, "name", DEFAULT_HUB_ID)
    assert load_exits(target_of("llama"), folder)
    assert "another copy of" in caplog.text
