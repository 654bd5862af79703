"""Kernels that draw and judge tokens: the reference's noise bit for bit, and its tokens."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from selfspec import verify
from selfspec.kernels import noise_reference, sample_reference, verify_reference
from selfspec.sampling import ACCEPT_STREAM, RECOVER_STREAM, Sampling, draw, logits_to_probs, uniform
from tests.kernel_tools import DEVICE, kernels

noise_triton, sample_triton, verify_triton = map(kernels, ("noise", "sample", "verify"))
triton, tl = pytest.importorskip("triton"), pytest.importorskip("triton.language")

SEEDS = [0, 1, 7, 2**31 - 1, 2**32 + 5, 2**62 + 11, 2**63 + 3, 2**64 - 1]
POSITIONS = [0, 1, 2, 101, 4096, 2**31 + 9]
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    with DEVICE:
        yield


@triton.jit
def write_noise(seeds, positions, low, high, made, num_columns, STREAM: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    a, b = noise_triton.keys(tl.load(seeds + row), STREAM, tl.load(positions + row))
    tl.store(low + row, a.to(tl.int32, bitcast=True))
    tl.store(high + row, b.to(tl.int32, bitcast=True))
    tl.store(made + row * num_columns + column, noise_triton.uniform(a, b, column), mask=column < num_columns)


def signed(seeds: list[int]) -> Tensor:
    return torch.tensor([seed - (seed >> 63 << 64) for seed in seeds])


@pytest.mark.parametrize("stream", noise_reference.STREAMS)
def test_noise_has_the_same_bits_everywhere(stream: int) -> None:
    """From Python's integers, from tensors and in a kernel, for seeds and positions of any size."""
    seeds, positions = signed(SEEDS).repeat_interleave(len(POSITIONS)), torch.tensor(POSITIONS * len(SEEDS))
    words = torch.tensor([noise_reference.keys(s, stream, p) for s in SEEDS for p in POSITIONS], dtype=torch.int32)
    assert torch.equal(torch.stack(noise_reference.keys(seeds, stream, positions), 1), words.long())
    plain = torch.cat([uniform(seed, stream, POSITIONS, torch.arange(97)) for seed in SEEDS])
    low, high = torch.empty(2, len(seeds), dtype=torch.int32)
    found = torch.full(plain.shape, torch.nan)
    write_noise[(len(seeds),)](seeds, positions, low, high, found, 97, STREAM=stream, BLOCK=128)
    assert torch.equal(torch.stack([low, high], 1), words)
    assert torch.equal(found, plain)
    rows = noise_reference.row_noise(signed(SEEDS), stream, torch.tensor([POSITIONS] * len(SEEDS)), torch.arange(97))
    assert torch.equal(rows.flatten(0, 1), plain)


def random_logits(batch: int, rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return (3 * torch.randn(batch, rows, vocab, generator=generator, device="cpu")).to(DEVICE, dtype)


def places(batch: int, rows: int) -> tuple[Tensor, Tensor]:
    """Seeds [B] and positions [B, R] of ragged sequences."""
    return signed(SEEDS[-batch:]), torch.arange(rows) + torch.tensor([[11], [0], [4096]])[:batch]


def wide_scores(scores: Tensor, seeds: Tensor, positions: Tensor, temperature: float, is_probs: bool) -> Tensor:
    """In float64, from the same uniform numbers."""
    noise = noise_reference.row_noise(seeds, 1, positions, torch.arange(scores.shape[2])).double()
    if is_probs:
        return (scores.double() / -noise.log()).log()
    return scores.double() / temperature - (-noise.log()).log()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("batch", "rows", "vocab"), [(1, 1, 1), (3, 5, 97), (1, 2, 4096), (2, 1, 9001)])
@pytest.mark.parametrize("is_probs", [False, True], ids=["logits", "probs"])
def test_tokens_are_the_references(is_probs: bool, batch: int, rows: int, vocab: int, dtype: torch.dtype) -> None:
    """The same tokens wherever the best score leads by more than rounding; there no token is far behind the best.

    A score in float32 is off by an ulp of the logit, of the quotient and of the logarithms, hence the bound.
    """
    logits, (seeds, positions) = random_logits(batch, rows, vocab, dtype), places(batch, rows)
    scores, temperature = (logits.float().softmax(-1).to(dtype), 1.0) if is_probs else (logits, 0.7)
    arguments = (scores, seeds, positions, temperature, 1, None, is_probs)
    found, plain = sample_triton.sample(*arguments), sample_reference.sample(*arguments)
    wide = wide_scores(scores, seeds, positions, temperature, is_probs)
    bound = 4 * EPS * (8 if is_probs else wide.abs().amax(-1) + 8)
    best = wide.topk(min(2, vocab), dim=-1).values
    is_clear = best[..., 0] - best[..., -1] > bound if vocab > 1 else torch.ones(batch, rows, dtype=torch.bool)
    assert is_clear.float().mean() > 0.99
    for tokens in (found, plain):
        assert torch.equal(tokens[is_clear], wide.argmax(-1)[is_clear])
        assert bool((best[..., 0] - wide.gather(-1, tokens[..., None])[..., 0] <= bound).all())
    if vocab > 1 and rows > 1:  # the noise of the next position, or of another stream, would be seen
        assert not torch.equal(found, sample_triton.sample(scores, seeds, positions + 1, *arguments[3:]))
        assert not torch.equal(found, sample_triton.sample(*arguments[:4], 2, None, is_probs))


