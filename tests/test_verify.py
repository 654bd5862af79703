"""L1: given the target's logits, emitted tokens are exactly argmax, or exactly distributed as p, under both rules."""

import functools
import itertools
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from selfspec import verify
from selfspec.sampling import (
    TARGET_STREAM,
    Sampling,
    draw,
    logits_to_probs,
    uniform,
)
from selfspec.verify import Draft, verify_coupled, verify_rejection
from tests.conftest import mutate

# shapes of drafts: the parent row of every drafted token
CHAIN_1, CHAIN_2, CHAIN_3 = (0,), (0, 1), (0, 1, 2)
TWINS, TRIPLETS, TREE = (0, 0), (0, 0, 0), (0, 0, 1)


def conditional(table: Tensor, prefix: tuple[int, ...]) -> Tensor:
    """p(. | prefix) [V] in float64 of a made-up language: it depends on the whole prefix."""
    row = hash(prefix) % len(table)
    return table[row]


def decisions(target_probs: Tensor, draft: Draft) -> dict[tuple[int, ...], tuple[float, Tensor]]:
    """Path -> (probability, distribution of the next token), read off `verify_rejection` itself.

    The threshold of each acceptance is found by bisection of its noise with all others forced; the distribution that
    the next token is drawn from is caught on its way to `draw`.
    """
    num_drafts, vocab = draft.num_drafted, target_probs.shape[-1]
    recover = torch.full((1, num_drafts + 1, vocab), 0.5, dtype=torch.float64)
    caught: list[Tensor] = []
    original = verify.draw

    def run(noise: list[float]) -> tuple[tuple[int, ...], Tensor]:
        caught.clear()
        verdict = verify_rejection(target_probs, draft, torch.tensor([noise], dtype=torch.float64), recover)
        path = tuple(verdict.path[0, : int(verdict.num_accepted[0])].tolist())
        return path, caught[-1]

    def spy(probs: Tensor, noise: Tensor | None) -> Tensor:
        caught.append(probs)
        return original(probs, noise)

    @functools.cache
    def threshold_of(j: int, before: tuple[float, ...], after: tuple[float, ...]) -> float:
        """Probability that draft j is accepted, all other decisions forced."""
        accepted, rejected = run([*before, 0.0, *after]), run([*before, 1e300, *after])
        if accepted[0] == rejected[0] and torch.equal(accepted[1], rejected[1]):
            return 0.5  # never asked, or sure to be rejected: the two halves end in the same place
        low, high = 0.0, 1.0
        for _ in range(54):
            middle = (low + high) / 2
            outcome = run([*before, middle, *after])
            is_accepted = outcome[0] == accepted[0] and torch.equal(outcome[1], accepted[1])
            low, high = (middle, high) if is_accepted else (low, middle)
        return low

    law: dict[tuple[int, ...], tuple[float, Tensor]] = {}
    verify.draw = spy  # type: ignore[attr-defined]
    try:
        for bits in itertools.product((0.0, 1e300), repeat=num_drafts):  # 0 accepts what can be, 1e300 nothing
            chance = 1.0
            for j, bit in enumerate(bits):
                threshold = threshold_of(j, bits[:j], bits[j + 1 :])
                chance *= threshold if bit == 0 else 1 - threshold
            path, following = run(list(bits))
            held = law.get(path)
            if held is None:
                law[path] = (chance, following)
            else:  # the same end by another way: mix
                total = held[0] + chance
                mixed = (held[0] * held[1] + chance * following) / total if total > 0 else following
                law[path] = (total, mixed)
    finally:
        verify.draw = original  # type: ignore[attr-defined]
    return law


