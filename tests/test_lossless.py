"""L2 and L3: the text with speculation is the text without, token for token, and in exact mode bit for bit."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from selfspec.decode import EXACT_WIDTHS, exact_width
from selfspec.drafter import HOPE, RETRY, WINDOW, ChainDrafter, NoDrafter, Pace
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.sampling import NonFiniteLogitsError, Sampling
from selfspec.stats import DecodeStats
from selfspec.target import Target
from tests.conftest import (
    ScriptedDrafter,
    accepted_logits,
    assert_every_outcome,
    autoregressive,
    build_model,
    every_outcome,
    generate,
    prompt_of,
    shallow_target_of,
    target_of,
)

EIGHT = ["llama", "qwen3", "mistral", "mixtral", "gemma2", "phi3", "gpt_neox", "gpt2"]
SAMPLED = Sampling(temperature=1.0, top_p=0.9)
PROMPT = prompt_of(10, seed=5)


def untrained(target: Target, exit_layer: int, draft_len: int) -> ChainDrafter:
    return ChainDrafter(target, ExitHead.untrained(target, exit_layer), draft_len)


@pytest.mark.parametrize("family", EIGHT)
def test_greedy_text_from_every_exit(family: str) -> None:
    """Greedy fp32 text equals AR's for every exit layer 1..5 and draft length 1..5; some drafts stand, some do not."""
    target, accepted, drafted = shallow_target_of(family), 0, 0
    text = autoregressive(target, PROMPT, 9)
    for exit_layer in range(1, 6):
        for draft_len in range(1, 6):
            state = generate(target, untrained(target, exit_layer, draft_len), PROMPT, 9)
            assert state.tokens == text, (exit_layer, draft_len)
            accepted, drafted = accepted + state.stats.num_accepted, drafted + state.stats.num_drafted
    assert 0 < accepted < drafted


@pytest.mark.parametrize("family", EIGHT)
def test_sampled_text_with_the_same_seed(family: str) -> None:
    """Under `coupled` the sampled fp32 text of a seed is the same with speculation; another seed gives another."""
    target = shallow_target_of(family)
    texts = []
    for seed in (1, 2**62 + 1):
        settings = {"sampling": SAMPLED, "seed": seed}
        texts.append(autoregressive(target, PROMPT, 12, **settings))
        for exit_layer, draft_len in ((1, 2), (3, 5), (5, 3)):
            state = generate(target, untrained(target, exit_layer, draft_len), PROMPT, 12, **settings)
            assert state.tokens == texts[-1], (exit_layer, draft_len)
    assert texts[0] != texts[1]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("min_confidence", [0.0, 0.97])
def test_text_from_an_adapter(family: str, min_confidence: float) -> None:
    """An exit with bridge, borrowed block, recall, reduced vocabulary and a confidence stop changes no token either."""
    target = shallow_target_of(family)
    config = ExitConfig(
        exit_layer=2,
        recall_layers=(2, 4, 6),
        num_steps=3,
        draft_vocab=tuple(range(3, 80)),
        lora_rank=2,
        min_confidence=min_confidence,
    )
    head = ExitHead(target, "x", config, build_adapter(target, config))
    for sampling in (Sampling(), SAMPLED, Sampling(temperature=0.8, repetition_penalty=1.3)):
        text = autoregressive(target, PROMPT, 20, sampling=sampling)
        state = generate(target, ChainDrafter(target, head, 4, min_confidence), PROMPT, 20, sampling=sampling)
        assert state.tokens == text
        assert state.stats.num_drafted > 0
        if min_confidence:  # the untrained confidence is .982 a step: one draft a cycle, then .964 < .97
            assert state.stats.num_drafted <= state.stats.num_cycles


@pytest.mark.parametrize("draft_len", [1, 2, 3, 5])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_none_some_and_all_accepted(family: str, sampling: Sampling, draft_len: int) -> None:
    """A scripted drafter drives cycles that accept none, some and all of k drafts; the text stays AR's."""
    target = target_of(family)
    text = autoregressive(target, PROMPT, 40, sampling=sampling)
    drafter = ScriptedDrafter(text, draft_len, every_outcome(10, 40, draft_len))
    state = generate(target, drafter, PROMPT, 40, sampling=sampling)
    assert state.tokens == text
    assert_every_outcome(state, draft_len)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_trees_of_drafts(sampling: Sampling) -> None:
    """With a wrong sibling before every right one the accepted path jumps over rows; the text stays AR's."""
    target = target_of("qwen3")
    text = autoregressive(target, PROMPT, 30, sampling=sampling)
    drafter = ScriptedDrafter(text, 3, every_outcome(10, 30, 3), has_decoys=True)
    state = generate(target, drafter, PROMPT, 30, sampling=sampling)
    assert state.tokens == text
    assert {0, 3} <= {n for n, count in enumerate(state.stats.accepted_histogram) if count}