def test_tokens_are_those_of_draw() -> None:
    """Of logits and of the distribution made of them, as the engine draws them today."""
    logits, (seeds, positions) = random_logits(2, 6, 97), places(2, 6)
    for temperature in (0.0, 0.4, 1.0, 1.7):
        probs = logits_to_probs(logits.flatten(0, 1), Sampling(temperature=temperature)).view_as(logits)
        noise = noise_reference.row_noise(seeds, 0, positions, torch.arange(97))
        drawn = draw(probs.flatten(0, 1), noise.flatten(0, 1)).view(2, 6)
        assert torch.equal(sample_triton.sample(logits, seeds, positions, temperature), drawn)
        assert torch.equal(sample_triton.sample(probs, seeds, positions, is_probs=True), drawn)


def test_a_part_of_the_vocabulary_draws_by_its_token_ids() -> None:
    """Columns of a reduced head have the noise of the ids they stand for, and give those."""
    logits, (seeds, positions) = random_logits(2, 4, 500), places(2, 4)
    ids = torch.arange(499, -1, -7)
    whole = logits.new_full(logits.shape, float("-inf")).index_copy(2, ids, logits[:, :, ids])
    found = sample_triton.sample(logits[:, :, ids], seeds, positions, columns=ids)
    assert torch.equal(found, sample_reference.sample(logits[:, :, ids], seeds, positions, columns=ids))
    assert torch.equal(found, sample_triton.sample(whole, seeds, positions))


@pytest.mark.parametrize("vocab", [3, 1024, 1025, 9001])
def test_the_first_of_equals_wins(vocab: int) -> None:
    """Within a block, across blocks and parts, with and without noise; a forbidden column never."""
    seeds, positions = places(1, 1)
    logits = torch.zeros(1, 1, vocab)
    for first in (0, vocab // 2, vocab - 1):
        logits[..., :first] = float("-inf")
        assert sample_triton.sample(logits, seeds, positions, 0.0).item() == first
        same = torch.full((vocab,), 5)  # one id, so one number, for all columns: all scores are equal
        marked = same.clone()
        marked[first + 1 :] += 2**32  # the hash takes the lowest 32 bits
        assert sample_triton.sample(logits, seeds, positions, columns=marked).item() == 5
        probs = (logits == 0).float() / vocab
        assert sample_triton.sample(probs, seeds, positions, columns=marked, is_probs=True).item() == 5
    signs = torch.tensor([[[-0.0, 0.0]]])
    assert sample_triton.sample(signs, seeds, positions, 0.0).item() == 0
    assert sample_triton.sample(torch.full((1, 1, vocab), float("-inf")), seeds, positions, 0.0).item() == 0


def test_sample_refuses_what_it_cannot_take() -> None:
    logits, (seeds, positions) = random_logits(1, 2, 5), places(1, 2)
    for function in (sample_triton.sample, sample_reference.sample):
        with pytest.raises(ValueError, match=r"positions must be \[1, 2\], got \[1, 1\]"):
            function(logits, seeds, positions[:, :1])
        with pytest.raises(TypeError, match=r"seeds must be torch.int64, got torch.int32"):
            function(logits, seeds.int(), positions)
        with pytest.raises(ValueError, match="temperature must be >= 0, got -1"):
            function(logits, seeds, positions, -1.0)


# -- verification


def random_parents(batch: int, count: int, is_chain: bool, generator: torch.Generator) -> Tensor:
    rows = torch.arange(count, device="cpu")
    chances = torch.rand(batch, count, generator=generator, device="cpu")
    return (rows if is_chain else (chances * (rows + 1)).long()).expand(batch, count).to(DEVICE)


def random_ids(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=generator, device="cpu").to(DEVICE)


def depths_of(parents: Tensor) -> Tensor:
    """[B, K + 1], of every row."""
    depths = parents.new_zeros(len(parents), parents.shape[1] + 1)
    for j in range(parents.shape[1]):
        depths[:, j + 1] = depths.gather(1, parents[:, j : j + 1])[:, 0] + 1
    return depths


def assert_same(found: verify_reference.Found, expected: verify.Verdict, lengths: Tensor) -> None:
    path, accepted, following, new_lengths = found
    assert torch.equal(path, expected.path.to(path.dtype))
    assert torch.equal(accepted, expected.num_accepted)
    assert torch.equal(following, expected.next_token)
    assert torch.equal(new_lengths, lengths + expected.num_accepted + 1)


@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 33, 63])
def test_coupled_verdicts_are_those_of_verify(count: int, is_chain: bool) -> None:
    """Kernel and reference, over random drafts with siblings of one token; none and all accepted among them."""
    generator, vocab, batch = torch.Generator().manual_seed(count), 2, 12
    parents = random_parents(batch, count, is_chain, generator)
    tokens, own = random_ids(generator, vocab, batch, count), random_ids(generator, vocab, batch, count + 1)
    own[:3] = own[:3, :1]
    tokens[0], tokens[1] = own[0, 0], 1 - own[1, 0]  # all that can be are accepted; none is
    lengths = random_ids(generator, 50, batch)
    expected = verify.verify_coupled(own, verify.Draft(tokens, parents))
    for module in (verify_triton, verify_reference):
        assert_same(module.verify_coupled(own, tokens, parents, lengths), expected, lengths)
    if count:
        accepted = expected.num_accepted.tolist()
        assert accepted[1] == 0
        assert accepted[0] == count if is_chain else accepted[0] > 0


