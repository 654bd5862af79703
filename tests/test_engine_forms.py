"""Every form of draft and both rules through the engine, held against the loop: cycle by cycle the same drafts."""

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec import EarlyExitModel
from selfspec.device_cycle import DeviceCycle, DeviceVerdict
from selfspec.device_draft import DeviceDrafter
from selfspec.drafter import ChainDrafter
from tests.conftest import mutate
from tests.engine_tools import PROMPT, both, quiet_model

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"exit_layer": 1},
    "chain-0": {"exit_layer": 0},
    "recursive": {"form": "recursive", "exit_layer": 1},
    "recursive-0": {"form": "recursive", "exit_layer": 0, "draft_vocab": tuple(range(0, 97, 2))},
    "lens": {"form": "recursive", "exit_layer": 1, "num_blocks": 0, "recall_layers": ()},
    "parallel": {"form": "parallel", "exit_layer": 1, "correction_rank": 8, "draft_vocab": tuple(range(0, 97, 2))},
    "parallel-0": {"form": "parallel", "exit_layer": 0, "correction_rank": 8, "correction": "state", "num_blocks": 2},
}


@functools.cache
def model_of(family: str) -> EarlyExitModel:
    return quiet_model(family, **SHAPES)


@dataclass
class Cycle:
    """What was seen of one."""

    states: list[Tensor]  # [D] each, that drafts were drawn from
    emitted: list[int]
    num_accepted: int


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """The exit's states of every draft, loop's or engine's."""
    seen: list[list[Tensor]] = []
    monkeypatch.setattr(ChainDrafter, "is_stepwise", True)
    for kind in (ChainDrafter, DeviceDrafter):
        propose, guess = kind.propose, kind.guess

        def propose_too(drafter: Any, *state: Any, propose: Any = propose) -> Any:
            seen.append([])
            return propose(drafter, *state)

        def guess_too(drafter: Any, normed: Tensor, *others: Any, guess: Any = guess) -> Any:
            seen[-1].append(normed[0, 0].clone())
            return guess(drafter, normed, *others)

        monkeypatch.setattr(kind, "propose", propose_too)
        monkeypatch.setattr(kind, "guess", guess_too)
    return seen


def cycles(model: EarlyExitModel, states: list[list[Tensor]], **settings: Any) -> list[Cycle]:
    """Every cycle of a text."""
    states.clear()
    emissions = list(model.stream(PROMPT, **{"max_new_tokens": 30, **settings}))[1:]
    return [Cycle(s, e.tokens, e.num_accepted) for s, e in zip(states, emissions, strict=False)]


def assert_same(ours: list[Cycle], theirs: list[Cycle]) -> None:
    """The engine drafts on where the loop stops, and never less."""
    assert [(c.emitted, c.num_accepted) for c in ours] == [(c.emitted, c.num_accepted) for c in theirs]
    for mine, their in zip(ours, theirs, strict=True):
        for a, b in zip(mine.states, their.states, strict=False):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert len(mine.states) >= len(their.states)


@pytest.mark.parametrize("name", SHAPES)
def test_forms_draft_what_the_loop_drafts(monkeypatch, count_cycles, states, name):
    """Greedy and sampled, both rules, in and out of exact mode, with a stop and without; none, some and all accepted,
    which the noise alone decides at a high temperature.
    """
    model, seen = model_of("llama"), set[int]()
    for settings in ({"exact": True}, {"temperature": 20.0, "seed": 1}, {"temperature": 20.0, "seed": 2, "exact": True},
                     {"temperature": 0.9, "top_p": 0.9, "seed": 3, "acceptance": "rejection", "exact": True},
                     {"temperature": 20.0, "seed": 4, "acceptance": "rejection", "min_confidence": 0.4}):  # fmt: skip
        settings = {"exit": name, "draft_len": 3, **settings}
        ours = cycles(model, states, **settings)
        with monkeypatch.context() as patch:
            patch.setenv("SELFSPEC_ENGINE", "off")
            assert_same(ours, cycles(model, states, **settings))
        seen |= {cycle.num_accepted for cycle in ours}
    assert {0, 3} < seen
    assert set(count_cycles) == {3}


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_families_draft_in_all_forms(monkeypatch, count_cycles, states, family):
    """A sliding window passed, with rows that wait for the block."""
    for name in ("recursive", "parallel-0"):
        settings = {"exit": name, "draft_len": 2, "temperature": 1.0, "seed": 5, "exact": name == "recursive"}
        ours = cycles(model_of(family), states, **settings)
        with monkeypatch.context() as patch:
            patch.setenv("SELFSPEC_ENGINE", "off")
            assert_same(ours, cycles(model_of(family), states, **settings))
    assert set(count_cycles) == {2}


