"""The engine with capture replaced by plain calls: the same texts as the loop's own, through every way to end one."""

import logging
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec import EarlyExitModel
from selfspec.decode import decode
from selfspec.device_cycle import DeviceCycle
from selfspec.engine import SMALLEST_TIER, Cycles
from selfspec.sampling import NonFiniteLogitsError
from tests.conftest import build_model, prompt_of, shallow_target_of
from tests.engine_tools import PROMPT, both, trained_exit


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    target = shallow_target_of("llama")
    made = EarlyExitModel.from_target(target.base, [2, 4])
    made.exits["trained"] = trained_exit(made.target)
    made.exits["narrow"] = trained_exit(made.target, draft_vocab=tuple(range(0, 97, 2)))
    return made


@pytest.mark.parametrize("draft_len", [1, 2, 4])
@pytest.mark.parametrize("name", ["layer-2", "layer-4", "trained", "narrow"])
def test_text_and_drafts_are_those_of_the_loop(model, monkeypatch, count_cycles, name, draft_len):
    """Cycle by cycle, over cycles that accept none, some and all, to the last."""
    made = []
    for engine in ("calls", "off"):
        monkeypatch.setenv("SELFSPEC_ENGINE", engine)
        stream = model.stream(PROMPT, max_new_tokens=40, exit=name, draft_len=draft_len)
        made.append([(e.tokens, e.num_accepted) for e in stream])
        assert 0 < stream.stats.num_accepted < stream.stats.num_drafted
    ours, theirs = made
    assert ours == theirs
    assert set(count_cycles) == {draft_len}
    assert len(count_cycles) - (len(ours) - 1) in (0, 1)  # the end is seen a cycle late


@pytest.mark.parametrize("sampling", [
    {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5, "min_p": 0.02},
])  # fmt: skip
def test_sampled_text_is_that_of_the_seed(model, monkeypatch, count_cycles, sampling):
    for seed in range(2):
        ours, theirs = both(model, monkeypatch, exit="trained", draft_len=2, seed=seed, **sampling)
        assert torch.equal(ours.sequences, theirs.sequences)
        assert torch.equal(ours.sequences, both(model, monkeypatch, draft="off", seed=seed, **sampling)[0].sequences)
    assert 0 in count_cycles