def largest_gap(table: Tensor, q_table: Tensor, shape: tuple[int, ...]) -> float:
    """Largest difference between the joint law of the emitted tokens and the target's, over all sequences."""
    vocab = table.shape[-1]
    depths = [0]
    for parent in shape:
        depths.append(depths[parent] + 1)
    length = max(depths) + 1
    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens in itertools.product(range(vocab), repeat=len(shape)):
        chance, prefixes, qs = 1.0, [()], []  # type: ignore[var-annotated]
        for j, (token, parent) in enumerate(zip(tokens, shape, strict=True)):
            q = conditional(q_table, prefixes[parent]).clone()
            q[[tokens[i] for i in range(j) if shape[i] == parent]] = 0.0  # siblings: without replacement
            q = q / q.sum() if q.sum() > 0 else q
            chance *= q[token].item()
            prefixes.append((*prefixes[parent], token))
            qs.append(q)
        if chance == 0:
            continue
        rows = torch.stack([conditional(table, prefix) for prefix in prefixes])[None]
        draft = Draft(torch.tensor([tokens]), torch.tensor([shape]), torch.stack(qs)[None])
        for path, (weight, following) in decisions(rows, draft).items():
            stem = prefixes[path[-1]] if path else ()
            for token in range(vocab):
                emitted[(*stem, token)] += chance * weight * following[token].item()
    gap = 0.0
    for sequence in itertools.product(range(vocab), repeat=length):  # short ones go on as the target does
        wanted = found = 1.0
        for i, token in enumerate(sequence):
            wanted *= conditional(table, sequence[:i])[token].item()
        found = 0.0
        for stop in range(1, length + 1):
            rest = 1.0
            for i in range(stop, length):
                rest *= conditional(table, sequence[:i])[sequence[i]].item()
            found += emitted[sequence[:stop]] * rest
        gap = max(gap, abs(found - wanted))
    return gap


def random_table(num_rows: int, vocab: int, seed: int, sharpness: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab, generator=generator, dtype=torch.float64) * sharpness).softmax(-1)


@pytest.mark.parametrize(
    ("shape", "vocab"),
    [(CHAIN_1, 5), (CHAIN_2, 3), (CHAIN_3, 2), (TWINS, 4), (TRIPLETS, 3), (TREE, 3)],
    ids=["chain-1", "chain-2", "chain-3", "twins", "triplets", "tree"],
)
def test_rejection_is_exact(shape: tuple[int, ...], vocab: int) -> None:
    """Summed over all drafts and decisions, acceptance + rejection * residual is p to 1e-12, jointly."""
    table, q_table = random_table(7, vocab, 1), random_table(7, vocab, 2)
    assert largest_gap(table, q_table, shape) < 1e-12
    table[:, 0], q_table[:, 1] = 0.0, 0.0  # supports that differ, as top-k makes them
    table[0] = q_table[0]  # and a row where they agree: no residual mass
    table, q_table = table / table.sum(-1, keepdim=True), q_table / q_table.sum(-1, keepdim=True)
    if vocab > shape.count(0):  # enough tokens to draw the siblings from
        assert largest_gap(table, q_table, shape) < 1e-12


weights = st.lists(st.sampled_from([0.0, 1e-6, 0.1, 0.25, 0.5, 1.0, 3.0]), min_size=3, max_size=3).filter(any)