def test_stats_add_up() -> None:
    """Cycles, drafts, accepted ones and emitted tokens agree with one another and with the text."""
    target = target_of("llama")
    text = autoregressive(target, PROMPT, 30)
    stats = generate(target, ScriptedDrafter(text, 3, every_outcome(10, 30, 3)), PROMPT, 30).stats
    assert stats.num_tokens == 30 == stats.num_emitted + 1
    assert stats.num_cycles == sum(stats.accepted_histogram)
    assert stats.num_accepted == sum(n * count for n, count in enumerate(stats.accepted_histogram))
    assert stats.num_emitted == stats.num_accepted + stats.num_cycles
    assert stats.tau == stats.num_emitted / stats.num_cycles


@pytest.mark.parametrize("place", range(11, 19))
def test_end_of_text_anywhere_in_a_cycle(place: int) -> None:
    """EOS as an accepted draft, first or last, or as the bonus or recovered token: the text ends right there."""
    target = target_of("llama")
    text = autoregressive(target, PROMPT, 20)
    eos = frozenset({text[place]})
    expected = autoregressive(target, PROMPT, 20, eos_ids=eos)
    assert expected[-1] == text[place]
    assert len(expected) <= place + 1
    for errors in ((), {place - 1}, {place}):
        state = generate(target, ScriptedDrafter(text, 3, errors), PROMPT, 20, eos_ids=eos)
        assert state.tokens == expected
        assert state.done
        assert state.stats.num_tokens == len(expected) - len(PROMPT)
        assert set(state.cache.lengths[: target.num_layers]) == {len(expected) - 1}  # the last token has no row yet


@pytest.mark.parametrize("min_length", [10, 11, 14, 17, 30])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_min_length_holds_inside_a_draft(sampling: Sampling, min_length: int) -> None:
    """No EOS before min_length, although AR's text without it has one there; drafting crosses that length."""
    target = shallow_target_of("llama")
    free = autoregressive(target, PROMPT, 25, sampling=sampling)
    settings = {"eos_ids": frozenset(free[11:18:2]), "min_length": min_length, "sampling": sampling}
    text = autoregressive(target, PROMPT, 25, **settings)
    assert not set(text[10:min_length]) & settings["eos_ids"]
    for drafter in (untrained(target, 2, 4), ScriptedDrafter(text, 3, {13}), ScriptedDrafter(free, 4)):
        assert generate(target, drafter, PROMPT, 25, **settings).tokens == text


@pytest.mark.parametrize("num_tokens", range(1, 9))
def test_budget_ends_at_every_place_of_a_cycle(num_tokens: int) -> None:
    """With 1 to 8 tokens to go and drafts of 3, exactly so many come, the drafts never outrun the budget."""
    target = shallow_target_of("llama")
    text = autoregressive(target, PROMPT, 8)
    for drafter in (untrained(target, 2, 3), ScriptedDrafter(text, 3), ScriptedDrafter(text, 3, {12, 15})):
        state = generate(target, drafter, PROMPT, num_tokens)
        assert state.tokens == text[: 10 + num_tokens]
        assert state.stats.num_tokens == num_tokens
        assert max(state.cache.lengths) <= 10 + num_tokens


def test_the_users_criterion_ends_the_text_inside_a_block() -> None:
    """is_stopped is asked after every token in turn, as in AR, and accepted tokens behind it are dropped."""
    target = target_of("llama")
    text = autoregressive(target, PROMPT, 20)
    for length in range(11, 18):
        asked: list[int] = []

        def criterion(tokens: list[int], asked: list[int] = asked, length: int = length) -> bool:
            asked.append(len(tokens))
            return len(tokens) == length

        state = generate(target, ScriptedDrafter(text, 4), PROMPT, 20, is_stopped=criterion)
        assert state.tokens == text[:length]
        assert asked == list(range(11, length + 1))
        assert set(state.cache.lengths[: target.num_layers]) == {length - 1}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_k": 20}], ids=["greedy", "sampled"])
