"""Siblings beside each draft: more is accepted, and the text stays what it is."""

from collections.abc import Iterator

import pytest
import torch

from selfspec.decode import DecodeState, decode
from selfspec.drafter import DRAFTERS, ChainDrafter
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.kernels import dispatch
from selfspec.model import EarlyExitModel
from selfspec.sampling import Sampling
from selfspec.target import Target
from selfspec.verify import Draft
from tests.conftest import autoregressive, build_model, new_state, prompt_of, shallow_target_of

NUM_NEW = 60


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def head_of(target: Target, form: str, **config: object) -> ExitHead:
    """An exit whose trained parts are the start, under which a good part of its guesses is right."""
    shape = {"exit_layer": 2, "num_steps": 2, "recall_layers": (4, 6), "lora_rank": 2, "min_branch": 0.01}
    made = ExitConfig(form=form, **shape | config)  # type: ignore[arg-type]
    torch.manual_seed(1)  # the bridge is drawn
    return ExitHead(target, "new", made, build_adapter(target, made))


def text_with(target: Target, head: ExitHead, draft_len: int, width: int, **settings: object) -> DecodeState:
    state = new_state(target, prompt_of(9), NUM_NEW, **settings)
    drafter = DRAFTERS[head.config.form](target, head, draft_len, 0.0, width)
    drafter.pace.min_accepted = 0.0
    list(decode(target, drafter, state))
    return state


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # by the CPU's kernels where there are any, and by modules
@pytest.mark.parametrize("form", ["chain", "recursive", "parallel"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7)], ids=["greedy", "sampled"])
def test_the_text_is_plain_decodings(family: str, form: str, sampling: Sampling) -> None:
    target = shallow_target_of(family)
    head = head_of(target, form)
    expected = autoregressive(target, prompt_of(9), NUM_NEW, sampling=sampling, seed=5)
    for draft_len, width in ((1, 3), (2, 2), (3, 4)):
        state = text_with(target, head, draft_len, width, sampling=sampling, seed=5)
        assert state.tokens == expected
        assert state.stats.num_drafted > state.stats.num_cycles * min(draft_len, 2)  # there were siblings


