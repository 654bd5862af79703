"""A cascade: an early exit guesses ahead for a later one. Drafts, text and cache are those of the later one alone."""

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from selfspec import cli_generate
from selfspec.cache import KVCache
from selfspec.cascade import CascadeDrafter, CascadeHead
from selfspec.cli import app
from selfspec.decode import DecodeState, decode
from selfspec.drafter import ChainDrafter
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.model import EarlyExitModel
from selfspec.sampling import Sampling
from selfspec.target import Target
from selfspec.verify import Draft
from tests.conftest import autoregressive, chat_model, new_state, prompt_of, shallow_target_of

PROMPT = prompt_of(10, seed=5)
SAMPLED = Sampling(temperature=1.0, top_p=0.9)


def trained(target: Target, name: str, exit_layer: int, seed: int = 0, **settings: Any) -> ExitHead:
    """An exit with a borrowed block whose bridge passes the tap on, somewhat changed."""
    config = ExitConfig(exit_layer=exit_layer, lora_rank=2, **{"draft_vocab": tuple(range(3, 90)), **settings})
    torch.manual_seed(seed)
    adapter = build_adapter(target, config)
    with torch.no_grad():
        for parameter_name, parameter in adapter.named_parameters():
            if ".bridge." in parameter_name and parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
                parameter[:, : parameter.shape[0]] += torch.eye(parameter.shape[0])
    return ExitHead(target, name, config, adapter)


def heads(target: Target, kind: str) -> tuple[ExitHead, ExitHead]:
    """An early and a later exit."""
    recall = {"recall_layers": (4, 6), "num_steps": 2}
    if kind == "untrained":
        return ExitHead.untrained(target, 2), ExitHead.untrained(target, 4)
    if kind == "trained":
        return trained(target, "a", 2, **recall), trained(target, "b", 3, 1, **recall)
    if kind == "early recalls nothing":
        return trained(target, "a", 1), trained(target, "b", 4, 1, **recall)
    if kind == "more blocks":  # of one layer
        return trained(target, "a", 3, num_blocks=0, **recall), trained(target, "b", 3, 1, num_blocks=2, **recall)
    if kind == "early without trunk":
        return trained(target, "a", 0, **recall), trained(target, "b", 4, 1, **recall)
    return trained(target, "a", 1), ExitHead.untrained(target, 4)  # "later untrained"


class Noting:
    """Notes what a drafter proposes."""

    def __init__(self, drafter: ChainDrafter) -> None:
        self.drafter, self.exit_head, self.drafts = drafter, drafter.exit_head, list[Draft]()

    def propose(self, state: DecodeState) -> Draft:
        self.drafts.append(self.drafter.propose(state))
        return self.drafts[-1]


def decoded(
    target: Target, drafter: ChainDrafter, num_tokens: int = 16, **settings: Any
) -> tuple[DecodeState, list[list[int]]]:
    """The final state, and what was drafted."""
    noting, state = Noting(drafter), new_state(target, PROMPT, num_tokens, **settings)
    num_layers = target.num_layers + max(drafter.exit_head.num_slots, 1)
    state.cache = KVCache(num_layers, state.cache.capacity, state.cache.width)
    for _ in decode(target, noting, state):
        pass
    return state, [draft.tokens[0].tolist() for draft in noting.drafts]


def cascade(target: Target, kind: str, draft_len: int, ahead: int, min_confidence: float = 0.0) -> CascadeDrafter:
    drafter = CascadeDrafter(target, CascadeHead(*heads(target, kind)), draft_len, min_confidence)
    drafter.early.draft_len = ahead
    return drafter


KINDS = ["untrained", "trained", "early recalls nothing", "more blocks", "early without trunk", "later untrained"]