@pytest.mark.parametrize("name", ["recursive", "parallel-0"])
def test_pauses_leave_no_position_unseen(monkeypatch, count_cycles, name):
    """Drafting in every other cycle, so that what waits for the block is seen by a step that drafts nothing."""
    turns = iter(range(1000))
    monkeypatch.setattr("selfspec.drafter.Pace.pays", lambda *_: next(turns) % 2 == 0)
    ours, theirs = both(model_of("llama"), monkeypatch, exit=name, draft_len=2, temperature=1.0, seed=1)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert set(count_cycles) == {0, 2}


@pytest.mark.parametrize("name", ["recursive-0", "parallel"])
def test_exact_mode_holds_in_half_precision(monkeypatch, count_cycles, name):
    """L3: the text without drafts, in a dtype in which rows computed otherwise would change it."""
    model = quiet_model("llama", torch.bfloat16, **{name: SHAPES[name]})
    for seed in range(2):
        settings = {"max_new_tokens": 40, "draft_len": 3, "temperature": 3.0, "seed": seed, "exact": True}
        drafted = model.generate(PROMPT, **settings)
        assert torch.equal(drafted.sequences, model.generate(PROMPT, draft="off", **settings).sequences)
        assert drafted.stats.num_accepted > 5
    assert set(count_cycles) == {0, 3}


def test_as_many_rows_as_a_pass_takes(monkeypatch, count_cycles, caplog):
    """A parallel draft's rows go along with as many that wait: 64 in all; more are left to the loop."""
    model = model_of("llama")
    settings = {"exit": "parallel", "temperature": 20.0, "seed": 1, "max_new_tokens": 20}
    for draft_len in (32, 33):
        ours, theirs = both(model, monkeypatch, draft_len=draft_len, **settings)
        assert torch.equal(ours.sequences, theirs.sequences)
    assert set(count_cycles) == {32}
    assert "parallel drafts of 33 tokens" in caplog.text


def test_a_greedy_text_is_the_same_by_both_rules(monkeypatch, count_cycles):
    ours, theirs = both(model_of("llama"), monkeypatch, exit="chain", acceptance="rejection", draft_len=3)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert count_cycles


def test_a_guess_of_logits_that_are_not_finite_never_counts(monkeypatch, count_cycles):
    """Under `rejection` too, where a distribution that is none would be subtracted from the target's."""
    model = model_of("llama")
    with monkeypatch.context() as patch:
        weight = model.exits["chain"].norm.weight
        patch.setattr(weight, "data", torch.full_like(weight, torch.nan))
        ours, theirs = both(model, monkeypatch, exit="chain", draft_len=2, temperature=1.0, seed=1,
                            acceptance="rejection")  # fmt: skip
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.stats.num_drafted == 0
    assert count_cycles


@pytest.mark.parametrize(("owner", "old", "new"), [
    ("DeviceCycle._waiting", "slice(seen, None)", "slice(None, -seen)"),
    ("DeviceCycle._waiting", "slice(seen - 1, -1)", "slice(seen, None)"),
    ("DeviceCycle._keep", "torch.minimum(held.first + kind.num_seen, stands)", "stands"),
    ("DeviceDrafter.first_states", "held.first - held.seen + ", ""),
    ("DeviceCycle.judge", "torch.where(is_drawn, above, kind.num_rows - 1)", "above[None]"),
    ("Draws.tokens", "self.seed, positions", "self.seed, positions + 1"),
])  # fmt: skip
def test_a_planted_bug_changes_drafts(monkeypatch, count_cycles, states, owner, old, new):
    """What the comparison above would see: wrong rows kept, wrong rows read, undrawn tokens judged, other noise."""
    from selfspec import device_cycle, device_draft, device_steps

    kind, _, name = owner.partition(".")
    module = next(m for m in (device_steps, device_draft, device_cycle) if hasattr(m, kind))
    mutate(monkeypatch, getattr(getattr(module, kind), name), old, new)
    settings = {"exit": "recursive", "draft_len": 2, "temperature": 1.0, "seed": 2, "min_confidence": 0.4,
                "acceptance": "rejection"}  # fmt: skip
    made: list[list[Cycle]] = []
    for engine in ("calls", "off"):
        monkeypatch.setenv("SELFSPEC_ENGINE", engine)
        made.append(cycles(model_of("llama"), states, **settings))
    with pytest.raises(AssertionError):
        assert_same(*made)


# ---- trees --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Of every tree that the engine verified, how many drafts stood and whether the last of them was a sibling."""
    seen, judge = list[tuple[int, bool]](), DeviceCycle.judge

    def spy(*arguments: Any) -> DeviceVerdict:
        verdict = judge(*arguments)
        if verdict.path is not None:
            seen.append((int(verdict.num_accepted), int(verdict.last) > int(verdict.num_accepted)))
        return verdict

    monkeypatch.setattr(DeviceCycle, "judge", spy)
    return seen


TREE = {"draft_len": 3, "draft_width": 3, "temperature": 10.0}


