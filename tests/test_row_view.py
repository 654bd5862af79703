"""Views in place of masks: they say what a family's own rule says, and whole generations go through the kernel."""

import logging

import pytest
import torch
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from selfspec.cache import KVCache
from selfspec.kernels import attention_reference, dispatch
from selfspec.kernels.row_view import RowView, words_of
from selfspec.masks import (
    MaskRule,
    causal_mask_function,
    padded_row_mask,
    row_mask,
    row_view,
    sliding_window,
    tree_shape,
)
from selfspec.target import Target
from tests.conftest import ScriptedDrafter, autoregressive, build_model, generate, prompt_of, random_parents

NEEDS_TRITON = "triton is not installed, or was imported before TRITON_INTERPRET was set"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, quick_interpreter: None) -> list[RowView]:
    """Decoding passes go to the Triton kernel; the views that it was given."""
    try:
        monkeypatch.setenv("SELFSPEC_KERNELS", "triton")
        dispatch.implementation("cpu")
    except ValueError:
        pytest.skip(NEEDS_TRITON)
    from selfspec.kernels import attention_triton

    seen: list[RowView] = []
    launch = attention_triton.attention_over_cache

    def spy(*arguments: object) -> torch.Tensor:
        seen.append(arguments[3])  # type: ignore[arg-type]
        return launch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_triton, "attention_over_cache", spy)
    monkeypatch.setattr(attention_triton, "num_splits", lambda *_: 1)  # the interpreter is slow
    return seen


# ---- views --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize(("first", "rows"), [(0, 1), (0, 6), (30, 1), (30, 9)])
def test_a_view_is_the_familys_mask(window, first, rows):
    """For chains, trees and padding, under the functions that families hand over."""
    rule = MaskRule(sliding_window_causal_mask_function(window) if window else causal_mask_function)
    for parents in (None, tuple(random_parents(rows, seed=rows))):
        depths, ancestors = tree_shape(parents, rows)
        positions = first + torch.tensor(depths)
        mask = row_mask(rule, positions, first, first + rows + 5, ancestors)
        view = row_view(sliding_window(rule, 200), positions, first, ancestors, None, None)
        assert torch.equal(view.mask(first + rows + 5)[0], mask)
    pads = torch.tensor([0, 3, first])
    positions = (first + torch.arange(rows) - pads[:, None]).clamp(min=0)
    view = row_view(sliding_window(rule, 200), positions, first, None, pads, None)
    found, expected = view.mask(first + rows), padded_row_mask(rule, positions, pads, first + rows)
    is_text = first + torch.arange(rows) >= pads[:, None]
    assert torch.equal(found[is_text], expected[is_text])


def test_the_window_is_found_out_where_there_is_one():
    rules = {
        "causal": (causal_mask_function, 0),
        "window": (sliding_window_causal_mask_function(8), 8),
        "wide": (sliding_window_causal_mask_function(500), 0),
        "chunks": (chunked_causal_mask_function(16, torch.zeros(1, dtype=torch.long)), None),
        "everything": (lambda batch, head, q, k: (q + k + batch + head) >= 0, None),
    }
    for function, expected in rules.values():
        assert sliding_window(MaskRule(function), 257) == expected


def test_words_have_the_last_bit_too():
    ancestors = torch.ones(64, 64, dtype=torch.bool).tril()
    words = words_of(ancestors)
    assert torch.equal(((words[:, None] >> torch.arange(64)) & 1).bool(), ancestors)


def test_a_view_of_wrong_shape_is_refused():
    words = torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        RowView(torch.zeros(2), words, words)
    with pytest.raises(ValueError, match="at most 64 rows, 64 in all, got 65"):
        RowView(torch.zeros(1), words[:, :1].repeat(1, 65), words[:, :1].repeat(1, 65))


