"""Prompt lookup: what is found, how it joins a draft, and that the text stays what it is."""

from collections.abc import Iterator

import pytest
import torch

from selfspec.decode import decode
from selfspec.drafter import DRAFTERS, ChainDrafter
from selfspec.exit_module import ExitConfig
from selfspec.exits import ExitHead
from selfspec.kernels import dispatch
from selfspec.lookup import PromptLookup, chance, joined
from selfspec.model import EarlyExitModel
from selfspec.sampling import Sampling
from selfspec.verify import Draft
from tests.conftest import autoregressive, build_model, new_state, prompt_of, shallow_target_of
from tests.test_trees import head_of

NUM_NEW = 60
REPEATED = [5, 9, 13, 17, 21, 25] * 3 + [5, 9, 13]  # found at once, with certainty


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_what_followed_last_is_found() -> None:
    lookup = PromptLookup(3)
    assert lookup.find([1, 2, 3]).tokens == ()
    assert lookup.find([1, 2, 3, 1, 2]).tokens[:2] == (3, 1)
    assert lookup.find([1, 2, 3, 1, 2, 7, 8, 1, 2]).tokens[0] == 7  # the later of two
    assert lookup.find([1, 2, 3, 1, 2, 7, 8, 1, 2, 7, 8, 1, 2]).tokens == (7, 8, 1)


def test_longer_agreement_is_surer_and_reaches_further() -> None:
    text = range(100, 130)
    reach = {}
    for n in (1, 2, 4, 9):
        found = PromptLookup(20).find([*text[:20], 55, *text[20 - n : 20]])  # n tokens agree, 55 before them does not
        assert found.chance == chance(n)
        reach[n] = len(found.tokens)
    assert reach[1] < reach[2] < reach[4] < reach[9]
    assert chance(1) == pytest.approx(1 / 4)


def test_a_loop_goes_on_beyond_the_end_and_no_draft_beyond_an_end_of_text() -> None:
    assert PromptLookup(5).find([4, 7, 4, 7, 4, 7, 4]).tokens == (7, 4, 7, 4, 7)
    assert PromptLookup(5).find([4, 7, 4, 7, 4, 7, 4], end_ids={7}).tokens == (7,)