def trees(monkeypatch: pytest.MonkeyPatch, states: list[list[Tensor]], model: EarlyExitModel, **settings: Any) -> None:
    """Cycle by cycle the engine's trees are the loop's where all siblings are kept; the text is plain decoding's."""
    settings = {**TREE, **settings}
    ours = cycles(model, states, **settings)
    with monkeypatch.context() as patch:
        patch.setenv("SELFSPEC_ENGINE", "off")
        assert_same(ours, cycles(model, states, **settings))
    plain = model.generate(PROMPT, max_new_tokens=30, draft="off", **settings).sequences[0, PROMPT.shape[1] + 1 :]
    assert [token for cycle in ours for token in cycle.emitted] == plain.tolist()


@pytest.mark.parametrize("name", ["chain", "recursive-0", "parallel"])
def test_trees_are_those_of_the_loop(monkeypatch, count_cycles, states, ends, name):
    """With a stop and without; siblings stand at any depth, behind drafts that stood."""
    for settings in ({"seed": 1}, {"seed": 2}, {"seed": 4, "min_confidence": 0.4, "top_k": 9}):
        trees(monkeypatch, states, model_of("llama"), exit=name, **settings)
    assert {(1, True), (2, True)} < set(ends)
    assert {0, 1, 2, 3} == {num_accepted for num_accepted, _ in ends}
    assert set(count_cycles) == {0, 3}


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_families_draft_trees(monkeypatch, count_cycles, states, ends, family):
    """Greedy and sampled; a sliding window passed, of which a sibling sees as much as the draft beside it."""
    trees(monkeypatch, states, model_of(family), exit="parallel-0", draft_len=2, temperature=0.0)
    trees(monkeypatch, states, model_of(family), exit="chain-0", draft_len=2, seed=1)
    assert any(is_sibling for _, is_sibling in ends)


@pytest.mark.parametrize(("owner", "old", "new"), [
    ("DeviceCycle._keep", "self.passes.compact(verdict.path[None, 1:], verdict.num_accepted, held.first)", "pass"),
    ("DeviceCycle._keep", "stands - (verdict.last > verdict.num_accepted).long()", "stands"),
    ("DeviceCycle._keep", "recalls.index_select(1, verdict.last)", "recalls.index_select(1, verdict.num_accepted)"),
    ("DeviceCycle._waiting", "verdict.path[seen:]", "self.rows[seen:]"),
    ("DeviceCycle._waiting", "self.tree.parents[rows]", "rows - 1"),
    ("DeviceCycle.score", "self.tree if self.kind.is_tree else None", "None"),
    ("DeviceCycle.judge", "self.tree.depths[None]", "torch.arange(kind.num_rows)[None]"),
    ("DeviceDrafter.trunk", "self.held.first + offset, tree)", "self.held.first + offset)"),
    ("DeviceDrafter.siblings", "scores.masked_fill(self.ids == found[-1][..., None], least)", "scores"),
])  # fmt: skip
def test_a_planted_bug_changes_trees(monkeypatch, count_cycles, states, owner, old, new):
    """Rows that stay where they were, a block that has not seen a sibling, others' states, places, masks, tokens."""
    from selfspec import device_cycle, device_draft

    kind, _, name = owner.partition(".")
    module = next(m for m in (device_draft, device_cycle) if hasattr(m, kind))
    mutate(monkeypatch, getattr(getattr(module, kind), name), old, new)
    with pytest.raises(AssertionError):
        trees(monkeypatch, states, model_of("llama"), exit="chain", seed=1)


def test_sampled_drafts_judged_by_their_q_have_no_siblings_here_either(monkeypatch, count_cycles, ends):
    settings = {**TREE, "exit": "chain", "seed": 1, "acceptance": "rejection"}
    ours, theirs = both(model_of("llama"), monkeypatch, **settings)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.stats.num_drafted == theirs.stats.num_drafted <= 3 * ours.stats.num_cycles
    assert not ends
    both(model_of("llama"), monkeypatch, **settings | {"temperature": 0.0})  # a greedy text is that of `coupled`
    assert ends


def test_an_exits_own_width_counts_where_its_cycles_run(monkeypatch, count_cycles, ends):
    """To the text's end, and whether or not its stop is reached; exact mode drafts chains."""
    model = quiet_model("llama", tree={**SHAPES["parallel"], "draft_width": 3, "draft_len": 2})
    for num_new in (1, 2, 3, 25):
        made = model.generate(PROMPT, max_new_tokens=num_new).sequences
        assert torch.equal(made, model.generate(PROMPT, max_new_tokens=num_new, draft="off").sequences)
    assert ends
    ends.clear()
    assert model.stream(PROMPT, max_new_tokens=9).settings["draft_width"] == 3
    monkeypatch.setenv("SELFSPEC_ENGINE", "off")
    assert model.stream(PROMPT, max_new_tokens=9).settings["draft_width"] == 1
    monkeypatch.setenv("SELFSPEC_ENGINE", "calls")
    model.generate(PROMPT, max_new_tokens=9, exact=True)
    assert not ends