def test_siblings_are_accepted_and_their_keys_move_into_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an untrained exit some second guesses stand; the cache then holds what a fresh pass over the text gives."""
    target = shallow_target_of("llama")
    head = ExitHead(target, "lens", ExitConfig(exit_layer=2, min_branch=0.0))
    paths: list[list[int]] = []
    keep = DecodeState._keep
    monkeypatch.setattr(DecodeState, "_keep", lambda s, scored, rows: paths.append(rows) or keep(s, scored, rows))
    chain, tree = text_with(target, head, 2, 1), text_with(target, head, 2, 4)
    assert any(path[i] != i for path in paths[1:] for i in range(len(path)))
    assert tree.stats.tau > chain.stats.tau
    fresh = new_state(target, tree.tokens[:-1], 1)
    target.finish(target.embed(torch.tensor([tree.tokens[:-1]])), 0, fresh.cache)
    for layer in range(target.num_layers):
        held, expected = tree.cache._keys[layer], fresh.cache._keys[layer]
        assert held is not None
        assert expected is not None
        size = len(tree.tokens) - 1
        torch.testing.assert_close(held[:, :, :size], expected[:, :, :size], rtol=1e-4, atol=1e-4)


def test_a_head_forgets_what_it_wrote_for_a_draft_that_a_sibling_replaced() -> None:
    """A chain's block has run over its own drafts: with the sibling's text it must see the sibling."""
    target = shallow_target_of("llama")
    head = head_of(target, "chain", recall_layers=())  # no more of the target is known later
    state = new_state(target, prompt_of(9), NUM_NEW)
    drafter = ChainDrafter(target, head, 3, 0.0, 4)
    drafter.pace.min_accepted = 0.0
    fresh_drafts = []
    seen: list[Draft] = []
    propose = drafter.propose
    drafter.propose = lambda s: seen.append(propose(s)) or seen[-1]  # type: ignore[method-assign]
    for _ in decode(target, drafter, state):
        if len(seen) % 3 == 0:  # what would be drafted next, from the text alone
            again = new_state(target, list(state.tokens[:-1]), NUM_NEW)
            again.max_length = state.max_length
            other = ChainDrafter(target, head, 3, 0.0, 4)
            other.pace.min_accepted = 0.0
            cycles = decode(target, other, again)
            next(cycles)
            if again.tokens == state.tokens:
                fresh_drafts.append((len(seen), other.propose(again).tokens.tolist()))
    assert len(fresh_drafts) >= 10
    assert all(seen[number].tokens.tolist() == tokens for number, tokens in fresh_drafts if number < len(seen))


def test_sampled_drafts_that_are_judged_by_their_q_have_no_siblings() -> None:
    target = shallow_target_of("llama")
    head = head_of(target, "chain")
    state = text_with(target, head, 1, 4, sampling=Sampling(temperature=1.0), rule="rejection", seed=3)
    assert state.stats.num_drafted <= state.stats.num_cycles
    greedy = text_with(target, head, 1, 4, rule="rejection")
    assert greedy.tokens == autoregressive(target, prompt_of(9), NUM_NEW)
    assert greedy.stats.num_drafted > greedy.stats.num_cycles


def test_width_is_checked_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 112, "head_dim": 16}
    hf_model = build_model("llama", **sizes)
    model = EarlyExitModel.from_target(hf_model, exits=[2])
    ids = torch.tensor([prompt_of(9)])
    model.exits["layer-2"].config = model.exits["layer-2"].config.model_copy(update={"draft_width": 3})
    with pytest.raises(ValueError, match="draft_width must be >= 1, got 0"):
        model.prepare(ids, max_new_tokens=4, draft_width=0)
    has_kernels = dispatch.implementation("cpu") == "cpu"
    assert model.stream(ids, max_new_tokens=4).settings["draft_width"] == (3 if has_kernels else 1)
    assert model.stream(ids, max_new_tokens=4, draft_width=2).settings["draft_width"] == 2
    monkeypatch.setenv("SELFSPEC_KERNELS", "reference")
    plain = EarlyExitModel.from_target(hf_model, exits=[2])
    assert plain.stream(ids, max_new_tokens=4).settings["draft_width"] == 1
    with pytest.raises(ValueError, match="only chains are exact here"):
        plain.prepare(ids, max_new_tokens=4, draft_width=2, exact=True)


def test_a_width_that_nobody_asked_for_gives_way() -> None:
    model = EarlyExitModel.from_target(build_model("llama", hidden_size=64, intermediate_size=112, head_dim=16), [2])
    model.exits["layer-2"].config = model.exits["layer-2"].config.model_copy(update={"draft_width": 3})
    ids = torch.tensor([prompt_of(9)])
    for draft_len in (22, 40, 63):
        assert model.stream(ids, max_new_tokens=4, draft_len=draft_len).settings["draft_len"] == draft_len
    with pytest.raises(ValueError, match="at most 63"):
        model.prepare(ids, max_new_tokens=4, draft_len=22, draft_width=3, exact=dispatch.implementation() == "cpu")


def test_a_tree_that_finds_no_room_is_no_writing_elsewhere() -> None:
    """A drafter of one's own on a state that was made for less: an error, before anything is overwritten."""
    target = shallow_target_of("llama", hidden_size=64, intermediate_size=112, head_dim=16)
    config = ExitConfig(exit_layer=2, form="parallel", num_steps=2, recall_layers=(4, 6), lora_rank=2, min_branch=0.0)
    head = ExitHead(target, "new", config, build_adapter(target, config))
    state = new_state(target, prompt_of(9), 20)
    state.cache.capacity = 9 + 20 + 2
    drafter = DRAFTERS["parallel"](target, head, 8, 0.0, 4)
    drafter.pace.min_accepted = 0.0
    with pytest.raises(ValueError, match="cache holds 31 slots"):
        list(decode(target, drafter, state))


@pytest.mark.parametrize("num_new", [1, 2, 3, 5])
def test_siblings_at_the_end_of_the_budget_find_room(num_new: int) -> None:
    model = EarlyExitModel.from_target(build_model("llama", hidden_size=64, intermediate_size=112, head_dim=16), [2])
    ids = torch.tensor([prompt_of(7)])
    expected = model.generate(ids, max_new_tokens=num_new, draft="off", exact=True).sequences
    made = model.generate(
        ids, max_new_tokens=num_new, draft_len=2, draft_width=4, exact=dispatch.implementation() == "cpu"
    )
    assert torch.equal(made.sequences, expected)