@pytest.mark.parametrize(
    ("family", "exact"),
    [*((family, True) for family in ("llama", "qwen3", "mistral", "gemma2")), ("olmo2", False), ("gpt_oss", False)],
)
def test_families_decode_as_without_it(monkeypatch, count_cycles, family, exact):
    """Sliding windows passed, caps and sinks included; in exact mode rows are padded to one width."""
    model = EarlyExitModel.from_target(build_model(family), [2])
    model.exits["trained"] = trained_exit(model.target)
    for name, draft in (("layer-2", None), ("trained", None), ("trained", "off")):
        ours, theirs = both(model, monkeypatch, exit=name, draft_len=3, exact=exact, draft=draft)
        assert torch.equal(ours.sequences, theirs.sequences)
    assert set(count_cycles) >= {0, 3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_exact_mode_gives_the_logits_of_the_engine_without_drafts(monkeypatch, count_cycles, dtype):
    """L3: every logit of a drafted text has the bits that it has with draft="off"."""
    model = EarlyExitModel.from_target(shallow_target_of("llama", dtype=dtype).base, [4])
    logits_at: dict[int, Tensor] = {}
    cycle_call = DeviceCycle.__call__

    def noting(cycle: DeviceCycle) -> None:
        first, made = int(cycle.held.first), list[Tensor]()
        with monkeypatch.context() as patch:
            score = DeviceCycle.score
            patch.setattr(DeviceCycle, "score", lambda *a: made.append(score(*a)) or made[0])
            cycle_call(cycle)
        for row in range(int(cycle.held.counts[1]) + 1):
            logits_at[first + row] = made[0][0][0, row].clone()

    monkeypatch.setattr(DeviceCycle, "__call__", noting)
    settings = {"max_new_tokens": 40, "exact": True, "draft_len": 3}
    drafted = model.generate(PROMPT, **settings)
    rows, logits_at = logits_at, {}
    plain = model.generate(PROMPT, draft="off", **settings)
    assert torch.equal(drafted.sequences, plain.sequences)
    assert drafted.stats.num_accepted > 5
    places = [place for place in rows if place < 12 + 39]  # what is behind the end of the text is nobody's
    assert len(places) == 39
    assert all(torch.equal(rows[place], logits_at[place]) for place in places)


@pytest.mark.parametrize("settings", [
    {"eos_token_id": list(range(30, 45))}, {"eos_token_id": list(range(30, 45)), "exit": "trained", "draft_len": 4},
    {"max_new_tokens": 1}, {"max_new_tokens": 2, "draft_len": 4}, {"max_length": 33},
])  # fmt: skip
def test_texts_end_where_the_loop_ends_them(model, monkeypatch, count_cycles, settings):
    for draft in (None, "off"):
        ours, theirs = both(model, monkeypatch, draft=draft, **settings)
        assert torch.equal(ours.sequences, theirs.sequences)
        assert ours.stats.num_tokens == ours.sequences.shape[1] - 12


def test_criteria_and_streams_see_every_cycle(model, monkeypatch, count_cycles):
    stop = [lambda ids, _: torch.tensor([ids.shape[1] >= 30])]
    ours, theirs = both(model, monkeypatch, stopping_criteria=stop, exit="trained")
    assert ours.sequences.shape[1] == 30
    assert torch.equal(ours.sequences, theirs.sequences)
    cycles = [e.tokens for e in model.stream(PROMPT, max_new_tokens=30, exit="trained")]
    assert [t for tokens in cycles for t in tokens] == both(model, monkeypatch)[1].sequences[0, 12:].tolist()


def test_confidence_stops_what_is_counted(model, monkeypatch, count_cycles):
    """A mask on the device; the text stays, fewer drafts count."""
    free, _ = both(model, monkeypatch, exit="trained", draft_len=3, min_confidence=0.0)
    ours, theirs = both(model, monkeypatch, exit="trained", draft_len=3, min_confidence=0.5)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(ours.sequences, free.sequences)
    assert ours.stats.accepted_histogram == theirs.stats.accepted_histogram
    assert 0 < ours.stats.num_drafted == theirs.stats.num_drafted < 3 * ours.stats.num_cycles
    assert set(count_cycles) == {3}


def test_drafting_pauses_where_it_does_not_pay(model, monkeypatch, count_cycles):
    """With the step that drafts nothing, which keeps the exit's block up to date."""
    hopeless = trained_exit(model.target, min_accepted=2.5)
    monkeypatch.setitem(model.exits, "hopeless", hopeless)
    ours, theirs = both(model, monkeypatch, exit="hopeless", draft_len=2)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert {0, 2} == set(count_cycles)


def test_caches_are_kept_for_later_texts_and_not_too_many(model, monkeypatch, count_cycles):
    model.engine._held.clear()
    made: list[Cycles] = []
    init = Cycles.__init__
    monkeypatch.setattr(Cycles, "__init__", lambda self, *a: (made.append(self), init(self, *a))[1])
    first = model.generate(PROMPT, max_new_tokens=30, exit="trained", draft_len=2).sequences
    model.generate(PROMPT[:, :5], max_new_tokens=60, exit="trained", draft_len=2)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=30, exit="trained", draft_len=2).sequences, first)
    assert len(made) == 1
    assert made[0].cache.capacity == SMALLEST_TIER
    for draft_len in (1, 3, 4):
        model.generate(PROMPT, max_new_tokens=8, exit="trained", draft_len=draft_len)
    assert len(made) == 4
    assert len(model.engine._held) == 2


@pytest.mark.parametrize(("settings", "reason"), [
    ({"repetition_penalty": 1.2}, "settings that look at the text so far"),
    ({"min_new_tokens": 5, "eos_token_id": 7}, "settings that look at the text so far"),
    ({"bad_words_ids": [[7]]}, "settings that look at the text so far"),
])  # fmt: skip
def test_what_it_does_not_take_is_said_once_and_decoded_plainly(
    model, monkeypatch, count_cycles, caplog, settings, reason
):
    model.engine._told.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            ours, theirs = both(model, monkeypatch, seed=3, **settings)
            assert torch.equal(ours.sequences, theirs.sequences)
    assert not count_cycles
    assert [r.message for r in caplog.records].count(f"cycles run as plain calls, slower: {reason}") == 1


def test_hooks_and_other_families_are_left_to_plain_calls(model, monkeypatch, count_cycles):
    calls: list[int] = []
    with model.base.model.layers[1].register_forward_hook(lambda *_: calls.append(1)):
        model.generate(PROMPT, max_new_tokens=4)
    assert calls
    other = EarlyExitModel.from_target(build_model("gpt2"), [2])  # learnt positions
    ours, theirs = both(other, monkeypatch)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert not count_cycles