# ---- whole models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
@torch.no_grad()
def test_passes_of_a_family_give_its_logits(family, launches):
    """Prefill, chains, a tree and rollback, with windows of 8, caps and sinks, as the family's own forward."""
    target = Target(build_model(family, num_hidden_layers=2))
    ids = torch.tensor([prompt_of(20, seed=3)])
    whole = target.base(input_ids=ids, use_cache=False).logits.float()
    launches.clear()
    cache, made = KVCache(2, 40), []
    for first, last in ((0, 9), (9, 10), (10, 14)):
        made.append(target.finish(target.embed(ids[:, first:last], first), 0, cache)[0])
    tokens, parents = torch.tensor([[*ids[0, 14:16].tolist(), 7, 8, *ids[0, 16:18].tolist()]]), [0, 0, 0, 2, 1, 4]
    branch = target.finish(target.embed(tokens, 14, [0, 1, 1, 2, 2, 3]), 0, cache, parents=parents)[0]
    cache.rollback(14)
    made.append(target.finish(target.embed(ids[:, 14:], 14), 0, cache)[0])
    assert len(launches) == 2 * 5
    torch.testing.assert_close(torch.cat(made, dim=1), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(branch[:, [0, 1, 4, 5]], whole[:, 14:18], rtol=1e-4, atol=1e-4)


def test_a_whole_speculative_generation(launches, monkeypatch):
    """Chains, and trees of decoys, say what plain decoding over the reference says."""
    target, prompt = Target(build_model("llama", num_hidden_layers=2)), prompt_of(9)
    monkeypatch.setenv("SELFSPEC_KERNELS", "reference")
    expected = autoregressive(target, prompt, 10)
    monkeypatch.setenv("SELFSPEC_KERNELS", "triton")
    launches.clear()
    wrong = {len(prompt) + 2, len(prompt) + 6}
    for has_decoys in (False, True):
        drafter = ScriptedDrafter(expected, 3, wrong, has_decoys)
        assert generate(target, drafter, prompt, 10).tokens == expected
    assert len({view.words.shape[1] for view in launches}) > 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.no_grad()
def test_exact_mode_gives_ars_logits_to_the_bit(dtype, launches, matrix_instructions):
    target = Target(build_model("llama", dtype, num_hidden_layers=2))
    assert target.is_row_exact(4)
    assert {view.width for view in launches} == {None, 4}  # prompts have none


@torch.no_grad()
def test_several_sequences_behind_padding(launches, monkeypatch):
    target = Target(build_model("mistral", num_hidden_layers=2))
    pads, tokens = torch.tensor([0, 4]), torch.tensor([prompt_of(10), prompt_of(10, seed=1)])
    found = []
    for choice in ("triton", "reference"):
        monkeypatch.setenv("SELFSPEC_KERNELS", choice)
        cache = KVCache(2, 30, pads=pads)
        rows = [target.finish(target.embed(tokens[:, :7], 0, pads=pads), 0, cache)[0][:, -1:]]
        rows += [target.finish(target.embed(tokens[:, i : i + 1], i, pads=pads), 0, cache)[0] for i in range(7, 10)]
        found.append(torch.cat(rows, dim=1))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert launches


# ---- choosing -----------------------------------------------------------------------------------------------------


def view_of(rows: int, prefix: int) -> RowView:
    chain = words_of(torch.ones(rows, rows, dtype=torch.bool).tril())[None]
    return RowView(torch.tensor([prefix]), chain, prefix + torch.arange(rows)[None])


def test_what_the_kernel_does_not_take_goes_to_torch_loudly_and_once(launches, caplog):
    q, keys = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8)
    dispatch._notice.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            wide = dispatch.attention(q.double(), keys.double(), keys.double(), view_of(3, 6), 0.3)
    assert len(caplog.records) == 1
    assert "does not take dtypes torch.float64" in caplog.records[0].getMessage()
    with torch.enable_grad():
        dispatch.attention(q.requires_grad_(), keys, keys, view_of(3, 6), 0.3).sum().backward()
    assert not launches
    torch.testing.assert_close(dispatch.attention(q.detach(), keys, keys, view_of(3, 6), 0.3).double(), wide)
    assert len(launches) == 1


def test_prompts_and_other_devices_keep_their_masks(launches, monkeypatch):
    cpu = torch.device("cpu")
    assert dispatch.takes_views(cpu, 64)
    assert not dispatch.takes_views(cpu, 65)
    monkeypatch.delenv("SELFSPEC_KERNELS")
    assert not dispatch.takes_views(cpu, 1)
    monkeypatch.setenv("SELFSPEC_KERNELS", "reference")
    assert not dispatch.takes_views(cpu, 1)


def test_triton_is_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.setattr(dispatch, "_missing_for_triton", lambda _: "it is Monday")
    dispatch._chosen.cache_clear()
    try:
        monkeypatch.setenv("SELFSPEC_KERNELS", "triton")
        with pytest.raises(ValueError, match="SELFSPEC_KERNELS=triton: it is Monday"):
            dispatch.implementation("cuda")
        monkeypatch.delenv("SELFSPEC_KERNELS")
        assert dispatch.implementation("cuda") == "reference"
    finally:
        dispatch._chosen.cache_clear()


def test_the_reference_never_reads_what_no_row_sees():
    q, held = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 9, 8)
    dirty = held.clone()
    dirty[:, :, 6:] = float("nan")
    found, expected = (
        attention_reference.attention_over_cache(q, t, t, view_of(2, 4), 0.3) for t in (dirty, held)
    )  # fmt: skip
    assert torch.equal(found, expected)
