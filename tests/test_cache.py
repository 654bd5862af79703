"""The one cache of drafting and verification: its slots, its rollback, and what runs through which layer how often."""

from typing import Any

import pytest
import torch
from torch import nn

from selfspec.cache import KVCache
from selfspec.decode import decode
from selfspec.drafter import DRAFTERS, ChainDrafter
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.target import Target
from tests.conftest import (
    ScriptedDrafter,
    autoregressive,
    build_model,
    every_outcome,
    generate,
    new_state,
    prompt_of,
    shallow_target_of,
    target_of,
)


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).view(1, 1, -1, 1)


def test_update_writes_at_the_pass_and_reads_what_it_opened() -> None:
    """Keys and values land in the opened slots, each layer's apart; the views end where the pass said."""
    cache = KVCache(2, 8)
    cache.open(0, 3, 3)
    keys, values = cache.update(rows(1, 2, 3), rows(4, 5, 6), 0)
    cache.advance(range(0, 1), 3)
    assert (keys.flatten().tolist(), values.flatten().tolist()) == ([1, 2, 3], [4, 5, 6])
    assert cache.lengths == [3, 0]
    cache.open(3, 1, 4)
    keys, _ = cache.update(rows(9), rows(9), 0)
    assert keys.flatten().tolist() == [1, 2, 3, 9]
    assert cache.num_bytes == 2 * 8 * 4  # the other layer has not been written


def test_rollback_cuts_every_layer_and_copies_nothing() -> None:
    """Longer layers are cut, shorter ones stay, and the next pass overwrites the forgotten slots in place."""
    cache = KVCache(3, 8)
    cache.lengths = [6, 5, 2]
    cache.open(0, 6, 6)
    keys, _ = cache.update(rows(1, 2, 3, 4, 5, 6), rows(0, 0, 0, 0, 0, 0), 0)
    place = keys.data_ptr()
    cache.rollback(4)
    assert cache.lengths == [4, 4, 2]
    cache.open(4, 1, 5)
    keys, _ = cache.update(rows(9), rows(0), 0)
    assert keys.flatten().tolist() == [1, 2, 3, 4, 9]
    assert keys.data_ptr() == place


def test_compact_moves_the_accepted_rows_of_a_tree() -> None:
    """Row path[i] of the pass becomes its i-th slot; what lies before the pass stays; a chain moves nothing."""
    cache = KVCache(1, 10)
    cache.open(0, 8, 8)
    keys, values = cache.update(rows(*range(8)), rows(*range(10, 18)), 0)
    cache.compact(2, [0, 1, 2], range(1))
    assert keys.flatten().tolist() == list(range(8))
    cache.compact(2, [0, 2, 5], range(1))
    assert keys.flatten().tolist()[:5] == [0, 1, 2, 4, 7]
    assert values.flatten().tolist()[:5] == [10, 11, 12, 14, 17]


def test_overflow_is_an_error_with_values() -> None:
    """A pass beyond the capacity is refused before anything is written; so is a cache without room."""
    cache = KVCache(1, 4)
    with pytest.raises(ValueError, match="holds 4 slots, a pass needs 5"):
        cache.open(2, 3, 5)
    with pytest.raises(ValueError, match="capacity must be positive, got 0"):
        KVCache(1, 0)


def test_layers_of_different_lengths_cannot_run_together() -> None:
    """run_layers over layers that hold different numbers of rows raises instead of reading the wrong slots."""
    target = target_of("llama")
    cache = KVCache(target.num_layers, 16)
    with torch.no_grad():
        target.run_layers(target.embed(torch.tensor([[5, 6]])), 0, 2, cache)
        with pytest.raises(ValueError, match="hold different numbers of rows"):
            target.run_layers(target.embed(torch.tensor([[7]])), 0, 4, cache)


def assert_equal_to_prefill(target: Target, cache: KVCache, tokens: list[int]) -> None:
    """Contents and next logits of ``cache`` are those of a prefill of ``tokens`` but the last."""
    fresh, held = KVCache(target.num_layers, len(tokens) + 1), len(tokens) - 1
    target.run_layers(target.embed(torch.tensor([tokens[:-1]])), 0, target.num_layers, fresh)
    assert cache.lengths[: target.num_layers] == fresh.lengths == [held] * target.num_layers
    for layer in range(target.num_layers):
        for ours, theirs in ((cache._keys, fresh._keys), (cache._values, fresh._values)):
            torch.testing.assert_close(ours[layer][:, :, :held], theirs[layer][:, :, :held], rtol=1e-4, atol=1e-4)
    last = target.embed(torch.tensor([tokens[-1:]]), held)
    expected = target.logits(target.run_layers(last, 0, target.num_layers, fresh))
    found = target.logits(target.run_layers(last, 0, target.num_layers, cache))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    cache.rollback(held)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("has_decoys", [False, True], ids=["chain", "tree"])