def test_a_fault_in_a_step_leaves_the_model_usable(model, monkeypatch, count_cycles):
    """Where a step cannot even be captured, the text is decoded plainly; where it fails later, the error is raised."""
    expected = both(model, monkeypatch, exit="trained")[1].sequences
    with monkeypatch.context() as patch:
        model.engine._held.clear()
        patch.setattr(Cycles, "__init__", lambda *_: (_ for _ in ()).throw(RuntimeError("cannot be captured")))
        assert torch.equal(model.generate(PROMPT, max_new_tokens=30, exit="trained").sequences, expected)
    assert "cannot be captured" in model.engine._refused.values()  # it is not tried again
    model.engine._refused.clear()
    with monkeypatch.context() as patch:
        patch.setattr(DeviceCycle, "judge", lambda *_: (_ for _ in ()).throw(RuntimeError("planted")))
        with pytest.raises(RuntimeError, match="planted"):
            model.generate(PROMPT, max_new_tokens=40, exit="trained")
    assert torch.equal(model.generate(PROMPT, max_new_tokens=30, exit="trained").sequences, expected)


def test_logits_that_are_not_finite_are_named(model, monkeypatch, count_cycles):
    score = DeviceCycle.score

    def poisoned(cycle: DeviceCycle, taps: Tensor) -> tuple[Tensor, Tensor | None]:
        logits, recalls = score(cycle, taps)
        return torch.where(cycle.held.first + cycle.rows == 20, torch.nan, 0.0)[..., None] + logits, recalls

    monkeypatch.setattr(DeviceCycle, "score", poisoned)
    with pytest.raises(NonFiniteLogitsError, match="position 20 are not finite"):
        model.generate(PROMPT, max_new_tokens=40, draft="off")


def test_a_wrong_choice_is_named(model, monkeypatch):
    monkeypatch.setenv("SELFSPEC_ENGINE", "fast")
    with pytest.raises(ValueError, match="SELFSPEC_ENGINE='fast'; choose one of graphs, calls, off"):
        model.generate(PROMPT, max_new_tokens=4)
    monkeypatch.setenv("SELFSPEC_ENGINE", "graphs")
    with pytest.raises(ValueError, match="cpu has no graphs"):
        model.generate(PROMPT, max_new_tokens=4)


@pytest.mark.parametrize(("draft_len", "draft_width", "exact"), [(7, 1, True), (4, 1, True), (5, 3, False)])
def test_a_text_up_to_the_edge_of_its_cache(monkeypatch, count_cycles, draft_len, draft_width, exact):
    """Nothing is written beyond it, by the cycle launched too many either."""
    model = EarlyExitModel.from_target(shallow_target_of("llama", max_position_embeddings=1024).base, [4])
    for end in range(SMALLEST_TIER - 24, SMALLEST_TIER - 4, 3):
        ids = torch.tensor([prompt_of(end - 12)])
        settings = {"max_new_tokens": 12, "draft_len": draft_len, "draft_width": draft_width, "exact": exact}
        made = model.generate(ids, **settings).sequences
        assert torch.equal(made, model.generate(ids, draft="off", **settings).sequences)
        rooms = {held.cache.capacity for held in model.engine._held.values()}
        assert len(rooms) == 1 or not exact  # bits of exact mode depend on it
    assert 2 * SMALLEST_TIER in {held.cache.capacity for held in model.engine._held.values()}


def test_a_text_in_inference_mode_does_not_spoil_later_ones(model, monkeypatch, count_cycles):
    with torch.inference_mode():
        inside = model.generate(PROMPT, max_new_tokens=20, exit="trained").sequences
    assert torch.equal(model.generate(PROMPT, max_new_tokens=20, exit="trained").sequences, inside)


def test_a_second_text_at_once_is_decoded_plainly(model, monkeypatch, count_cycles):
    """Two generations of one kind, step by step in turn: each says what it says alone."""
    expected = both(model, monkeypatch, exit="trained")[1].sequences[0].tolist()
    states = [model.prepare(PROMPT, max_new_tokens=30, exit="trained") for _ in range(2)]
    texts = [decode(model.target, drafter, state) for drafter, state in states]
    for _ in zip_longest(*texts):
        pass
    assert [state.tokens for _, state in states] == [expected, expected]
    assert [state.cache.capacity == SMALLEST_TIER for _, state in states] == [True, False]
    assert not any(cycles.is_in_use for cycles in model.engine._held.values())


@pytest.mark.parametrize("part", ["base", "exit"])
def test_weights_that_moved_are_noticed(model, monkeypatch, count_cycles, part):
    before = model.generate(PROMPT, max_new_tokens=20, exit="trained").sequences
    held = list(model.engine._held.values())
    own = model.exits["trained"].bridge.maps[0] if part == "exit" else model.base.model.layers[0].self_attn.q_proj
    monkeypatch.setattr(own.weight, "data", own.weight.data.clone())
    assert torch.equal(model.generate(PROMPT, max_new_tokens=20, exit="trained").sequences, before)
    assert not set(held) & set(model.engine._held.values())


