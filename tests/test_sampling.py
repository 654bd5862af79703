"""One way to make a distribution, and noise that is uniform, independent and the same for a part as for the whole."""

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from selfspec.sampling import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    RECOVER_STREAM,
    TARGET_STREAM,
    NonFiniteLogitsError,
    Sampling,
    argmax,
    draw,
    guess_scores,
    logits_to_probs,
    require_finite,
    uniform,
)
from tests.conftest import CHI_SQUARE_LEVEL, chi_square

STREAMS = (TARGET_STREAM, DRAFT_STREAM, ACCEPT_STREAM, RECOVER_STREAM)
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "repetition_penalty": 1.4},
    {"temperature": 1.0, "repetition_penalty": 0.8},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
]


def random_logits(num_rows: int = 50, vocab_size: int = 61, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s))
def test_probs_equal_those_of_transformers(settings: dict[str, Any]) -> None:
    """logits_to_probs keeps the same tokens with the same mass as transformers' warpers, in their order."""
    logits = random_logits()
    prefix = torch.tensor([3, 9, 9, 27, 41])
    warpers = LogitsProcessorList()
    if "repetition_penalty" in settings:
        warpers.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    warpers.append(TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        warpers.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        warpers.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        warpers.append(MinPLogitsWarper(settings["min_p"]))
    expected = warpers(prefix.expand(len(logits), -1), logits.clone()).softmax(-1)
    probs = logits_to_probs(logits, Sampling(**settings), [prefix] * len(logits))
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-7)


def test_greedy_is_one_hot_at_the_first_largest() -> None:
    """Temperature 0 and top_p 0 give a one-hot; of tied logits the lowest id wins, in draw as well."""
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [7.0, 7.0, 7.0, 7.0]])
    expected = torch.tensor([[0.0, 1, 0, 0], [1, 0, 0, 0]])
    for sampling in (Sampling(), Sampling(temperature=0.9, top_p=0.0), Sampling(temperature=0.9, top_k=1, top_p=0.0)):
        probs = logits_to_probs(logits, sampling)
        assert torch.equal(probs, expected)
        assert draw(probs, None).tolist() == [1, 0]
        assert draw(probs, torch.full((2, 4), 0.3)).tolist() == [1, 0]  # noise cannot move a one-hot


def test_guesses_use_as_much_of_the_noise_as_they_are_told() -> None:
    """All of it: what q itself draws, at any temperature; less: a draw of a sharper q."""
    generator = torch.Generator().manual_seed(0)
    logits, noise = torch.randn(500, 40, generator=generator) * 3, torch.rand(500, 40, generator=generator)
    q = (logits / 0.7).softmax(-1)
    assert torch.equal(guess_scores(q, noise, 0.7, 1.0).argmax(-1), draw(q, noise))
    sharper = draw((logits / 0.35).softmax(-1), noise)
    assert torch.equal(guess_scores(q, noise, 0.7, 0.5).argmax(-1), sharper)
    assert not torch.equal(sharper, draw(q, noise))
    barely = guess_scores(q, noise, 0.7, 1e-6).softmax(-1)  # in units of logits
    torch.testing.assert_close(barely, logits.softmax(-1), rtol=1e-4, atol=1e-6)


def test_ties() -> None:
    """top_k keeps all that tie with its last one (as transformers does), top_p only as many as it needs."""
    logits = torch.tensor([[2.0, 2.0, 2.0, 0.0]])
    kept = logits_to_probs(logits, Sampling(temperature=1.0, top_k=2))[0]
    torch.testing.assert_close(kept, torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0]))
    kept = logits_to_probs(torch.zeros(1, 4), Sampling(temperature=1.0, top_p=0.5))[0]
    torch.testing.assert_close(kept, torch.tensor([0.5, 0.5, 0.0, 0.0]))


def test_forbidden_tokens_get_no_mass() -> None:
    """A forbidden id has probability zero, greedy or not, by one mask for all rows or one for each."""
    logits = torch.tensor([[9.0, 1.0, 0.0], [0.0, 1.0, 9.0]])
    shared, by_row = torch.tensor([True, False, False]), torch.tensor([[True, False, False], [False, False, True]])
    assert logits_to_probs(logits, Sampling(), forbidden=shared).argmax(-1).tolist() == [1, 2]
    probs = logits_to_probs(logits, Sampling(temperature=1.0), forbidden=by_row)
    assert probs[0, 0] == 0
    assert probs[1, 2] == 0
    torch.testing.assert_close(probs.sum(-1), torch.ones(2))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"top_p": math.nan},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
    ],
)
def test_values_outside_their_range_are_named(settings: dict[str, float]) -> None:
    """Every setting outside its range raises ValueError with its name and value."""
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        Sampling(**settings)  # type: ignore[arg-type]


def test_non_finite_logits_are_found_at_their_position() -> None:
    """NaN and +Inf are refused with the position; -Inf is an ordinary way to forbid a token."""
    logits = torch.zeros(3, 4)
    logits[1, 2] = float("-inf")
    require_finite(logits, 10)
    for bad in (float("nan"), float("inf")):
        broken = logits.clone()
        broken[2, 0] = bad
        with pytest.raises(NonFiniteLogitsError, match="position 12 "):
            require_finite(broken, 10)


