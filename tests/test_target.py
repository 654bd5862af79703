"""The target in parts: the same as the whole for 14 families, refused where not, and the base is never edited."""

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForSeq2SeqLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from selfspec.cache import KVCache
from selfspec.drafter import ChainDrafter
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.proof import UnsupportedModelError, whole_and_split
from selfspec.target import Target
from tests.conftest import (
    FAMILIES,
    ScriptedDrafter,
    accepted_logits,
    autoregressive,
    build_model,
    every_outcome,
    generate,
    prompt_of,
    target_of,
)

WINDOWED = [family for family, settings in FAMILIES.items() if "sliding_window" in settings]
IDS = torch.tensor([prompt_of(24, seed=3)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_split_equals_whole(family: str, attention: str) -> None:
    """Layer by layer over the family's own modules the logits are the whole forward's to the last bit."""
    target = target_of(family)
    if attention == "sdpa" and not target.base._supports_sdpa:
        pytest.skip(f"{family} has no sdpa attention")
    implementation = target.base.config._attn_implementation
    target.base.set_attn_implementation(attention)
    try:
        whole, split = whole_and_split(target, IDS)
        assert torch.equal(whole, split)
        target.self_check()
    finally:
        target.base.set_attn_implementation(implementation)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_pieces_over_the_cache_equal_whole(family: str) -> None:
    """Prefill, passes of several rows and single rows, over any ranges of layers, give the whole forward's logits."""
    target = target_of(family)
    cache, logits, first = KVCache(target.num_layers, IDS.shape[1]), [], 0
    for num_rows in (7, 1, 5, 1, 1, 6, 3):
        hidden = target.embed(IDS[:, first : first + num_rows], first)
        for start, stop in ((0, 1), (1, 4), (4, 6)):
            hidden = target.run_layers(hidden, start, stop, cache)
        logits.append(target.logits(hidden))
        first += num_rows
    whole = target.base(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(torch.cat(logits, 1), whole.float(), rtol=1e-4, atol=2e-4)


class LeakyForCausalLM(LlamaForCausalLM):
    """A model whose layers also read the tokens, behind the back of their arguments."""

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        for layer in self.model.layers:
            layer.leak = 0.0 if input_ids is None else 0.01 * input_ids[..., None].float()
        try:
            return super().forward(input_ids=input_ids, **kwargs)
        finally:
            for layer in self.model.layers:
                layer.leak = 0.0


def add_leak(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> Any:
    return output + module.leak if isinstance(output, Tensor) else (output[0] + module.leak, *output[1:])


def test_a_family_that_cannot_be_split_is_refused_by_name() -> None:
    """Layers that depend on more than they are called with differ in parts: UnsupportedModelError names the family."""
    base = build_model("llama")
    base.__class__ = LeakyForCausalLM
    for layer in base.model.layers:
        layer.leak = 0.0
        layer.register_forward_hook(add_leak)
    with pytest.raises(UnsupportedModelError, match=r"llama: .*in parts"):
        Target(base)


def warm_attention(module: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    return sdpa_attention_forward(module, query * 1.05, *args, **kwargs)


def test_a_family_with_other_attention_is_refused_by_name() -> None:
    """A family whose attention is not the softmax attention of this package is found out by the second check."""
    AttentionInterface.register("warm", warm_attention)
    AttentionMaskInterface.register("warm", sdpa_mask)
    base = build_model("qwen3")
    base.config._attn_implementation = "warm"
    with pytest.raises(UnsupportedModelError, match="qwen3: its attention differs"):
        Target(base)


def test_models_that_do_not_fit_are_refused() -> None:
    """Training mode, encoder-decoders and models without a stack of layers each get an error that says so."""
    with pytest.raises(ValueError, match="evaluation mode"):
        Target(build_model("llama").train())
    settings = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    config = AutoConfig.for_model("t5", decoder_start_token_id=0, **settings)
    with pytest.raises(UnsupportedModelError, match="t5: encoder-decoder"):
        Target(AutoModelForSeq2SeqLM.from_config(config).eval())
    headless = build_model("llama")
    headless.model.layers = nn.ModuleList(list(headless.model.layers)[:4])
    with pytest.raises(UnsupportedModelError, match="llama: no list of 6 decoder layers"):
        Target(headless)


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("has_decoys", [False, True], ids=["chain", "tree"])
@torch.no_grad()
def test_decoding_past_a_sliding_window(family: str, has_decoys: bool, judged: list[Any]) -> None:
    """A window of 8 slots, a prompt of 5: verify passes and rollbacks across the window's edge, as chains and as trees,
    give transformers' own tokens and the whole forward's logits at every position."""
    target, prompt = target_of(family), prompt_of(5)
    assert target.config.sliding_window == 8
    text = target.base.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)[0].tolist()
    state = generate(target, ScriptedDrafter(text, 4, every_outcome(5, 20, 4), has_decoys), prompt, 20)
    assert state.tokens == text
    assert {0, 4} <= {n for n, count in enumerate(state.stats.accepted_histogram) if count}
    whole = target.base(input_ids=torch.tensor([text]), use_cache=False).logits[0].float()
    rows = accepted_logits(judged)
    assert sorted(rows) == list(range(5, 24))
    for position, row in rows.items():
        torch.testing.assert_close(row, whole[position], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_padded_sequences_side_by_side_equal_each_alone(family: str) -> None:
    """Texts of 3, 17 and 10 tokens end at one slot and go on together, past a window's edge; then one leaves."""
    target = target_of(family)
    texts = [prompt_of(size + 6, seed=size) for size in (3, 17, 10)]
    cache = KVCache(target.num_layers, 23, pads=torch.tensor([14, 0, 7]))
    ids, left = torch.tensor([[0] * (23 - len(text)) + text for text in texts]), [0, 1, 2]
    for begin, stop in ((0, 17), (17, 18), (18, 21), (21, 23)):
        if begin == 21:
            left, ids = [0, 2], ids[[0, 2]]
            cache.select(torch.tensor(left))
        hidden = target.embed(ids[:, begin:stop], begin, pads=cache.pads)
        made = target.logits(target.run_layers(hidden, 0, target.num_layers, cache))
        for row, which in enumerate(left):
            pad = 23 - len(texts[which])
            alone = target.base(input_ids=torch.tensor([texts[which]]), use_cache=False).logits[0].float()
            for slot in range(max(begin, pad), stop):
                torch.testing.assert_close(made[row, slot - begin], alone[slot - pad], rtol=1e-4, atol=2e-4)
    with pytest.raises(ValueError, match="one sequence"):
        target.run_layers(hidden, 0, target.num_layers, cache, [0, 0])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_rows_of_a_tree_equal_separate_chains(family: str) -> None:
    """Every row of a draft tree has the logits that its own chain has, and what compaction leaves goes on alike."""
    target = target_of(family)
    parents, tokens = [0, 0, 0, 1, 1, 2, 4], [11, 12, 13, 14, 15, 16, 17]
    depths = [0, 1, 1, 2, 2, 2, 3]
    cache = KVCache(target.num_layers, 32)
    target.run_layers(target.embed(IDS[:, :10]), 0, 6, cache)
    hidden = target.embed(torch.tensor([tokens]), 10, depths)
    tree = target.logits(target.run_layers(hidden, 0, 6, cache, parents))
    for row in range(len(tokens)):
        path = [row]
        while path[0]:
            path.insert(0, parents[path[0]])
        cache_of_path = KVCache(target.num_layers, 32)
        target.run_layers(target.embed(IDS[:, :10]), 0, 6, cache_of_path)
        ids = torch.tensor([[tokens[r] for r in path]])
        chain = target.logits(target.run_layers(target.embed(ids, 10), 0, 6, cache_of_path))
        torch.testing.assert_close(tree[0, path], chain[0], rtol=1e-4, atol=2e-4)
    path = [0, 1, 4, 6]  # of the last row
    cache.compact(10, path, range(target.num_layers))
    cache.rollback(14)
    ours, theirs = (
        target.logits(target.run_layers(target.embed(IDS[:, :1], 14), 0, 6, c)) for c in (cache, cache_of_path)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)


def fingerprint(base: nn.Module) -> dict[str, Any]:
    """All that decoding must leave as it is: weights, config, hooks, modules and their mode."""
    digest = hashlib.sha256()
    for name, value in base.state_dict().items():
        digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return {
        "weights": digest.hexdigest(),
        "config": base.config.to_dict(),
        "attention": base.config._attn_implementation,
        "hooks": {n: [len(getattr(m, t)) for t in tables] for n, m in base.named_modules()},
        "modules": {n: (id(m), type(m), m.training) for n, m in base.named_modules()},
        "configs": {n: id(m.config) for n, m in base.named_modules() if hasattr(m, "config")},
    }


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_oss"])
def test_the_base_is_never_edited(family: str) -> None:
    """Weights, config, hooks and modules are the same after set-up, decoding with untrained and adapter exits, an error
    from the user's criterion, and Ctrl-C in the middle of a pass; the text after all that is the text before."""
    base = build_model(family)
    before = fingerprint(base)
    target, prompt = Target(base), prompt_of(8)
    text = autoregressive(target, prompt, 12)
    heads = [ExitHead.untrained(target, 2)]
    if family != "gpt_oss":  # experts are no linear maps
        config = ExitConfig(exit_layer=2, recall_layers=(2, 6), num_steps=2, lora_rank=2)
        heads.append(ExitHead(target, "x", config, build_adapter(target, config)))
    for head in heads:
        assert generate(target, ChainDrafter(target, head, 3), prompt, 12).tokens == text
    assert fingerprint(base) == before

    def criterion(tokens: list[int]) -> bool:
        if len(tokens) > 12:
            raise RuntimeError("the user's own")
        return False

    with pytest.raises(RuntimeError, match="the user's own"):
        generate(target, ChainDrafter(target, heads[-1], 3), prompt, 12, is_stopped=criterion)
    assert fingerprint(base) == before

    layers, calls = base.get_submodule(".".join(target._path)), []

    def interrupt(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 4:
            raise KeyboardInterrupt

    for module in (layers[1], layers[4], target.norm):  # while drafting, in a verify pass, in the head
        calls.clear()
        handle = module.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(target, ChainDrafter(target, heads[0], 3), prompt, 12)
        handle.remove()
        assert fingerprint(base) == before
    assert generate(target, ChainDrafter(target, heads[0], 3), prompt, 12).tokens == text


@torch.no_grad()
def test_hooks_of_the_base_can_change_the_pass() -> None:
    """A user's hook on a layer of the base acts in decoding as it acts in the base's own forward."""
    base = build_model("llama")
    target, prompt = Target(base), prompt_of(8)
    plain = autoregressive(target, prompt, 12)
    base.model.layers[3].register_forward_hook(lambda _module, _args, output: output * 0.5)
    steered = base.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0].tolist()
    assert autoregressive(target, prompt, 12) == steered != plain