def test_an_error_leaves_nothing_in_the_cache(model, monkeypatch, count_cycles):
    """Not even values that are not finite, which the next text's masks would multiply by zero."""
    with monkeypatch.context() as patch:
        patch.setattr(DeviceCycle, "_keep", lambda cycle, *_: cycle.passes.cache._keys[1].fill_(torch.nan))
        with pytest.raises(NonFiniteLogitsError):
            model.generate(PROMPT, max_new_tokens=20, exact=True, draft_len=3)
    ours, theirs = both(model, monkeypatch, exact=True, draft_len=3)
    assert torch.equal(ours.sequences, theirs.sequences)


def test_a_rule_that_is_no_window_is_left_to_plain_calls(model, monkeypatch, count_cycles, caplog):
    model.engine._held.clear()
    monkeypatch.setattr("selfspec.layer_calls.sliding_window", lambda *_: None)
    ours, theirs = both(model, monkeypatch, draft_len=1, exact=True)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert not count_cycles
    model.engine._refused.clear()


def test_a_text_through_the_gpus_kernels_under_the_interpreter(monkeypatch, count_cycles, quick_interpreter):
    """Attention, sampling, verification and compaction by Triton in one cycle: tokens and keys of the reference."""
    pytest.importorskip("triton", reason="triton is not installed")
    from selfspec.kernels import attention_triton, compact_triton, sample_triton, verify_triton

    if not attention_triton.IS_INTERPRETED:
        pytest.skip("kernels run on a GPU here")
    launched: list[str] = []
    for module, name in ((attention_triton, "attention_over_cache"), (sample_triton, "sample"),
                         (verify_triton, "verify_coupled"), (verify_triton, "verify_rejection"),
                         (compact_triton, "compact")):  # fmt: skip
        function = getattr(module, name)
        spy = lambda *a, function=function, name=name: (launched.append(name), function(*a))[1]  # noqa: E731
        monkeypatch.setattr(module, name, spy)
    monkeypatch.setattr(attention_triton, "num_splits", lambda *_: 1)  # the interpreter is slow
    model = EarlyExitModel.from_target(shallow_target_of("llama", num_hidden_layers=3).base, [2])
    for rule, width, sampling in (("coupled", 1, {}), ("coupled", 2, {"temperature": 1.0}),
                                  ("rejection", 1, {"temperature": 1.0})):  # fmt: skip
        sampling |= {"seed": 3, "acceptance": rule, "draft_width": width}
        monkeypatch.setenv("SELFSPEC_KERNELS", "reference")
        expected = model.generate(PROMPT, max_new_tokens=6, draft_len=2, **sampling).sequences
        cache = next(reversed(model.engine._held.values())).cache
        keys = [layer.clone() for layer in cache._keys[:3]]
        monkeypatch.setenv("SELFSPEC_KERNELS", "triton")
        launched.clear()
        assert torch.equal(model.generate(PROMPT, max_new_tokens=6, draft_len=2, **sampling).sequences, expected)
        torch.testing.assert_close(cache._keys[:3], keys, rtol=1e-4, atol=1e-4)
        assert set(launched) == {"attention_over_cache", "sample", f"verify_{rule}"} | (
            {"compact"} if width > 1 else set()
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_graphs_give_the_text_of_plain_calls_and_never_wait(monkeypatch, dtype):
    """Captured on a GPU: no synchronisation but the read-back, the same text, twice, with drafts and without."""
    base = shallow_target_of("llama", dtype=dtype).base.cuda()
    model = EarlyExitModel.from_target(base, [2])
    model.exits["trained"] = trained_exit(model.target)
    model.exits["recursive"] = trained_exit(model.target, form="recursive", exit_layer=0)
    model.exits["parallel"] = trained_exit(model.target, form="parallel", correction_rank=8)
    run = Cycles.run

    def strict(cycles: Cycles, *arguments: Any) -> Iterator[list[int]]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield from run(cycles, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Cycles, "run", strict)
    ids = PROMPT.cuda()
    for settings in ({}, {"exit": "trained"}, {"draft": "off"}, {"temperature": 1.0, "seed": 3}, {"exit": "recursive"},
                     {"exit": "parallel", "min_confidence": 0.3},
                     {"exit": "parallel", "draft_width": 3, "exact": False},
                     {"exit": "trained", "draft_width": 2, "exact": False, "temperature": 1.0, "seed": 3},
                     {"exit": "parallel", "temperature": 1.0, "seed": 3, "acceptance": "rejection"}):  # fmt: skip
        found = [model.generate(ids, max_new_tokens=30, draft_len=2, **settings).sequences for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setenv("SELFSPEC_ENGINE", "calls")
            expected = model.generate(ids, max_new_tokens=30, draft_len=2, **settings).sequences
        assert all(torch.equal(sequences, expected) for sequences in found)
    assert model.engine._held