def test_cache_after_rollback_equals_a_fresh_prefill(family: str, has_decoys: bool) -> None:
    """After every cycle, whatever was rejected, every layer's keys, values and next logits are a fresh prefill's."""
    target, prompt = target_of(family), prompt_of(6)
    text = autoregressive(target, prompt, 24)
    state = new_state(target, prompt, 24)
    drafter = ScriptedDrafter(text, 3, every_outcome(6, 24, 3), has_decoys)
    with torch.no_grad():
        for _ in decode(target, drafter, state):
            assert_equal_to_prefill(target, state.cache, state.tokens)
    assert state.tokens == text
    assert state.stats.num_accepted < state.stats.num_drafted


def test_cache_after_drafting_from_an_exit_equals_a_fresh_prefill() -> None:
    """The same where drafting has filled the shallow layers ahead of the deep ones, with partly accepted drafts."""
    target, prompt = shallow_target_of("llama"), prompt_of(6)
    state = new_state(target, prompt, 30)
    with torch.no_grad():
        for _ in decode(target, ChainDrafter(target, ExitHead.untrained(target, 2), 3), state):
            assert_equal_to_prefill(target, state.cache, state.tokens)
    assert 0 < state.stats.num_accepted < state.stats.num_drafted


def keep_rejected(self: KVCache, length: int, layers: range | None = None) -> None:
    """The planted bug: the row of one rejected draft stays."""
    if layers is not None:  # of a head, which has none here
        return
    longest = max(self.lengths[:-1])
    self.lengths = [min(held, length + (longest > length)) for held in self.lengths]


@pytest.mark.parametrize("bug", ["no-rollback", "one-stale-row", "no-compaction"])
def test_a_stale_cache_row_is_caught(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """Planted bugs: rejected rows that stay, or a tree's rows left where they were, change the text."""
    target, prompt = target_of("llama"), prompt_of(6)
    text = autoregressive(target, prompt, 40)
    drafter = ScriptedDrafter(text, 3, every_outcome(6, 40, 3), has_decoys=bug == "no-compaction")
    healthy = generate(target, drafter, prompt, 40)
    assert healthy.tokens == text
    if bug == "no-compaction":
        monkeypatch.setattr(KVCache, "compact", lambda *_: None)
    else:
        monkeypatch.setattr(KVCache, "rollback", keep_rejected if bug == "one-stale-row" else lambda *_: None)
    state = new_state(target, prompt, 40)
    state.cache = KVCache(target.num_layers + 1, 400)
    for _ in decode(target, drafter, state):
        pass
    assert state.tokens != text


def count_calls(layers: nn.ModuleList) -> tuple[list[list[int]], list[Any]]:
    """Hooks on the base's own layers that note the number of rows of each call."""
    calls: list[list[int]] = [[] for _ in layers]

    def note(layer: int) -> Any:
        return lambda _module, args, _output: calls[layer].append(args[0].shape[1])

    return calls, [module.register_forward_hook(note(i)) for i, module in enumerate(layers)]


@pytest.mark.parametrize("form", [None, "chain", "recursive", "parallel"])
@pytest.mark.parametrize("exit_layer", [1, 2, 4])
def test_every_token_passes_every_layer_once(exit_layer: int, form: str | None) -> None:
    """Counting hooks on the base, added after the Target was built: layers < N see every token once while drafting (of
    a chain row by row, of other drafts the drafted ones together) and never again, layers >= N once a cycle in the
    verify pass; no prefix is recomputed and the head's block is not counted. Form None is an untrained exit's chain."""
    target = Target(build_model("llama"))
    prompt, draft_len = prompt_of(9), 3
    head = ExitHead.untrained(target, exit_layer)
    if form is not None:
        recalled, rank = (exit_layer, 6), 4 * (form == "parallel")
        config = ExitConfig(
            exit_layer=exit_layer, recall_layers=recalled, form=form, num_steps=3, correction_rank=rank, lora_rank=2
        )
        head = ExitHead(target, "x", config, build_adapter(target, config))
    calls, handles = count_calls(target.base.model.layers)
    state = new_state(target, prompt, 20)
    cycles = []
    for _ in decode(target, DRAFTERS[form or "chain"](target, head, draft_len, 0.0), state):
        cycles.append((state.stats.num_drafted, [list(c) for c in calls]))
        for c in calls:
            c.clear()
    assert all(c == [len(prompt)] for c in cycles[0][1])
    num_drafted = 0
    for total, by_layer in cycles[1:]:
        drafted, num_drafted = total - num_drafted, total
        for layer, counted in enumerate(by_layer):
            shallow = [1, drafted] if form in ("recursive", "parallel") and drafted else [1] * (drafted + 1)
            assert counted == (shallow if layer < exit_layer else [drafted + 1])
    assert num_drafted > draft_len
    for handle in handles:
        handle.remove()