def test_a_tree_has_what_was_found_once() -> None:
    tokens, parents = [10, 11, 20, 30], [0, 1, 0, 1]  # the chain 10, 11 and a sibling of each
    assert joined(tokens, parents, (10, 30, 40, 41), 6) == ([10, 11, 20, 30, 40, 41], [0, 1, 0, 1, 4, 5])
    assert joined(tokens, parents, (10, 30, 40, 41), 5) == ([10, 11, 20, 30, 40], [0, 1, 0, 1, 4])
    assert joined(tokens, parents, (10, 11), 4) == (tokens, parents)
    assert joined([], [], (1, 2), 6) == ([1, 2], [0, 1])


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # by the CPU's kernels where there are any, and by modules
@pytest.mark.parametrize("form", ["chain", "recursive", "parallel"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5, top_k=2)], ids=["greedy", "sampled"])
def test_the_text_is_plain_decodings(
    family: str, form: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked up is often wrong and sometimes right, stands alone, beside an exit's tree and inside it."""
    monkeypatch.setattr("selfspec.lookup.SURE", 0.5)  # sampled text of a tiny model seldom agrees in more than two
    monkeypatch.setattr("selfspec.lookup.LEAST", 0.01)
    target = shallow_target_of(family)
    head = head_of(target, form)
    expected = autoregressive(target, REPEATED, NUM_NEW, sampling=sampling, seed=5)
    drafts = list[Draft]()
    for width in (1, 3):
        state = new_state(target, REPEATED, NUM_NEW, sampling=sampling, seed=5)
        drafter = DRAFTERS[form](target, head, 2, 0.0, width, PromptLookup(7))
        drafter.pace.min_accepted = 0.0
        propose = drafter.propose
        drafter.propose = lambda s, propose=propose: drafts.append(propose(s)) or drafts[-1]
        list(decode(target, drafter, state))
        assert state.tokens == expected
    assert any(draft.taps is None and draft.num_drafted > 0 for draft in drafts)
    assert any(draft.taps is not None and draft.num_drafted == 7 for draft in drafts)  # more than the exit has
    assert all(draft.num_drafted <= 7 for draft in drafts)


def test_the_kernel_joins_as_the_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft in one call has the tokens, the parents and the taps of the one step by step."""
    sizes = {"hidden_size": 64, "intermediate_size": 112, "head_dim": 16}
    if dispatch.implementation("cpu") != "cpu":
        pytest.skip("there is no kernel on this CPU")
    target = shallow_target_of("llama", **sizes)
    for form in ("chain", "recursive", "parallel"):
        head = head_of(target, form)
        made: dict[bool, list[Draft]] = {True: [], False: []}
        for is_stepwise, found in made.items():
            drafter = DRAFTERS[form](target, head, 2, 0.0, 2, PromptLookup(7))
            drafter.pace.min_accepted = 0.0
            drafter.is_stepwise = is_stepwise
            propose = drafter.propose
            drafter.propose = lambda s, propose=propose, found=found: found.append(propose(s)) or found[-1]
            list(decode(target, drafter, new_state(target, REPEATED, 24)))
        assert len(made[True]) == len(made[False])
        assert any(len(set(d.parents[0].tolist())) < d.num_drafted > 4 for d in made[True])
        for one, other in zip(made[True], made[False], strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.parents.tolist() == other.parents.tolist()
            if one.taps is not None:
                torch.testing.assert_close(one.taps, other.taps, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_alone_it_speeds_up_any_model(rule: str) -> None:
    model = EarlyExitModel.from_target(build_model("gpt2"))
    ids = torch.tensor([REPEATED])
    plain = model.generate(ids, max_new_tokens=NUM_NEW, draft="off").sequences
    made = model.generate(ids, max_new_tokens=NUM_NEW, draft="lookup", acceptance=rule)
    assert torch.equal(made.sequences, plain)
    assert made.stats.tau > 1.2  # a tiny model's greedy text soon repeats itself


def test_where_it_is_on_and_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 112, "head_dim": 16}
    hf_model = build_model("llama", **sizes)
    model, ids = EarlyExitModel.from_target(hf_model, exits=[2]), torch.tensor([prompt_of(9)])
    has_kernels = dispatch.implementation("cpu") == "cpu"
    name = "prompt_lookup_num_tokens"
    assert model.stream(ids, max_new_tokens=4).settings[name] == (6 if has_kernels else 0)
    assert model.stream(ids, max_new_tokens=4, draft="off").settings[name] == 0
    assert model.stream(ids, max_new_tokens=4, prompt_lookup_num_tokens=0).settings[name] == 0
    for asked in ({name: -1}, {name: 0, "draft": "lookup"}):
        with pytest.raises(ValueError, match=f"{name} must be >= "):
            model.prepare(ids, max_new_tokens=4, **asked)
    with pytest.raises(ValueError, match="at most 63"):
        model.prepare(ids, max_new_tokens=4, prompt_lookup_num_tokens=64)
    monkeypatch.setenv("SELFSPEC_KERNELS", "reference")
    plain = EarlyExitModel.from_target(hf_model, exits=[2])
    assert plain.stream(ids, max_new_tokens=4).settings[name] == 0
    drafter, _ = plain.prepare(ids, max_new_tokens=4, exact=True, prompt_lookup_num_tokens=5)
    assert drafter.lookup is not None  # type: ignore[attr-defined]
    assert not drafter.lookup.joins  # type: ignore[attr-defined]  # only chains are exact here


def test_padded_exact_mode_takes_chains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFSPEC_KERNELS", "reference")
    model = EarlyExitModel.from_target(build_model("llama").bfloat16(), exits=[2])
    ids = torch.tensor([REPEATED])
    options = {"max_new_tokens": 40, "exact": True, "prompt_lookup_num_tokens": 7}
    monkeypatch.setattr("selfspec.lookup.SURE", 0.2)
    monkeypatch.setattr("selfspec.lookup.LEAST", 0.01)
    expected, drafts = model.generate(ids, draft="off", **options).sequences, list[Draft]()
    propose = ChainDrafter.propose
    monkeypatch.setattr(ChainDrafter, "propose", lambda self, s: drafts.append(propose(self, s)) or drafts[-1])
    assert torch.equal(model.generate(ids, **options).sequences, expected)
    assert all(draft.is_chain for draft in drafts)
    assert any(draft.num_drafted > 2 for draft in drafts)  # more than the exit has


def test_pauses_of_the_exit_are_its_own_doing() -> None:
    """What was looked up and accepted says nothing of an exit that was not asked."""
    target = shallow_target_of("llama")
    head = ExitHead(target, "lens", ExitConfig(exit_layer=2, min_accepted=0.9))
    state = new_state(target, REPEATED, NUM_NEW)
    drafter = DRAFTERS["chain"](target, head, 2, 0.0, 1, PromptLookup(7))
    drafter.pace.mean = 0.0  # it pauses
    asked = 0
    for _ in decode(target, drafter, state):
        asked += drafter.pace._seen is not None
    assert asked <= state.stats.num_cycles // 4
    assert state.stats.num_accepted > 0