@pytest.mark.parametrize(("family", "kind"), [*(("llama", kind) for kind in KINDS), ("gemma2", "trained")])
def test_text_is_plain_decoding_s_and_drafts_the_later_exit_s(
    monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    """For several k and guesses ahead, greedy and sampled; of the guesses some are shared, some are not."""
    target = shallow_target_of(family)
    later, passes, drafted = heads(target, kind)[1], list[int](), 0
    through = CascadeDrafter._through
    monkeypatch.setattr(CascadeDrafter, "_through", lambda *a: passes.append(a[2].shape[1]) or through(*a))
    for sampling in (Sampling(), SAMPLED if kind != "trained" else Sampling(temperature=0.8, repetition_penalty=1.3)):
        text = autoregressive(target, PROMPT, 16, sampling=sampling)
        for draft_len, ahead in ((1, 2), (3, 1), (5, 4)):
            alone, expected = decoded(target, ChainDrafter(target, later, draft_len), sampling=sampling)
            state, drafts = decoded(target, cascade(target, kind, draft_len, ahead), sampling=sampling)
            assert state.tokens == text
            assert drafts == expected
            assert state.stats.accepted_histogram == alone.stats.accepted_histogram
            drafted += sum(len(draft) + 1 for draft in drafts)  # each token's row and the bonus token's
    assert len(passes) < drafted < sum(passes)  # fewer passes of the later exit than rows, more rows than needed


@pytest.mark.parametrize("settings", [{"rule": "rejection"}, {"width": 8}, {"eos_ids": frozenset(range(3, 20))}])
def test_whatever_ends_or_judges_a_draft(settings: dict[str, Any]) -> None:
    """The other rule, exact mode, ends of text among drafts, a confidence stop: as with the later exit alone."""
    target, sampling = shallow_target_of("llama"), SAMPLED
    for min_confidence in (0.0, 0.97):  # the untrained confidence is .982 a step
        later = ChainDrafter(target, heads(target, "trained")[1], 4, min_confidence)
        alone, expected = decoded(target, later, sampling=sampling, **settings)
        drafter = cascade(target, "trained", 4, 2, min_confidence)
        state, drafts = decoded(target, drafter, sampling=sampling, **settings)
        assert (state.tokens, drafts) == (alone.tokens, expected)


def test_after_rollback_the_cache_is_a_fresh_one() -> None:
    """Of the target's layers and both exits' blocks, whose one map makes the same of a position at any step."""
    target = shallow_target_of("llama")
    head = CascadeHead(trained(target, "a", 1), trained(target, "b", 3, 1, num_blocks=2))
    state, drafts = decoded(target, CascadeDrafter(target, head, 3))
    assert sum(map(len, drafts)) > state.stats.num_accepted > 0
    whole = new_state(target, state.tokens[:-1], 2)
    whole.cache = KVCache(len(state.cache.lengths), 64)
    next(decode(target, CascadeDrafter(target, head, 3), whole))  # the prompt alone
    assert set(whole.cache.lengths) == {len(state.tokens) - 1}
    assert len(state.cache.lengths) == target.num_layers + 3
    for layer, length in enumerate(state.cache.lengths):
        assert length >= len(state.tokens) - 5  # blocks see the last positions when they draft again
        for kept, expected in ((state.cache._keys, whole.cache._keys), (state.cache._values, whole.cache._values)):
            torch.testing.assert_close(kept[layer][:, :, :length], expected[layer][:, :, :length], atol=1e-4, rtol=1e-4)


def test_no_layer_sees_a_row_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a draft, layers in front of the early exit and between both see every position and prefix once."""
    target, seen = shallow_target_of("llama"), list[tuple[Any, ...]]()
    run, drafter = Target.run_layers, cascade(shallow_target_of("llama"), "trained", 5, 2)

    def noting(self: Target, hidden: torch.Tensor, start: int, stop: int, *others: Any) -> torch.Tensor:
        cycle = 0 if not noted else noted[0].stats.num_cycles
        seen.extend((cycle, start, tuple(row.tolist())) for row in hidden[0])
        return run(self, hidden, start, stop, *others)

    noted = list[DecodeState]()
    propose = CascadeDrafter.propose
    monkeypatch.setattr(CascadeDrafter, "propose", lambda self, state: noted.append(state) or propose(self, state))
    monkeypatch.setattr(Target, "run_layers", noting)
    decoded(target, drafter)
    between = [row for row in seen if row[0] and row[1] == 2]
    assert between
    assert len(between) == len(set(between))


def test_settings_of_generate() -> None:
    """By name, from Python and the command line; what cannot be is refused in one line."""
    target = shallow_target_of("llama")
    early, later = heads(target, "trained")
    other = trained(target, "p", 4, form="parallel", num_steps=2)
    model = EarlyExitModel(target, {"a": early, "b": later, "p": other, "c": trained(target, "c", 4)})
    ids = torch.tensor([PROMPT])
    expected = model.generate(ids, max_new_tokens=12, draft="off")
    found = model.generate(ids, max_new_tokens=12, exit="b", cascade="a", draft_len=3)
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.stats.num_drafted > 0
    repeated = ids.repeat(1, 4)
    looked_up = {"exit": "b", "cascade": "a", "draft_len": 2, "prompt_lookup_num_tokens": 5, "max_new_tokens": 24}
    plain = model.generate(repeated, max_new_tokens=24, draft="off").sequences
    assert torch.equal(model.generate(repeated, **looked_up).sequences, plain)
    drafter, state = model.prepare(ids, exit="b", cascade="a", max_new_tokens=4)
    assert isinstance(drafter, CascadeDrafter)
    assert len(state.cache.lengths) == target.num_layers + 2
    for names, reason in {
        ("b", "nobody"): "no exit 'nobody'; there are: a, b, p, c",
        ("p", "a"): "two chains: a is chain, p parallel",
        ("a", "b"): r"an early exit to a later one, got b \(layer 3\) and a \(layer 2\)",
        ("b", "b"): "an early exit to a later one",
        ("c", "a"): r"recall the same layers: a \(4, 6\), c \(\)",
    }.items():
        with pytest.raises(ValueError, match=reason):
            model.generate(ids, max_new_tokens=4, exit=names[0], cascade=names[1])


def test_the_command_line_names_a_cascade(monkeypatch: pytest.MonkeyPatch) -> None:
    model = EarlyExitModel.from_target(chat_model().base, exits=[1, 3], tokenizer=chat_model().tokenizer)
    monkeypatch.setattr(cli_generate, "load", lambda *_: model)
    options = ["generate", "Hello", "--max-new-tokens", "6", "--json", "--exit", "layer-3", "--cascade"]
    texts = []
    for name in ("layer-1", "layer-2"):
        done = CliRunner().invoke(app, [*options, name])
        texts.append(done.output)
        assert done.exit_code == (0 if name in model.exits else 2)
    assert json.loads(texts[0])["settings"]["cascade"] == "layer-1"
    assert "no exit 'layer-2'" in texts[1]
