"""Texts decoded together: their passes are one, and every text is bit for bit what it is alone."""

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import StoppingCriteriaList

from selfspec import EarlyExitModel, together
from selfspec.cache import KVCache
from selfspec.decode import DecodeState, decode, start
from selfspec.drafter import ChainDrafter, NoDrafter
from selfspec.kernels import dispatch
from selfspec.rows import Rows, finish_together
from selfspec.sampling import NonFiniteLogitsError
from selfspec.target import Target
from selfspec.together import decode_together
from selfspec.verify import Draft
from tests.conftest import build_model, generate, new_state, prompt_of, random_parents, shallow_target_of, target_of
from tests.test_batches import batch_of
from tests.test_fused_draft import exit_of

pytest.importorskip("numba")
SIZES = {"hidden_size": 64, "intermediate_size": 112, "vocab_size": 192, "head_dim": 16}  # that the kernels take
EXACT = {"rtol": 0.0, "atol": 0.0}
LENGTHS = (12, 5, 9, 1, 30)


def target(dtype: torch.dtype = torch.float32) -> Target:
    return shallow_target_of("llama", dtype, **SIZES)


def model_of(dtype: torch.dtype = torch.float32) -> EarlyExitModel:
    return EarlyExitModel.from_target(target(dtype).base, [2, 4])


def passes(monkeypatch: pytest.MonkeyPatch, target: Target) -> list[int]:
    """How many texts each joint pass has, as they are run."""
    counts, run = list[int](), target.fused.finish_together
    monkeypatch.setattr(target.fused, "finish_together", lambda texts, *a: counts.append(len(texts)) or run(texts, *a))
    return counts