def test_repetition_penalty_counts_drafted_tokens(sampling: dict[str, Any]) -> None:
    """Row i is penalised for the drafts before it: the text is AR's, and greedy AR's is transformers' own."""
    target = shallow_target_of("qwen3")
    penalised = Sampling(**sampling, repetition_penalty=1.5)
    text = autoregressive(target, PROMPT, 30, sampling=penalised)
    assert text != autoregressive(target, PROMPT, 30, sampling=Sampling(**sampling))
    if penalised.is_greedy:
        ids = torch.tensor([PROMPT])
        settings = {"do_sample": False, "repetition_penalty": 1.5, "eos_token_id": None}
        assert text == target.base.generate(ids, max_new_tokens=30, **settings)[0].tolist()
    for drafter in (untrained(target, 2, 4), ScriptedDrafter(text, 3, every_outcome(10, 30, 3))):
        state = generate(target, drafter, PROMPT, 30, sampling=penalised)
        assert state.tokens == text
        assert state.stats.num_accepted > 0


class Recorder(LogitsProcessor):
    """A user's stateful processor: forbids what it said three calls ago and notes every prefix that it saw."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []
        self.favourites: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.append(input_ids[0].tolist())
        scores[0, self.favourites[-3:]] = float("-inf")
        self.favourites.append(int(scores.argmax()))
        return scores


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("has_decoys", [False, True], ids=["chain", "tree"])
def test_a_users_processor_sees_what_it_sees_in_ar(sampling: Sampling, has_decoys: bool) -> None:
    """A stateful processor is called once a token, on accepted rows only, with AR's prefixes in AR's order."""
    target, reference = target_of("llama"), Recorder()
    text = autoregressive(target, PROMPT, 24, sampling=sampling, processors=LogitsProcessorList([reference]))
    assert reference.prefixes == [text[:n] for n in range(10, 34)]
    recorder = Recorder()
    drafter = ScriptedDrafter(text, 3, every_outcome(10, 24, 3), has_decoys)
    settings = {"sampling": sampling, "processors": LogitsProcessorList([recorder])}
    state = generate(target, drafter, PROMPT, 24, **settings)
    assert state.tokens == text
    assert recorder.prefixes == reference.prefixes
    assert 0 < state.stats.num_accepted < state.stats.num_drafted


class Spread(LogitsProcessor):
    """Moves logits up, past zero, where a repetition penalty divides instead of multiplying: order matters."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.abs().neg() + torch.arange(scores.shape[-1]) % 7


def test_penalty_and_processor_in_transformers_order() -> None:
    """With a repetition penalty and a user's processor the text is that of transformers' generate."""
    target, processors = target_of("llama"), LogitsProcessorList([Spread()])
    settings = {"do_sample": False, "repetition_penalty": 1.7, "eos_token_id": None, "logits_processor": processors}
    expected = target.base.generate(torch.tensor([PROMPT]), max_new_tokens=20, **settings)[0].tolist()
    sampling = Sampling(repetition_penalty=1.7)
    assert autoregressive(target, PROMPT, 20, sampling=sampling, processors=processors) == expected
    state = generate(target, ScriptedDrafter(expected, 3, {14}), PROMPT, 20, sampling=sampling, processors=processors)
    assert state.tokens == expected


def test_drafting_pauses_where_it_does_not_pay() -> None:
    """Without a hit drafts become rare, with hits again they come back; the text was AR's all along."""
    target, pace = target_of("llama"), Pace(0.25)
    head = ExitHead.untrained(target, 1)
    wrong = torch.full((target.vocab_size,), -1.0)
    wrong[2] = 1.0  # an id that AR's text does not have
    head.logits = lambda *_: wrong  # type: ignore[method-assign]
    text = autoregressive(target, PROMPT, 120)
    assert 2 not in text[10:]
    state = generate(target, ChainDrafter(target, head, 1), PROMPT, 120)
    assert state.tokens == text
    assert state.stats.num_accepted == 0
    first = next(n for n in range(60) if HOPE * (1 - 1 / WINDOW) ** n < 0.05)
    assert state.stats.num_drafted == first + (119 - 1 - first) // RETRY  # the last token leaves no room for a draft

    def cycles(hits: list[bool]) -> list[bool]:
        drafted = []
        for is_hit in hits:
            drafted.append(pace.pays(stats))
            stats.record(int(drafted[-1]), int(drafted[-1] and is_hit), 1)
        return drafted

    stats = DecodeStats()
    assert all(cycles([True] * 20))
    assert sum(cycles([False] * 40)) < 20
    assert all(cycles([True] * 40)[-10:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_exit_logits_stop_drafting(bad: float) -> None:
    """NaN or Inf from an exit, at first or in mid-draft, ends drafting for good and costs no token."""
    target = shallow_target_of("llama")
    text = autoregressive(target, PROMPT, 20, sampling=SAMPLED)
    for num_good in (0, 1, 4):
        head, calls = ExitHead.untrained(target, 2), []
        whole = head.logits

        def broken(*arguments: Any, calls: list[int] = calls, whole: Any = whole, num_good: int = num_good) -> Tensor:
            calls.append(1)
            return whole(*arguments) if len(calls) <= num_good else whole(*arguments) * 0 + bad

        head.logits = broken  # type: ignore[method-assign]
        state = generate(target, ChainDrafter(target, head, 3), PROMPT, 20, sampling=SAMPLED)
        assert state.tokens == text
        assert state.stats.num_drafted == num_good
        assert len(calls) == num_good + 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=9)])
