"""Layers with packed products, run by Triton's kernels under the interpreter: they are the family's own modules."""

import logging
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfspec import EarlyExitModel, packed
from selfspec.cache import KVCache
from selfspec.kernels import dispatch
from selfspec.target import Target
from tests.conftest import build_model, prompt_of, random_parents
from tests.test_engine import PROMPT, trained_exit

IS_SKIPPED = torch.cuda.is_available() or dispatch._missing_for_triton("cpu") is not None
pytestmark = [
    pytest.mark.skipif(IS_SKIPPED, reason="kernels run on a GPU here, or not at all"),
    pytest.mark.usefixtures("by_triton"),
]
WARNING = "layers run by their modules, slower: "


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch, quick_interpreter: None) -> None:
    from selfspec.kernels import attention_triton

    monkeypatch.setenv("SELFSPEC_KERNELS", "triton")
    monkeypatch.setattr(attention_triton, "num_splits", lambda *_: 1)  # the interpreter is slow


def small(family: str = "llama", **overrides: Any) -> PreTrainedModel:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = build_model(family, **{"num_hidden_layers": 2, **heads, **overrides})
    with torch.no_grad():  # whatever a family begins with as zeros or ones
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 4)
    return model


def passes(target: Target, width: int | None = None, pads: Tensor | None = None) -> tuple[list[Tensor], KVCache]:
    """States after a prompt, single rows, a chain and a tree behind it, and the cache they leave."""
    count = 1 if pads is None else len(pads)
    ids = torch.tensor([prompt_of(18, seed=row) for row in range(count)])
    cache, states = KVCache(target.num_layers, 30, width, pads), list[Tensor]()
    for first, last in ((0, 9), (9, 10), (10, 14)):
        embedded = target.embed(ids[:, first:last], first, pads=pads)
        states.append(target.run_layers(embedded, 0, target.num_layers, cache))
    if pads is None and width is None:
        tree = target.embed(ids[:, 14:], 14)
        states.append(target.run_layers(tree, 0, target.num_layers, cache, random_parents(4, seed=3)))
    return states, cache


@pytest.mark.parametrize(("family", "place"), [
    ("llama", {"pads": torch.tensor([0, 3])}), ("qwen2", {}), ("qwen3", {"width": 4}), ("mistral", {}),
])  # fmt: skip
@torch.no_grad()
def test_passes_are_the_modules_own(monkeypatch, family, place):
    """Prompt, chain, tree, exact mode and padded batches; groups, biases, norms of heads and windows included."""
    target = Target(small(family, num_key_value_heads=2 if family == "qwen2" else 1), check=False)
    assert all(target.packed._layers[layer] is not None for layer in target.layers)
    found, cache = passes(target, **place)
    monkeypatch.setenv("SELFSPEC_KERNELS", "reference")
    target.notice_changes()
    assert not target.packed.is_in_use
    expected, plain = passes(target, **place)
    text = slice(3, None)  # what stands in the padding is nobody's
    found[0], expected[0] = found[0][:, text], expected[0][:, text]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(cache._keys + cache._values, plain._keys + plain._values, strict=True):
        torch.testing.assert_close(ours[:, :, text], theirs[:, :, text], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "engine", "settings"), [
    ("layer-1", "off", {}), ("trained", "off", {"temperature": 1.0, "seed": 2}), ("trained", "calls", {"exact": True}),
])  # fmt: skip
def test_texts_are_those_of_the_loop(monkeypatch, name, engine, settings):
    """Through the loop and the engine's cycles, the layers and the exit's block too: the text of the modules."""
    monkeypatch.setenv("SELFSPEC_KERNELS", "reference")
    model = EarlyExitModel.from_target(small(), [1])
    model.exits["trained"] = trained_exit(model.target, exit_layer=1, recall_layers=(1, 2), draft_len=2)
    settings |= {"max_new_tokens": 6, "draft_len": 2, "exit": name}
    expected = model.generate(PROMPT[:, :5], **settings).sequences
    runs, run = list[int](), packed._Packed.run
    monkeypatch.setattr(packed._Packed, "run", lambda self, *a: (runs.append(a[4]), run(self, *a))[1])
    monkeypatch.setenv("SELFSPEC_KERNELS", "triton")
    monkeypatch.setenv("SELFSPEC_ENGINE", engine)
    assert torch.equal(model.generate(PROMPT[:, :5], **settings).sequences, expected)
    assert set(runs) == set(range(2 + (name == "trained")))


@torch.no_grad()
def test_exact_mode_does_not_see_where_a_pass_is_divided(matrix_instructions):
    """A range of layers in parts, as drafting and verifying run it, has the bits of the whole; rows are independent."""
    target = Target(small("qwen3"), check=False)
    assert target.is_row_exact(2)
    hidden = target.embed(torch.tensor([prompt_of(2)]))
    caches = [KVCache(2, 12, 2) for _ in range(2)]
    whole = target.run_layers(hidden, 0, 2, caches[0])
    parts = target.run_layers(target.run_layers(hidden, 0, 1, caches[1]), 1, 2, caches[1])
    assert torch.equal(parts, whole)


# ---- the base -----------------------------------------------------------------------------------------------------