def one_by_one(model: EarlyExitModel, monkeypatch: pytest.MonkeyPatch, *args: Any, **settings: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(model, "_goes_together", lambda *_: False)
        return model.generate(*args, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [
    {}, {"temperature": 0.9, "top_k": 40, "seed": 3}, {"draft": "off"}, {"draft": "lookup"}, {"exit": "layer-4"},
    {"draft_width": 3, "temperature": 1.0, "seed": 1}, {"min_new_tokens": 20, "eos_token_id": [40, 41, 42, 43]},
    {"repetition_penalty": 1.3}, {"acceptance": "rejection"}, {"exit": "layer-4", "cascade": "layer-2"},
])  # fmt: skip
def test_a_batch_is_its_texts_alone(dtype, settings, monkeypatch):
    """Ragged prompts, rows that end early, trees, siblings of a cascade: the same sequences, by shared passes."""
    model = model_of(dtype)
    ids, mask = batch_of(*LENGTHS)
    settings = {"max_new_tokens": 24, "attention_mask": mask, "eos_token_id": [50, 60], "pad_token_id": 0, **settings}
    alone = one_by_one(model, monkeypatch, ids, **settings)
    counts = passes(monkeypatch, model.target)
    out = model.generate(ids, **settings)
    assert torch.equal(out.sequences, alone.sequences)
    assert (out.stats.num_tokens, out.stats.num_emitted) == (alone.stats.num_tokens, alone.stats.num_emitted)
    assert max(counts) == len(LENGTHS)
    assert len(counts) <= 2 * 24


def test_sampling_under_rejection_goes_one_by_one(monkeypatch):
    """There a text depends on what was drafted, and a batch drafts less."""
    model, counts = model_of(), []
    monkeypatch.setattr(model.target.fused, "finish_together", lambda *_: counts.append(1))
    ids, mask = batch_of(4, 7)
    model.generate(ids, attention_mask=mask, max_new_tokens=6, temperature=1.0, seed=2, acceptance="rejection")
    assert not counts


def test_texts_draft_into_what_a_pass_has_room_for(monkeypatch):
    """Five draft nothing, two or three look tokens up, the last one drafts by its exit, behind rows unseen by it."""
    model, drafted = model_of(), dict[int, set[tuple[int, bool]]]()
    commit, alive = DecodeState.commit, [5]

    def spy(state: DecodeState, draft: Draft, *args: Any) -> list[int]:
        drafted.setdefault(alive[0], set()).add((draft.num_drafted, draft.taps is not None))
        return commit(state, draft, *args)

    monkeypatch.setattr(DecodeState, "commit", spy)
    cycle = together._cycle
    monkeypatch.setattr(together, "_cycle", lambda t, texts: alive.__setitem__(0, len(texts)) or cycle(t, texts))
    settings = {"draft_len": 4, "exit": "layer-2", "prompt_lookup_num_tokens": 6}
    prompts = [torch.tensor([prompt_of(6, seed) * 3]) for seed in range(5)]
    counts = [10, 20, 40, 60, 80]
    each = [model.prepare(ids, max_new_tokens=n, **settings) for ids, n in zip(prompts, counts, strict=True)]
    for _ in decode_together(model.target, each):
        pass
    for (_, state), ids, n in zip(each, prompts, counts, strict=True):
        assert state.tokens == model.generate(ids, max_new_tokens=n, **settings).sequences[0].tolist()
    assert drafted[5] == drafted[4] == {(0, False)}
    assert max(drafted[3]) == (1, False)
    assert max(drafted[2]) == (2, False)
    assert (4, True) in drafted[1]


def test_texts_wait_where_too_many_come(monkeypatch):
    model = model_of()
    ids, mask = batch_of(12, 5, 9, 7, 3)
    settings = {"max_new_tokens": 12, "attention_mask": mask, "eos_token_id": [50, 60, 70]}
    alone = one_by_one(model, monkeypatch, ids, **settings)
    monkeypatch.setattr(together, "MOST_TOGETHER", 2)
    counts = passes(monkeypatch, model.target)
    assert torch.equal(model.generate(ids, **settings).sequences, alone.sequences)
    assert max(counts) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_states_and_caches_of_a_pass_are_those_alone(dtype, threads, monkeypatch):
    """Chains and trees of 1 to 9 rows that enter at layers 0, 2 and 3, behind prefixes of other lengths."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    made = target(dtype)
    generator = torch.Generator().manual_seed(0)

    def texts() -> list[Rows]:
        found = []
        for number, (begin, rows, length) in enumerate([(2, 3, 20), (0, 1, 5), (3, 9, 33), (0, 4, 1), (2, 1, 11)]):
            cache = KVCache(made.num_layers, 48 + 8 * number)
            made.run_layers(made.embed(torch.tensor([prompt_of(length)])), 0, made.num_layers, cache)
            hidden = torch.randn(1, rows, 64, generator=generator.manual_seed(number)).to(dtype)
            cache.advance(range(begin), rows)
            found.append(Rows(hidden, begin, cache, (4, 6), random_parents(rows, number) if number % 2 == 0 else None))
        return found

    with torch.no_grad():
        alone, held = [], texts()
        for rows in held:
            logits, states = rows.finish(made)
            alone.append((logits.clone(), states))
        beside = texts()
        made_together = finish_together(made, beside)
    for (logits, states), (ours, kept), one, other in zip(alone, made_together, held, beside, strict=True):
        assert torch.equal(logits, ours)
        assert all(torch.equal(states[depth], kept[depth]) for depth in (4, 6))
        assert one.cache.lengths == other.cache.lengths
        for layer, stop in enumerate(one.cache.lengths):
            pair = [rows.cache.tensors(layer, one.hidden, 2, 16) for rows in (one, other)]
            assert all(torch.equal(mine[:, :, :stop], theirs[:, :, :stop]) for mine, theirs in zip(*pair, strict=True))


def test_where_no_kernel_runs_texts_take_turns():
    plain = target_of("gpt2")
    prompts = [prompt_of(length) for length in (6, 3, 9)]
    states = [new_state(plain, prompt, 8) for prompt in prompts]
    for _ in decode_together(plain, [(NoDrafter(), state) for state in states]):
        pass
    assert [state.tokens for state in states] == [generate(plain, NoDrafter(), p, 8).tokens for p in prompts]


def test_an_error_in_one_text_ends_all_and_leaves_the_model_as_it_was(monkeypatch):
    model = model_of()
    ids, mask = batch_of(12, 5, 9)
    before = model.generate(ids, attention_mask=mask, max_new_tokens=8).sequences
    commit, calls = DecodeState.commit, []

    def broken(state: DecodeState, *args: Any) -> list[int]:
        calls.append(1)
        if len(calls) == 5:
            raise NonFiniteLogitsError("planted")
        return commit(state, *args)

    with monkeypatch.context() as patch:
        patch.setattr(DecodeState, "commit", broken)
        with pytest.raises(NonFiniteLogitsError):
            model.generate(ids, attention_mask=mask, max_new_tokens=8)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=8).sequences, before)


def test_no_room_names_the_batch(monkeypatch):
    model = model_of()
    ids, mask = batch_of(12, 5, 9)
    error = torch.OutOfMemoryError("out of memory\n at length")
    monkeypatch.setattr(together, "finish_together", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(MemoryError, match=r"batch of 3 and 13 of 16 tokens.*pass fewer prompts at once") as caught:
        model.generate(ids, attention_mask=mask, max_new_tokens=4)
    assert "\n" not in str(caught.value)


def test_a_call_refuses_texts_that_it_has_no_room_for():
    made = target()
    with torch.no_grad():
        cache, larger = KVCache(made.num_layers, 32), KVCache(made.num_layers, 64)
        like = torch.zeros(1, 2, 64)
        plans = [made.fused.plan(made.layers, like, range(made.num_layers), held) for held in (cache, larger)]
        with pytest.raises(ValueError, match="4 rows and 32 slots"):
            plans[0].call(4).run(torch.zeros(1, 4, 64), [plan.call(2) for plan in plans])
        with pytest.raises(ValueError, match="5 rows"):
            plans[1].call(5).run(torch.zeros(1, 5, 64), [plan.call(2) for plan in plans])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"draft": "off"}, {"temperature": 1.0, "seed": 4}])
@pytest.mark.parametrize("num_own", [(9, 1, 30, 4), (0, 7, 3, 1)])
def test_what_all_prompts_begin_with_is_run_once(dtype, settings, num_own, monkeypatch):
    """70 tokens for 4 texts, one of which may have no more; texts, drafts and what each cache holds are those alone."""
    monkeypatch.setattr(dispatch, "takes_prompts", lambda _: True)
    model, shared, seen = model_of(dtype), prompt_of(70, 8), list[int]()
    each = [[*shared, *prompt_of(count, seed, 180)] for seed, count in enumerate(num_own)]
    rows = [torch.tensor(prompt) for prompt in each]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    settings = {"attention_mask": mask, "max_new_tokens": 10, "exit": "layer-4", **settings}
    alone = one_by_one(model, monkeypatch, ids, **settings)
    embed = model.target.embed
    monkeypatch.setattr(model.target, "embed", lambda tokens, *a: seen.append(tokens.numel()) or embed(tokens, *a))
    assert torch.equal(model.generate(ids, **settings).sequences, alone.sequences)
    num_shared = 70 if min(num_own) else 69  # the last token of the shortest prompt is its own
    prompts = sum(len(prompt) for prompt in each) - (len(each) - 1) * num_shared
    assert seen[0] == num_shared
    assert sum(seen[: 1 + len(each)]) == prompts


def test_the_exit_goes_on_behind_what_was_shared_as_if_it_had_seen_it_alone(monkeypatch):
    """Keys, values and recalled states behind a prompt, of the exit's block too."""
    monkeypatch.setattr(dispatch, "takes_prompts", lambda _: True)
    with torch.no_grad():
        made, head = exit_of()
    prompts = [[*prompt_of(40, 8), *prompt_of(count, count)] for count in (5, 9)]

    def begun() -> list[tuple[ChainDrafter, DecodeState]]:
        return [(ChainDrafter(made, head, 2), new_state(made, prompt, 9)) for prompt in prompts]

    alone, beside = begun(), begun()
    with torch.no_grad():
        for drafter, state in alone:
            start(made, drafter, state)
        cycles = decode_together(made, beside)
        assert [next(cycles)[1] for _ in beside] == [state.tokens[-1:] for _, state in alone]
    for (_, one), (_, other) in zip(alone, beside, strict=True):
        assert torch.equal(one.recall, other.recall)
        assert one.cache.lengths == other.cache.lengths
        for layer, stop in enumerate(one.cache.lengths):
            pair = [state.cache.tensors(layer, one.recall, 2, 16) for state in (one, other)]
            is_own = layer >= made.num_layers  # the block's inputs come from torch's products, whose bits may differ
            for mine, theirs in zip(*pair, strict=True):
                torch.testing.assert_close(mine[:, :, :stop], theirs[:, :, :stop], **({} if is_own else EXACT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_by_the_kernels_is_the_same_however_it_is_divided(dtype, monkeypatch):
    """100 rows at once, in 7 and 93, in ones and a tree's worth: states and caches bit for bit."""
    monkeypatch.setattr(dispatch, "takes_prompts", lambda _: True)
    made, ids, found = target(dtype), torch.tensor([prompt_of(100)]), []
    with torch.no_grad():
        for sizes in ([100], [7, 93], [1] * 100, [64, 36], [25, 24, 51]):
            cache, states = KVCache(made.num_layers, 104), []
            for part in ids.split(sizes, dim=1):
                states.append(made.run_layers(made.embed(part), 0, made.num_layers, cache))
            held = [t[:, :, :100] for i in range(made.num_layers) for t in cache.tensors(i, states[0], 2, 16)]
            found.append([torch.cat(states, dim=1), *held])
        for other in found[1:]:
            assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
        monkeypatch.setattr(dispatch, "cpu_kernels", lambda _: None)
        made.notice_changes()
        by_modules = made.run_layers(made.embed(ids), 0, made.num_layers, KVCache(made.num_layers, 104))
    made.notice_changes()
    gap = (found[0][0].float() - by_modules.float()).norm() / by_modules.float().norm()
    assert gap < (1e-5 if dtype == torch.float32 else 0.05)  # roundings of six layers


def test_another_default_dtype_changes_nothing():
    """What the kernels write to is float32, whatever torch makes when it is not told."""
    model, (ids, mask) = model_of(torch.bfloat16), batch_of(12, 5)
    settings = {"attention_mask": mask, "max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    before = model.generate(ids, **settings).sequences
    torch.set_default_dtype(torch.float64)  # a narrower one would write beyond the end
    try:
        assert torch.equal(model.generate(ids, **settings).sequences, before)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_layers_of_which_some_have_windows_are_left_to_their_modules(family):
    windows = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 3}
    model = EarlyExitModel.from_target(build_model(family, **SIZES, **windows), [2])
    ids = torch.tensor([prompt_of(150)])
    theirs = model.base.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert not model.target.fused.is_in_use
    assert torch.equal(model.generate(ids, max_new_tokens=8).sequences, theirs)


def test_layers_with_rotary_tables_of_their_own_are_left_to_their_modules():
    made = Target(build_model("llama", **SIZES))
    assert made.fused.is_in_use
    arguments = made.calls.table[4][1]
    made.calls.table[4] = (
        (),
        {**arguments, "position_embeddings": tuple(t * 2 for t in arguments["position_embeddings"])},
    )
    assert not made.fused.is_in_use


def test_memory_of_a_text_goes_with_its_end():
    model = model_of()
    each = [model.prepare(torch.tensor([prompt_of(6, n)]), max_new_tokens=1 + n) for n in range(4)]  # one in its prompt
    for _ in decode_together(model.target, each):
        pass
    assert [state.cache.num_bytes for _, state in each] == [0, 0, 0, 0]


@pytest.mark.parametrize("part", ["norm", "output"])
def test_where_the_head_is_hooked_texts_go_one_by_one_and_draft(part, monkeypatch):
    model, (ids, mask) = model_of(), batch_of(12, 5, 9)
    counts = passes(monkeypatch, model.target)
    module = model.base.model.norm if part == "norm" else model.base.lm_head
    handle = module.register_forward_hook(lambda *_: None)
    drafted = model.generate(ids, attention_mask=mask, max_new_tokens=12).stats.num_drafted
    handle.remove()
    assert not counts
    assert drafted


def test_criteria_of_the_users_own_see_one_text_after_another(monkeypatch):
    model, (ids, mask), lengths = model_of(), batch_of(12, 5), list[int]()
    counts = passes(monkeypatch, model.target)

    def note(given: torch.Tensor, *_: Any) -> bool:
        lengths.append(given.shape[1])
        return False

    model.generate(ids, attention_mask=mask, max_new_tokens=6, stopping_criteria=StoppingCriteriaList([note]))
    assert not counts
    assert lengths == sorted(lengths[:6]) + sorted(lengths[6:])


def test_float8_caches_share_no_prompt(monkeypatch):
    monkeypatch.setattr(dispatch, "takes_prompts", lambda _: True)
    model, texts = model_of(), []
    for _ in range(2):
        prompts = [torch.tensor([[*prompt_of(40, 8), *prompt_of(n, n)]]) for n in (5, 9, 3)]
        each = [model.prepare(p, max_new_tokens=8, kv_cache_dtype="float8", draft="off") for p in prompts]
        if not texts:
            for _ in decode_together(model.target, each):
                pass
        else:
            for drafter, state in each:
                for _ in decode(model.target, drafter, state):
                    pass
        texts.append([state.tokens for _, state in each])
    assert texts[0] == texts[1]
