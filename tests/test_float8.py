"""Keys and values in eight bits: rounded once, the same with drafts and without."""

from typing import Any

import pytest
import torch

from selfspec import EarlyExitModel, float8, packed
from selfspec.cache import KVCache
from selfspec.decode import DecodeState, decode
from selfspec.kernels import dispatch
from selfspec.target import Target
from tests.conftest import ScriptedDrafter, build_model, every_outcome, prompt_of, shallow_target_of
from tests.test_engine import PROMPT, trained_exit
from tests.test_packed import IS_SKIPPED, by_triton, small  # noqa: F401  (a fixture)

FLOAT8 = {"kv_cache_dtype": "float8", "max_new_tokens": 30}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- rounding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-3, 1.0, 300.0, 1e5])
def test_scales_are_powers_of_two_and_leave_room(size):
    """A head's own; what is stored differs by half a step of three bits at most, what is too large is cut off."""
    states = size * random(2, 3, 5, 8) * torch.tensor([1.0, 4.0, 30.0])[:, None, None]
    scale = float8.scale_of(states)
    assert scale.shape == (2, 3, 1, 1)
    assert bool((scale.log2() % 1 == 0).all())
    fraction = states.abs().amax((2, 3), keepdim=True) / (scale * float8.LARGEST)
    assert bool((fraction <= 0.5).all())
    assert bool(((fraction > 0.25) | (scale == float8.LEAST)).all())
    stored = float8.to_bytes(states, scale)
    assert stored.dtype == torch.uint8
    found = float8.from_bytes(stored, scale, torch.float32)
    assert bool(((found - states).abs() <= states.abs() / 16 + scale * 2**-10).all())
    assert torch.equal(float8.from_bytes(stored, scale, torch.bfloat16).float(), found)  # nothing is rounded again
    cut = float8.from_bytes(float8.to_bytes(1e9 * states, scale), scale, torch.float32)
    assert torch.equal(cut, states.sign() * scale * float8.LARGEST)


def test_a_scale_is_the_prompts_for_good():
    """Later passes, which speculation groups in other ways, do not change what anything is stored as."""
    cache, states = KVCache(1, 16, is_float8=True), random(2, 1, 2, 8, 4)
    cache.open(0, 4, 4)
    cache.update(*states[:, :, :, :4], 0)
    before = cache.scales(0).clone()
    cache.open(4, 4, 8)
    keys, values = cache.update(*(50 * states[:, :, :, 4:]), 0)
    assert torch.equal(cache.scales(0), before)
    assert keys.dtype == torch.float32
    at_once = KVCache(1, 16, is_float8=True)
    at_once.open(0, 4, 4)
    at_once.update(*states[:, :, :, :4], 0)
    for row in range(4, 8):
        at_once.open_at(torch.tensor([row]))
        again = at_once.update(*(50 * states[:, :, :, row : row + 1]), 0)
    assert torch.equal(again[0][:, :, :8], keys)
    assert torch.equal(again[1][:, :, :8], values)
    assert cache.num_bytes == 2 * 2 * 16 * 4


def test_rows_of_padding_have_no_say_in_a_scale():
    """What they hold depends on where a pass is divided, and so on whether drafts are made."""
    scales = []
    for padding in (0.0, 1e4):
        cache, states = KVCache(1, 16, 4, is_float8=True), random(2, 1, 2, 4, 4)
        states[:, :, :, 2:] = padding
        cache.open(0, 4, 16, num_kept=2)
        cache.update(*states, 0)
        scales.append(cache.scales(0))
    assert torch.equal(*scales)


def test_batches_are_refused():
    with pytest.raises(NotImplementedError, match="a float8 cache holds one sequence"):
        KVCache(1, 8, pads=torch.tensor([0, 1]), is_float8=True)
    with pytest.raises(NotImplementedError, match="a float8 cache holds one sequence"):
        KVCache(1, 8, is_float8=True).spread(torch.tensor([0, 1]))


# ---- texts --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    made = EarlyExitModel.from_target(shallow_target_of("llama").base, [2, 4])
    made.exits["trained"] = trained_exit(made.target)
    return made


