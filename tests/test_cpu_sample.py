"""The CPU's kernel draws the tokens of the definition: `draw` of `logits_to_probs` with `uniform` noise."""

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.decode import decode
from selfspec.drafter import NoDrafter
from selfspec.kernels import noise_reference
from selfspec.sampling import TARGET_STREAM, Sampling, draw, draw_token, logits_to_probs, uniform
from tests.conftest import (
    CHI_SQUARE_LEVEL,
    ScriptedDrafter,
    autoregressive,
    chi_square,
    new_state,
    prompt_of,
    target_of,
)

pytest.importorskip("numba")
cpu_sample = importlib.import_module("selfspec.kernels.cpu_sample")
SETTINGS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 256},
    {"top_k": 10**6},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 50, "min_p": 0.05},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.5},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"top_p": 0.9, "min_p": 0.02},
]


def logits_of(vocab: int, seed: int, scale: float = 4.0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


def kernels(logits: Tensor, sampling: Sampling, position: int) -> int | None:
    keys = noise_reference.keys(3, TARGET_STREAM, position)
    return cpu_sample.sample(logits, keys, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def definitions(logits: Tensor, sampling: Sampling, position: int) -> int:
    noise = uniform(3, TARGET_STREAM, [position], torch.arange(len(logits)))
    return int(draw(logits_to_probs(logits[None], sampling), noise))


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()) or "all")
@pytest.mark.parametrize("vocab", [1, 7, 97, 1023, 4099])
def test_tokens_are_the_definitions(vocab: int, settings: dict[str, Any]) -> None:
    """Over temperatures and rows with -inf and with equals; only filters that leave many columns are not taken."""
    seen = set()
    for position in range(35):
        logits = logits_of(vocab, position)
        if position % 3 == 1:
            logits[logits < logits.topk(1 + position % 5 * (vocab // 6)).values[-1]] = -math.inf
        if position % 3 == 2:
            logits = logits.round()  # equals at the edge of every filter, zeros of both signs
        for temperature in (0.3, 1.0, 1.6):
            sampling = Sampling(temperature, **settings)
            found, expected = kernels(logits, sampling, position), definitions(logits, sampling, position)
            kept = int((logits_to_probs(logits[None], sampling) > 0).sum())
            is_many = kept >= cpu_sample.MAX_TOP_K and (sampling.top_p < 1 or sampling.min_p > 0)
            assert found == expected or (is_many and found is None)
            seen.add(expected)
    assert len(seen) > 1 or vocab == 1


def test_a_whole_vocabulary_in_half_precision_and_by_two_threads() -> None:
    logits, before = logits_of(49_152, 0).bfloat16(), torch.get_num_threads()
    for sampling in (Sampling(1.0), Sampling(0.8, top_k=50), Sampling(0.8, top_p=0.9)):
        expected = [definitions(logits, sampling, position) for position in range(20)]
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                assert [kernels(logits, sampling, position) for position in range(20)] == expected
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_large_logit_does_not_swallow_its_noise(settings: dict[str, Any]) -> None:
    """Next to 10^7 float32 has whole numbers only; which of two equals is drawn is still the noise's to say."""
    logits = logits_of(97, 0, scale=1.0).round() + 1e7
    for position in range(20):
        assert kernels(logits, Sampling(1.0, **settings), position) == definitions(
            logits, Sampling(1.0, **settings), position
        )


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 6}, {"top_k": 9, "top_p": 0.8}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str
)
def test_draws_follow_p(settings: dict[str, Any]) -> None:
    """Chi-square of 20,000 draws; another temperature is seen."""
    logits = logits_of(12, 1, scale=1.0)
    drawn = [kernels(logits, Sampling(0.7, **settings), position) for position in range(20_000)]
    counts = torch.bincount(torch.tensor(drawn), minlength=12)
    assert chi_square(counts, logits_to_probs(logits[None], Sampling(0.7, **settings))[0]) > CHI_SQUARE_LEVEL
    planted = logits_to_probs(logits[None] / 0.8 * 0.7, Sampling(0.7))[0]
    planted = planted * (counts > 0)
    assert chi_square(counts, planted / planted.sum()) < CHI_SQUARE_LEVEL


def test_what_the_kernel_leaves_to_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters that leave many columns, more equals than there is room for, and rows from which nothing can be drawn."""
    flat = torch.zeros(10_000)
    for sampling in (Sampling(1.0, top_k=300), Sampling(1.0, top_p=0.9), Sampling(1.0, top_k=50)):
        assert kernels(flat, sampling, 0) is None
        assert draw_token(flat, sampling, 3, TARGET_STREAM, 0) == definitions(flat, sampling, 0)
    for value in (math.nan, -math.inf):
        for settings in SETTINGS:
            assert kernels(torch.full((97,), value), Sampling(1.0, **settings), 0) is None
    asked = []
    monkeypatch.setattr(cpu_sample, "sample", lambda *args: asked.append(args))
    logits = logits_of(97, 0)
    assert draw_token(logits, Sampling(), 3, TARGET_STREAM, 0) == int(logits.argmax())
    assert not asked


@pytest.mark.parametrize("draft_len", [0, 3])
def test_every_token_of_the_loop_is_drawn_by_it(draft_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under a penalty and before the least length; once a row, and only where drafts were accepted."""
    target, drawn, sample = target_of("llama"), list[int | None](), cpu_sample.sample
    monkeypatch.setattr(cpu_sample, "sample", lambda *args: drawn.append(sample(*args)) or drawn[-1])
    sampling = Sampling(1.0, top_k=20, repetition_penalty=1.2)
    settings = {"sampling": sampling, "eos_ids": frozenset({5}), "min_length": 20}
    text = autoregressive(target, prompt_of(9), 24, **settings)
    assert drawn == text[9:]
    drawn.clear()
    drafter = ScriptedDrafter(text, draft_len) if draft_len else NoDrafter()
    state = new_state(target, prompt_of(9), 24, **settings)
    list(decode(target, drafter, state))
    extra = len(drawn) - len(text[9:])
    assert drawn[: len(drawn) - extra] == state.tokens[9:] == text[9:]
    assert extra == bool(draft_len)  # the token behind an accepted end of text


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_nan_among_logits_stays_within_the_vocabulary(settings: dict[str, Any]) -> None:
    """Who commits the token refuses it; the kernel only must not write or read elsewhere."""
    for place in range(97):
        logits = logits_of(97, place)
        logits[place] = math.nan
        assert (kernels(logits, Sampling(1.0, **settings), 0) or 0) in range(97)