@hypothesis_settings(max_examples=15, deadline=None, derandomize=True)
@given(p=weights, q=weights, shape=st.sampled_from([CHAIN_1, TWINS]))
def test_rejection_is_exact_on_any_small_vocabulary(p: list[float], q: list[float], shape: tuple[int, ...]) -> None:
    """The same for distributions that hypothesis looks for: zeros, ties, equal ones, disjoint supports."""
    table, q_table = torch.tensor([p, p[::-1]], dtype=torch.float64), torch.tensor([q, q], dtype=torch.float64)
    if sum(w > 0 for w in q) < len(shape):
        shape = CHAIN_1  # too few tokens to draw two
    normal, q_normal = table / table.sum(-1, keepdim=True), q_table / q_table.sum(-1, keepdim=True)
    assert largest_gap(normal, q_normal, shape) < 1e-12


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(p - q).clamp_min(0.0)", "p"),
        ("(p - q).clamp_min(0.0)", "(p - q).abs()"),
        ("accept_noise[child - 1] * q[token] < p[token]", "accept_noise[child - 1] < p[token]"),
        ("accept_noise[child - 1]", "accept_noise[0]"),
    ],
    ids=["no-residual", "unsigned-residual", "no-q", "one-noise-for-all"],
)
def test_enumeration_catches_a_wrong_residual(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Planted bugs in the rejection walk move the law by more than 1e-3: the enumeration is no tautology."""
    mutate(monkeypatch, verify._walk_rejection, old, new)
    table, q_table = random_table(7, 3, 1), random_table(7, 3, 2)
    assert max(largest_gap(table, q_table, shape) for shape in (CHAIN_1, CHAIN_2, TWINS)) > 1e-3


@pytest.mark.parametrize("shape", [CHAIN_1, CHAIN_3, TWINS, TREE, (0, 0, 1, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "sampled"])
def test_coupled_is_the_targets_own_text(shape: tuple[int, ...], is_greedy: bool) -> None:
    """Whatever the draft, each emitted token is argmax(log p + g) at its row; the walk ends where drafts differ."""
    vocab, batch = 3, 200
    generator = torch.Generator().manual_seed(len(shape))
    probs = torch.rand(batch, len(shape) + 1, vocab, generator=generator).softmax(-1)
    depths = [0]
    for parent in shape:
        depths.append(depths[parent] + 1)
    noise = uniform(0, TARGET_STREAM, range(batch * 8), torch.arange(vocab)).view(batch, 8, vocab)[:, depths]
    if is_greedy:
        probs, noise = logits_to_probs(probs.log().flatten(0, 1), Sampling()).view_as(probs), None
    tokens = torch.randint(0, vocab, (batch, len(shape)), generator=generator)
    verdict = verify_coupled(draw(probs, noise), Draft(tokens, torch.tensor([shape] * batch)))
    scores = probs if noise is None else probs.log() - noise.log().neg().log()  # log p + Gumbel noise
    own = scores.argmax(-1)
    for b in range(batch):
        row, path = 0, verdict.path[b, : int(verdict.num_accepted[b])].tolist()
        for child in path:
            assert shape[child - 1] == row
            assert tokens[b, child - 1] == own[b, row]
            row = child
        assert verdict.next_token[b] == own[b, row]
        agreeing = [j for j, parent in enumerate(shape) if parent == row and tokens[b, j] == own[b, row]]
        assert not agreeing
        assert (verdict.path[b, len(path) :] == -1).all()
    assert verdict.num_accepted.unique().numel() > 1


def test_shape_errors_carry_values() -> None:
    """Rows missing from what the target says are refused by both rules, naming K and what came."""
    draft = Draft(torch.zeros(1, 3, dtype=torch.long), torch.tensor([[0, 1, 2]]))
    probs = torch.full((1, 3, 5), 0.2)
    with pytest.raises(ValueError, match=r"own needs K\+1 positions for K=3, got 3"):
        verify_coupled(torch.zeros(1, 3, dtype=torch.long), draft)
    with pytest.raises(ValueError, match=r"target_probs needs K\+1 positions for K=3, got 3"):
        verify_rejection(probs, draft, torch.zeros(1, 3), torch.zeros(1, 4, 5))


def test_draft_knows_its_shape() -> None:
    """num_drafted and is_chain; an empty draft is a chain whose verdict is the target's own token."""
    assert Draft(torch.zeros(2, 2, dtype=torch.long), torch.tensor([[0, 1], [0, 1]])).is_chain
    assert not Draft(torch.zeros(2, 2, dtype=torch.long), torch.tensor([[0, 1], [0, 0]])).is_chain
    empty = Draft(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, dtype=torch.long))
    assert (empty.num_drafted, empty.is_chain) == (0, True)
    verdict = verify_coupled(torch.tensor([[1]]), empty)
    assert (verdict.path.shape, verdict.num_accepted.tolist(), verdict.next_token.tolist()) == ((1, 0), [0], [1])


def test_rows_may_be_a_function_called_on_accepted_ones_alone() -> None:
    """A function of (row, accepted rows before it) is asked for the walk's rows in order, never for rejected ones."""
    asked = []

    def probs(row: int, path: list[int]) -> Tensor:
        asked.append((row, list(path)))
        return torch.eye(4)[[1, 2, 0, 3][row]]

    draft = Draft(torch.tensor([[1, 0, 3]]), torch.tensor([[0, 1, 2]]))  # row 1 says 2, the draft 0
    assert verify_coupled(lambda row, path: int(probs(row, path).argmax()), draft).next_token.tolist() == [2]
    assert asked == [(0, []), (1, [1])]
    asked.clear()
    verdict = verify_rejection(probs, draft, torch.full((1, 3), 0.5), torch.full((1, 4, 4), 0.5))
    assert (verdict.next_token.tolist(), asked) == ([2], [(0, []), (1, [1])])