@pytest.mark.parametrize("is_speculative", [False, True])
def test_non_finite_target_logits_are_an_error_with_the_position(is_speculative: bool, sampling: Sampling) -> None:
    """NaN in the target's own logits raises with the position of the row, with speculation and without."""
    target = Target(build_model("llama"))
    text = autoregressive(target, PROMPT, 12, sampling=sampling)
    original = target.logits

    def broken(hidden: Tensor, cache: Any = None) -> Tensor:
        logits = original(hidden, cache)
        first = cache.lengths[target.num_layers - 1] - hidden.shape[1]
        if first <= 15 < first + hidden.shape[1]:
            logits[0, 15 - first, 3] = float("nan")
        return logits

    target.logits = broken  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLogitsError, match="position 15 "):
        generate(target, ScriptedDrafter(text, 3) if is_speculative else NoDrafter(), PROMPT, 12, sampling=sampling)


def test_exact_width_holds_the_rows_of_a_draft() -> None:
    """The width is the smallest of 2 .. 64 that holds draft_len + 1 rows; beyond 63 drafts there is none."""
    for draft_len in range(64):
        width = exact_width(draft_len)
        assert width >= draft_len + 1
        assert not [w for w in EXACT_WIDTHS if draft_len + 1 <= w < width]
    with pytest.raises(ValueError, match="at most 63, got 64"):
        exact_width(64)


def exact_rows(
    judged: list[Any], target: Target, drafter: Any, prompt: Sequence[int], width: int, sampling: Sampling
) -> tuple[list[int], dict[int, Tensor]]:
    """Text and logits by position of an exact run."""
    state = generate(target, drafter, prompt, 24, width, sampling=sampling)
    return state.tokens, accepted_logits(judged)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_exact_mode_is_bit_identical(family: str, dtype: torch.dtype, sampling: Sampling, judged: list[Any]) -> None:
    """In exact mode every accepted row's logits are, bit for bit, those of row 0 of an AR run of the same width, be the
    rows drafted through the shallow layers or passed from layer 0; so is the text, sampled at T=1 too."""
    target = shallow_target_of(family, dtype)
    for prompt, draft_len, exit_layer in ((PROMPT, 3, 2), (prompt_of(3), 5, 4)):  # longer and shorter than the width
        width = exact_width(draft_len)
        text, reference = exact_rows(judged, target, NoDrafter(), prompt, width, sampling)
        assert sorted(reference) == list(range(len(prompt), len(prompt) + 23))
        scripted = ScriptedDrafter(text, draft_len, every_outcome(len(prompt), 24, draft_len))
        for drafter in (scripted, untrained(target, exit_layer, draft_len)):
            found, rows = exact_rows(judged, target, drafter, prompt, width, sampling)
            assert found == text
            for position, row in reference.items():  # the last cycle may end behind the text
                assert torch.equal(rows[position], row), (position, drafter)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_fast_mode_is_not_bit_identical(family: str, judged: list[Any]) -> None:
    """Without the fixed width the same comparison fails in fp32, for every row: the check above can fail."""
    target = shallow_target_of(family)
    text = generate(target, NoDrafter(), PROMPT, 24).tokens
    reference = accepted_logits(judged)
    generate(target, ScriptedDrafter(text, 5), PROMPT, 24)
    rows = accepted_logits(judged)
    assert not all(torch.equal(rows[position], row) for position, row in reference.items() if position in rows)