def test_the_base_stays_what_it_was(tmp_path):
    """Names, values and modules; a product's weights are one piece of memory, and there is no other copy of them."""
    base = small("qwen2", num_attention_heads=4, num_key_value_heads=2)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    modules, num_bytes = [type(m) for m in base.modules()], sum(t.nbytes for t in before.values())
    Target(base, check=False)
    after = base.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [type(m) for m in base.modules()] == modules
    layer = base.model.layers[1]
    for group in (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]):
        parent = layer.self_attn if len(group) == 3 else layer.mlp
        weights = [getattr(parent, name).weight for name in group]
        assert len({w.untyped_storage().data_ptr() for w in weights}) == 1
        assert weights[0].untyped_storage().nbytes() == sum(w.nbytes for w in weights)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in after.values()}
    assert sum(storages.values()) == num_bytes
    base.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], value) for name, value in before.items())


@torch.no_grad()
def test_an_edited_weight_is_heeded_and_a_moved_one_packed_again():
    base = small()
    target = Target(base, check=False)
    addresses = [p.data_ptr() for p in base.parameters()]
    other = Target(base, check=False)  # finds them packed
    assert [p.data_ptr() for p in base.parameters()] == addresses
    weight = base.model.layers[0].self_attn.k_proj.weight
    weight.data = 2 * weight.data
    base.model.layers[0].mlp.up_proj.weight.mul_(0.5)
    expected = base.model(PROMPT[:, :4]).last_hidden_state
    for each in (target, other):
        each.notice_changes()
        assert weight.untyped_storage().nbytes() > weight.nbytes
        states = each.run_layers(each.embed(PROMPT[:, :4]), 0, 2, KVCache(2, 20))
        torch.testing.assert_close(each.norm(states), expected, rtol=1e-4, atol=1e-4)


def test_addresses_stay_as_long_as_nobody_moves_weights():
    """Captured graphs know them: an exit's block is packed when it is made, and a later text packs nothing again."""
    target = Target(small(), check=False)
    blocks = trained_exit(target, exit_layer=1, recall_layers=(1, 2)).blocks
    assert all(target.packed._layers[module] is not None for module in blocks)
    parameters = [p for module in (target.base, *blocks) for p in module.parameters()]
    addresses = [p.data_ptr() for p in parameters]
    for _ in range(2):
        target.notice_changes()
        assert [p.data_ptr() for p in parameters] == addresses


# ---- what is left to the modules ----------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message.partition(WARNING)[2] for r in caplog.records if WARNING in r.message]


@torch.no_grad()
def test_a_hooked_layer_is_run_by_its_modules(caplog):
    """Hooks see every pass, whenever they were added; the other layers stay packed, and the log says it once."""
    target, calls = Target(small(), check=False), list[int]()

    def states() -> Tensor:
        target.notice_changes()
        return target.run_layers(target.embed(PROMPT[:, :2]), 0, 2, KVCache(2, 8))

    expected, mlp = states(), target.base.model.layers[1].mlp
    with mlp.register_forward_hook(lambda *_: calls.append(1)), caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch.testing.assert_close(states(), expected, rtol=1e-4, atol=1e-4)
        assert [target.packed._layers[layer] is not None for layer in target.layers] == [True, False]
    assert len(calls) == 2
    assert lines(caplog) == ["mlp has hooks"]
    assert torch.equal(states(), expected)
    with target.base.model.layers[1].register_forward_hook(lambda *_: calls.append(1)):  # in the middle of a text
        target.run_layers(target.embed(PROMPT[:, :2]), 0, 2, KVCache(2, 8))
    assert len(calls) == 3


def adapted(base: PreTrainedModel) -> PreTrainedModel:
    config = peft.LoraConfig(target_modules=r"model\.layers\.1\.self_attn\.q_proj")
    return peft.get_peft_model(base, config).base_model.model


def tied(base: PreTrainedModel) -> PreTrainedModel:
    first, second = base.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    return base


def mixed(base: PreTrainedModel) -> PreTrainedModel:
    base.model.layers[1].input_layernorm.double()
    return base


def biased(base: PreTrainedModel) -> PreTrainedModel:
    base.model.layers[0].self_attn.q_proj.bias = nn.Parameter(torch.zeros(32))
    return base


@pytest.mark.parametrize(("change", "reason", "where"), [
    (adapted, "self_attn.q_proj is of the class Linear", [1]), (tied, "its weights are shared", [0, 1]),
    (mixed, "its weights are of", [1]), (biased, "1 of 3 maps that belong together have a bias", [0]),
])  # fmt: skip
def test_what_cannot_be_packed_is_said_and_left_alone(caplog, change, reason, where):
    base = change(small()).eval()
    places = [p.data_ptr() for layer in where for p in base.model.layers[layer].parameters()]
    with caplog.at_level(logging.WARNING):
        target = Target(base, check=False)
    (line,) = lines(caplog)
    assert line.startswith(reason)
    assert [i for i, layer in enumerate(target.layers) if target.packed._layers[layer] is None] == where
    assert [p.data_ptr() for layer in where for p in base.model.layers[layer].parameters()] == places


def test_other_families_are_said_to_be_slower(caplog):
    with caplog.at_level(logging.WARNING):
        Target(build_model("olmo2", num_hidden_layers=2), check=False)
    assert lines(caplog) == ["olmo2 is not of the Llama kind"]


def test_the_check_at_load_gives_up_layers_that_differ(monkeypatch, caplog):
    """A planted fault in a packed layer: the model is run by its modules, and says why."""
    norm = packed._norm
    monkeypatch.setattr(packed, "_norm", lambda hidden, *a: (lambda s, n: (s, 1.01 * n))(*norm(hidden, *a)))
    with caplog.at_level(logging.WARNING):
        target = Target(small(num_hidden_layers=1))
    target.notice_changes()
    assert not target.packed.is_in_use
    assert lines(caplog)[0].startswith("packed they differ from the family's own (logit gap")