def dyadic(generator: torch.Generator, *shape: int) -> Tensor:
    """Distributions in multiples of 1/64: their sums and differences are exact in any order."""
    ids = torch.randint(0, shape[-1], (*shape[:-1], 64), generator=generator, device="cpu")
    skewed = torch.minimum(ids, ids.roll(1, -1))  # some columns likelier than others
    counts = torch.zeros(shape, device="cpu").scatter_add_(-1, skewed, torch.ones(skewed.shape, device="cpu"))
    return (counts / 64).to(DEVICE)


@pytest.mark.parametrize("is_one_hot", [False, True], ids=["q", "one-hot"])
@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize(("count", "vocab", "block"), [(0, 5, 4), (1, 3, 8), (4, 11, 8192), (5, 40, 16)])
def test_rejection_verdicts_are_those_of_verify(
    count: int, vocab: int, block: int, is_chain: bool, is_one_hot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernel and reference, with the noise of the streams that the engine uses; residuals of several siblings, of equal
    distributions (no mass left) and of disjoint ones among them."""
    monkeypatch.setattr(verify_triton, "BLOCK", block)
    generator, batch = torch.Generator().manual_seed(count), 5
    parents = random_parents(batch, count, is_chain, generator)
    p, q = dyadic(generator, batch, count + 1, vocab), dyadic(generator, batch, count, vocab)
    p[0], q[0] = p[0, :1], p[0, :1]  # always accepted
    tokens = random_ids(generator, min(vocab - 1, 9), batch, count)
    p[1] = p[1].index_fill(-1, tokens[1], 0.0)  # never accepted
    p[1, :, vocab - 1] += 1 - p[1].sum(-1)
    p[2:4], q[2:4], tokens[3] = 0.0, 0.0, 0
    p[2:4, :, 0], q[2:4, :, 0] = 1.0, 1.0  # tokens that q did not draw: nothing is left of p; and that all agree on
    seeds, lengths = torch.arange(batch) + 2**40, random_ids(generator, 50, batch)
    positions = lengths[:, None] + depths_of(parents)
    ids, drafts = torch.arange(vocab), torch.arange(count)
    starts = list(zip(seeds.tolist(), positions.tolist(), strict=True))
    accept = torch.cat([uniform(seed, ACCEPT_STREAM, at[:1], drafts) for seed, at in starts])
    recover = torch.stack([uniform(seed, RECOVER_STREAM, at, ids) for seed, at in starts])
    probs = None if is_one_hot else q
    expected = verify.verify_rejection(p, verify.Draft(tokens, parents, probs), accept, recover)
    arguments = (p, tokens, parents, probs, seeds, positions, lengths)
    for module in (verify_triton, verify_reference):
        assert_same(module.verify_rejection(*arguments), expected, lengths)
    if count:
        assert expected.num_accepted.min() == 0
        assert expected.num_accepted.max() > 0


@pytest.mark.parametrize(("stream", "wrong"), [("ACCEPT_STREAM", 1), ("RECOVER_STREAM", 2)])
def test_noise_of_another_stream_is_noticed(stream: str, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: drafts, acceptance and recovery share noise."""
    generator, batch = torch.Generator().manual_seed(5), 12
    p, q = dyadic(generator, batch, 3, 8), dyadic(generator, batch, 2, 8)
    tokens, parents = random_ids(generator, 8, batch, 2), random_parents(batch, 2, True, generator)
    lengths, seeds = random_ids(generator, 50, batch), torch.arange(batch)
    arguments = (p, tokens, parents, q, seeds, lengths[:, None] + torch.arange(3), lengths)
    monkeypatch.setattr(verify_triton, stream, wrong)
    found, expected = verify_triton.verify_rejection(*arguments), verify_reference.verify_rejection(*arguments)
    assert torch.equal(found[1], expected[1]) == (stream == "RECOVER_STREAM")
    assert not torch.equal(found[2], expected[2])


def test_verification_refuses_what_it_cannot_take() -> None:
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    own, lengths, probs = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.ones(1, 3, 5)
    for module in (verify_triton, verify_reference):
        with pytest.raises(ValueError, match=r"must be \[1, 4\], got \[1, 3\]"):
            module.verify_coupled(own[:, :3], tokens, tokens, lengths)
        with pytest.raises(ValueError, match=r"target_probs must be \[1, 4, 5\], got \[1, 3, 5\]"):
            module.verify_rejection(probs, tokens, tokens, None, lengths, own, lengths)