@pytest.mark.parametrize("stream", STREAMS)
def test_noise_is_uniform(stream: int) -> None:
    """Over ids, over positions and over seeds the noise is uniform on (0, 1) (Kolmogorov-Smirnov)."""
    ids = torch.arange(20_000)
    samples = {
        "ids": uniform(1, stream, [5], ids)[0],
        "positions": uniform(1, stream, range(5000), torch.tensor([17]))[:, 0],
        "seeds": torch.cat([uniform(seed, stream, [5], torch.tensor([17]))[0] for seed in range(2000)]),
    }
    for name, sample in samples.items():
        assert sample.min() > 0, name
        assert sample.max() < 1, name
        assert stats.kstest(sample.numpy(), "uniform").pvalue > CHI_SQUARE_LEVEL, name


def test_noise_is_independent() -> None:
    """Streams, neighbouring positions, ids and seeds are uncorrelated, and pairs fill the square evenly."""
    ids = torch.arange(20_000)
    base = uniform(3, TARGET_STREAM, [100], ids)[0]
    others = {
        **{f"stream {s}": uniform(3, s, [100], ids)[0] for s in STREAMS[1:]},
        "next position": uniform(3, TARGET_STREAM, [101], ids)[0],
        "next seed": uniform(4, TARGET_STREAM, [100], ids)[0],
        "far seed": uniform(2**63 + 3, TARGET_STREAM, [100], ids)[0],
        "next id": uniform(3, TARGET_STREAM, [100], ids + 1)[0],
        "stream of the next position": uniform(3, TARGET_STREAM, [104], ids)[0],
    }
    for name, other in others.items():
        cells = (base * 8).long() * 8 + (other * 8).long()
        counts = torch.bincount(cells, minlength=64)
        assert chi_square(counts, torch.full((64,), 1 / 64)) > CHI_SQUARE_LEVEL, name
        assert not torch.equal(base, other), name


def test_a_part_of_the_vocabulary_has_the_noise_of_the_whole() -> None:
    """A subset of ids, of positions, or another order of calls gets the very same numbers: what coupling rests on."""
    whole = uniform(9, DRAFT_STREAM, range(40), torch.arange(500))
    ids = torch.tensor([499, 3, 77, 0])
    assert torch.equal(uniform(9, DRAFT_STREAM, [7, 31], ids), whole[[7, 31]][:, ids])
    assert torch.equal(uniform(9, DRAFT_STREAM, [31], torch.arange(500))[0], whole[31])


@pytest.mark.parametrize("settings", [{"temperature": 1.0}, {"temperature": 0.8, "top_k": 4, "min_p": 0.05}])
def test_draw_follows_p(settings: dict[str, Any]) -> None:
    """40,000 draws with the package's noise are distributed as p (chi-square); masked tokens never come."""
    probs = logits_to_probs(random_logits(1, 12), Sampling(**settings))
    noise = uniform(5, TARGET_STREAM, range(40_000), torch.arange(12))
    counts = torch.bincount(draw(probs.expand(40_000, -1), noise), minlength=12)
    assert chi_square(counts, probs[0]) > CHI_SQUARE_LEVEL
    assert chi_square(counts, probs[0].roll(1)) < CHI_SQUARE_LEVEL  # the test can fail


@pytest.mark.parametrize(("seed", "stream", "position", "expected"), [
    (0, TARGET_STREAM, 0, [3452181, 7832547, 3848263]),
    (7, DRAFT_STREAM, 5, [8277739, 2223564, 3841967]),
    (2**63 + 3, ACCEPT_STREAM, 4096, [6191634, 1824325, 5082146]),
    (2**64 - 1, RECOVER_STREAM, 100_000, [2407733, 2521420, 4211583]),
])  # fmt: skip
def test_a_seed_means_the_same_noise_in_every_version(
    seed: int, stream: int, position: int, expected: list[int]
) -> None:
    """Numbers written down from the first version: a text drawn with a seed can be drawn again."""
    found = uniform(seed, stream, [position], torch.tensor([0, 1, 49_151]))[0]
    assert torch.equal(found.double() * 2**23 - 0.5, torch.tensor(expected, dtype=torch.float64))


def test_noise_is_never_one_and_a_draw_never_impossible():
    """u = 1 would make 0 / -log u undefined and draw a token of no probability; 50 million numbers hold no such u."""
    ids = torch.arange(49_152)
    for begin in range(0, 1000, 100):
        noise = uniform(3, TARGET_STREAM, range(begin, begin + 100), ids)
        assert noise.min() > 0
        assert noise.max() < 1
    probs = torch.zeros(100, len(ids)).index_fill_(1, torch.tensor([7]), 1.0)
    assert (draw(probs, noise) == 7).all()


def test_the_largest_of_equals_is_the_first_with_and_without_gradients():
    scores = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]])
    assert argmax(scores).tolist() == argmax(scores.requires_grad_()).tolist() == [1, 0]