@pytest.mark.parametrize("engine", ["off", "calls"])
@pytest.mark.parametrize("settings", [
    {"exit": "layer-4"}, {"exit": "trained"}, {"exit": "trained", "temperature": 1.0, "seed": 3},
])  # fmt: skip
def test_a_text_is_that_of_plain_decoding_with_such_a_cache(monkeypatch, model, engine, settings):
    """By the loop and by the engine's cycles; another text than with the model's own dtype."""
    monkeypatch.setenv("SELFSPEC_ENGINE", engine)
    for prompt in (PROMPT, PROMPT[:, :2]):  # of fewer rows than exact mode pads passes to
        drafted = model.generate(prompt, draft_len=3, **FLOAT8, **settings)
        assert 0 < drafted.stats.num_accepted < drafted.stats.num_drafted
        plain = model.generate(prompt, draft="off", draft_len=3, **FLOAT8, **settings)
        assert torch.equal(drafted.sequences, plain.sequences)
    wide = model.generate(prompt, draft_len=3, **(FLOAT8 | {"kv_cache_dtype": None}), **settings)
    assert not torch.equal(wide.sequences, plain.sequences)


@pytest.mark.parametrize(
    ("family", "size"),
    [("llama", {"hidden_size": 64, "num_hidden_layers": 4}), *((name, {}) for name in ("qwen3", "gemma2", "gpt2"))],
)
def test_families_read_such_a_cache(family, size):
    """The first would go through the CPU's kernels, which do not: it is run by its modules."""
    model = EarlyExitModel.from_target(build_model(family, **size), [3])
    assert model.target.fused.is_in_use == (bool(size) and dispatch.implementation() == "cpu")
    drafted, plain = (model.generate(PROMPT, draft_len=2, draft=draft, **FLOAT8) for draft in (None, "off"))
    assert drafted.stats.num_drafted
    assert torch.equal(drafted.sequences, plain.sequences)


def test_trees_move_bytes():
    """A tree's accepted rows are moved as they are stored, never rounded again."""
    target, prompt = shallow_target_of("llama"), prompt_of(6)

    def text(drafter: Any) -> DecodeState:
        cache = KVCache(target.num_layers + 1, 60, 8, is_float8=True)
        state = DecodeState(prompt.copy(), cache, 30, target.vocab_size, torch.device("cpu"))
        for _ in decode(target, drafter, state):
            pass
        return state

    plain = text(ScriptedDrafter(prompt, 3))
    drafted = text(ScriptedDrafter(plain.tokens, 3, every_outcome(6, 24, 3), has_decoys=True))
    assert drafted.tokens == plain.tokens
    assert 0 < drafted.stats.num_accepted < drafted.stats.num_drafted
    for layer in range(target.num_layers):
        for ours, theirs in ((drafted.cache._keys, plain.cache._keys), (drafted.cache._values, plain.cache._values)):
            assert torch.equal(ours[layer][:, :, :29], theirs[layer][:, :, :29])


@pytest.mark.skipif(IS_SKIPPED, reason="kernels run on a GPU here, or not at all")
@pytest.mark.usefixtures("by_triton")
@torch.no_grad()
def test_the_kernel_reads_what_is_stored(monkeypatch):
    """A packed layer hands float8 to Triton's attention: its states are those of attention over what it stands for."""
    base, states, seen = small(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2), [], list[Any]()
    attention_weights: Any = base.model.layers[0].self_attn
    for weight, by in ((attention_weights.k_proj.weight, 4), (attention_weights.v_proj.weight, 32)):
        weight[8:] *= by  # scales differ
    target = Target(base, check=False)
    attention = packed.dispatch.attention
    monkeypatch.setattr(packed.dispatch, "attention", lambda q, k, *a: (seen.append(k.dtype), attention(q, k, *a))[1])
    attend = packed._attend
    dequantised = lambda q, slot, cache, mask, scale: attention(q, *cache.read(slot, q.dtype), mask, scale)  # noqa: E731
    for choice in (attend, dequantised):
        monkeypatch.setattr(packed, "_attend", choice)
        cache = KVCache(1, 16, is_float8=True)
        for first, last in ((0, 5), (5, 8)):
            states.append(target.run_layers(target.embed(PROMPT[:, first:last]), 0, 1, cache))
    assert seen == [torch.float8_e4m3fn] * 2
    assert len(cache.scales(0).unique()) == 3  # by head, and of keys and values
    for ours, theirs in zip(states[:2], states[2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# ---- settings -----------------------------------------------------------------------------------------------------


def test_it_is_a_setting_with_names(model):
    with pytest.raises(ValueError, match="kv_cache_dtype='int8'; choose float8, or None"):
        model.generate(PROMPT, kv_cache_dtype="int8", max_new_tokens=2)
    stream = model.stream(PROMPT, **FLOAT8)
    assert stream.settings["kv_cache_dtype"] == "float8"
    assert stream.settings["exact"]
    assert not model.stream(PROMPT, exact=False, **FLOAT8).settings["exact"]
    theirs = model.base.generate(PROMPT, custom_generate=model.custom_generate, do_sample=False, **FLOAT8)
    assert torch.equal(theirs, model.generate(PROMPT, **FLOAT8).sequences)
