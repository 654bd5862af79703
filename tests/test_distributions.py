"""L1 over whole texts: what the loop emits is distributed as the target's own text (chi-square), under both rules."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec import verify
from selfspec.cache import KVCache
from selfspec.decode import DecodeState, decode
from selfspec.drafter import ChainDrafter, NoDrafter, ParallelDrafter, RecursiveDrafter
from selfspec.sampling import (
    ACCEPT_STREAM,
    DRAFT_STREAM,
    RECOVER_STREAM,
    TARGET_STREAM,
    Sampling,
    draw,
    logits_to_probs,
    uniform,
)
from selfspec.verify import Draft, verify_coupled, verify_rejection
from tests.conftest import CHI_SQUARE_LEVEL, chi_square, mutate

CHAIN_2, CHAIN_3 = (0, 1), (0, 1, 2)  # the parent row of every drafted token
VOCAB, LENGTH, NUM_SAMPLES = 5, 3, 10_000
START = 2  # the token before the first
P_LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11)) * 1.2
Q_LOGITS = P_LOGITS + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(12)) * 0.8


@dataclass(frozen=True)
class Setup:
    """How a simulated decoder drafts and verifies; the fields after ``draft_vocab`` plant bugs."""

    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))
    shape: tuple[int, ...] = CHAIN_2
    draft_vocab: tuple[int, ...] | None = None
    stops_below: float = 0.0  # no further draft where the largest q is below this: decided before it is drawn
    drops_below: float = 0.0  # bug: a drawn token is dropped when its own q is below this
    drawing_temperature: float | None = None  # bug: q is reported at another temperature than it was drawn at
    accept_stream: int = ACCEPT_STREAM  # bug where it is the drafting stream


def target_rows(prefixes: Tensor, sampling: Sampling, logits: Tensor = P_LOGITS) -> Tensor:
    """Distributions [N, V] after ``prefixes`` [N, S]."""
    distinct, which = prefixes.unique(dim=0, return_inverse=True)
    return logits_to_probs(logits[distinct[:, -1]], sampling, list(distinct))[which]


def draft_rows(prefixes: Tensor, setup: Setup, sampling: Sampling) -> Tensor:
    logits = Q_LOGITS
    if setup.draft_vocab is not None:
        outside = torch.ones(VOCAB, dtype=torch.bool)
        outside[list(setup.draft_vocab)] = False
        logits = logits.masked_fill(outside, float("-inf"))
    return target_rows(prefixes, sampling, logits)


def joint_law(sampling: Sampling) -> Tensor:
    """The target's joint distribution [V] * LENGTH of the first tokens."""
    law = torch.ones(1, dtype=torch.float64)
    prefixes = torch.tensor([[START]])
    for _ in range(LENGTH):
        law = (law[:, None] * target_rows(prefixes, sampling).double()).flatten()
        following = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, 0), following], dim=1)
    return law


def simulate(rule: str, setup: Setup) -> Tensor:
    """Counts [V ** LENGTH] of the first tokens of NUM_SAMPLES texts, decoded as the loop does with the package's noise.

    Sample n's position t has the counter n * 16 + t: to the noise that is as good as a seed a sample.
    """
    pending = {1: list(enumerate([[START]] * NUM_SAMPLES)), **{n: [] for n in range(2, LENGTH + 1)}}
    done: list[list[int]] = []
    while pending:
        length = min(pending)
        batch = pending.pop(length)
        if not batch:
            continue
        samples, prefixes = torch.tensor([n for n, _ in batch]), torch.tensor([text for _, text in batch])
        for n, text in cycle(rule, setup, samples, prefixes):
            if len(text) > LENGTH:
                done.append(text[1 : LENGTH + 1])
            else:
                pending[len(text)].append((n, text))
    cells = torch.tensor(done) @ torch.tensor([VOCAB ** (LENGTH - 1 - i) for i in range(LENGTH)])
    return torch.bincount(cells, minlength=VOCAB**LENGTH)


def noise_of(stream: int, samples: Tensor, position: int, columns: int = VOCAB) -> Tensor:
    return uniform(0, stream, (samples * 16 + position).tolist(), torch.arange(columns))


def cycle(rule: str, setup: Setup, samples: Tensor, prefixes: Tensor) -> list[tuple[int, list[int]]]:
    """Draft and verify once for texts ``prefixes`` [N, S]: (sample, longer text) of each."""
    count, length = prefixes.shape
    drawn_with = setup.sampling
    if setup.drawing_temperature is not None:
        drawn_with = replace(setup.sampling, temperature=setup.drawing_temperature)
    depths, stems = [0], [prefixes]  # of each row: its depth and the text up to it
    tokens, qs = list[Tensor](), list[Tensor]()
    is_alive, num_alive = torch.ones(count, dtype=torch.bool), torch.zeros(count, dtype=torch.long)
    for j, parent in enumerate(setup.shape):
        siblings = [i for i in range(j) if setup.shape[i] == parent]
        q, drawing = (draft_rows(stems[parent], setup, s) for s in (setup.sampling, drawn_with))
        for i in siblings:  # without replacement, each with the q that it is drawn from
            q, drawing = (x.scatter(1, tokens[i][:, None], 0.0) for x in (q, drawing))
        q, drawing = q / q.sum(-1, keepdim=True), drawing / drawing.sum(-1, keepdim=True)
        is_alive &= q.amax(-1) >= setup.stops_below
        stream = DRAFT_STREAM if rule == "rejection" else TARGET_STREAM
        token = draw(drawing, noise_of(stream, samples, length + depths[parent]))
        is_alive &= q.gather(1, token[:, None])[:, 0] >= setup.drops_below
        num_alive += is_alive
        tokens.append(token)
        qs.append(q)
        depths.append(depths[parent] + 1)
        stems.append(torch.cat([stems[parent], token[:, None]], dim=1))
    out = []
    for kept in num_alive.unique().tolist():  # texts that drafted equally far
        group = num_alive == kept
        draft = Draft(
            tokens=torch.stack(tokens, 1)[group, :kept],
            parents=torch.tensor(setup.shape[:kept], dtype=torch.long).expand(int(group.sum()), -1),
            probs=torch.stack(qs, 1)[group, :kept] if rule == "rejection" else None,
        )
        rows = range(kept + 1)
        probs = torch.stack([target_rows(stems[r][group], setup.sampling) for r in rows], 1)
        stream = TARGET_STREAM if rule == "coupled" else RECOVER_STREAM
        noise = torch.stack([noise_of(stream, samples[group], length + depths[r]) for r in rows], 1)
        if rule == "coupled":
            verdict = verify_coupled(draw(probs, noise), draft)
        else:
            accept = noise_of(setup.accept_stream, samples[group], length, kept)
            verdict = verify_rejection(probs, draft, accept, noise)
        columns = (samples[group], prefixes[group], draft.tokens, verdict.path, verdict.next_token)
        for n, prefix, drafted, path, token in zip(*(c.tolist() for c in columns), strict=True):
            out.append((n, [*prefix, *[drafted[row - 1] for row in path if row > 0], token]))
    return out


SETUPS = {
    "temperature": Setup(Sampling(temperature=0.7)),
    "top-k": Setup(Sampling(temperature=1.0, top_k=3)),
    "top-p": Setup(Sampling(temperature=1.2, top_p=0.8)),
    "min-p": Setup(Sampling(temperature=1.0, min_p=0.15)),
    "penalty": Setup(Sampling(temperature=1.0, repetition_penalty=1.8)),
    "draft-vocab": Setup(draft_vocab=(0, 2, 3)),
    "stop-rule": Setup(shape=CHAIN_3, stops_below=0.5),
    "tree": Setup(shape=(0, 0, 1, 1, 2)),
    "all": Setup(
        Sampling(temperature=0.9, top_k=4, min_p=0.02, repetition_penalty=1.3), (0, 0, 1), (0, 2, 3), stops_below=0.45
    ),
}


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("name", SETUPS)
def test_joint_distribution(name: str, rule: str) -> None:
    """10,000 texts of three tokens, over several cycles, are distributed as the target's own (chi-square)."""
    setup = SETUPS[name]
    law = joint_law(setup.sampling)
    assert chi_square(simulate(rule, setup), law) > CHI_SQUARE_LEVEL


@pytest.mark.parametrize(
    "setup",
    [
        Setup(Sampling(temperature=0.7), drawing_temperature=1.2),
        Setup(accept_stream=DRAFT_STREAM),
        Setup(drops_below=0.4),
    ],
    ids=["wrong-temperature-in-q", "shared-noise", "drawn-token-dropped"],
)
def test_chi_square_catches_wrong_drafting(setup: Setup) -> None:
    """A q that was not drawn from, noise shared by drafting and acceptance, a drawn token dropped: all are caught."""
    assert chi_square(simulate("rejection", setup), joint_law(setup.sampling)) < CHI_SQUARE_LEVEL


def test_chi_square_catches_a_wrong_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovering from p instead of norm((p - q)+) is caught by the texts, too."""
    mutate(monkeypatch, verify._walk_rejection, "(p - q).clamp_min(0.0)", "p")
    assert chi_square(simulate("rejection", Setup()), joint_law(Setup().sampling)) < CHI_SQUARE_LEVEL


class TableTarget:
    """A language of bigrams with a target's interface: states are token ids, logits a look-up."""

    num_layers, vocab_size, hidden_size, dtype, device = 2, VOCAB, 1, torch.float32, torch.device("cpu")

    def embed(self, tokens: Tensor, *_: object) -> Tensor:
        return tokens[..., None].float()

    def run_layers(self, hidden: Tensor, start: int, stop: int, cache: KVCache, *_: object) -> Tensor:
        cache.advance(range(start, stop), hidden.shape[1])
        return hidden

    def finish(
        self, hidden: Tensor, start: int, cache: KVCache, depths: Sequence[int] = (), parents: object = None,
        num_logits: int | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:  # fmt: skip
        self.run_layers(hidden, start, 2, cache)
        logits = P_LOGITS[hidden[..., 0].long()]
        return logits if num_logits is None else logits[:, -num_logits:], dict.fromkeys([start, *depths], hidden)


def table_exit(vocab: tuple[int, ...]) -> SimpleNamespace:
    """An exit head over the ids ``vocab`` whose confidence falls with the token before."""
    ids = torch.tensor(vocab)

    return SimpleNamespace(
        exit_layer=1,
        tap_layers=(1,),
        blocks=[],
        correction=None,
        recall_layers=(),
        config=SimpleNamespace(min_accepted=0.0, min_branch=None, noise_scale=1.0),
        token_at=lambda place: vocab[place],
        catch_up=lambda *_: None,
        states=lambda _target, _state, tap, steps: tap.expand(1, len(steps), 1),
        chance=lambda tap: 0.3 if int(tap[0, -1, 0]) == 3 else 0.9,
        next_state=lambda _target, _state, embedded, _normed: embedded,
        slots=lambda _: range(2, 3),
        logits=lambda _target, tap, before: Q_LOGITS[int(tap[0, -1, 0]) if before is None else before][ids],
        token_ids=lambda _: ids,
        narrow=lambda mask: mask,
        positions_of=lambda tokens: (ids[None, :] == tokens.unique()[:, None]).nonzero()[:, 1],
        widen=lambda probs, size: probs.new_zeros(size).scatter_(0, ids, probs),
    )


def through_the_loop(drafter: object, num_tokens: int, **settings: Any) -> DecodeState:
    state = DecodeState([START], KVCache(3, num_tokens + 8), 1 + num_tokens, VOCAB, torch.device("cpu"), **settings)
    for _ in decode(TableTarget(), drafter, state):  # type: ignore[arg-type]
        pass
    return state


def table_drafter(form: type[ChainDrafter]) -> ChainDrafter:
    return form(TableTarget(), table_exit((0, 2, 3, 4)), 2, min_confidence=0.5)  # type: ignore[arg-type]


FORMS = pytest.mark.parametrize("form", [ChainDrafter, RecursiveDrafter, ParallelDrafter])


@FORMS
def test_transitions_through_the_loop(form: type[ChainDrafter]) -> None:
    """decode under `rejection`, reduced vocabulary, top-k and a stop rule: after each token, those
    that follow it in a text of 5,000 are distributed as the target's (chi-square)."""
    sampling = Sampling(temperature=0.9, top_k=4)
    state = through_the_loop(table_drafter(form), 5_000, sampling=sampling, rule="rejection", seed=1)
    assert 0.3 < state.stats.acceptance_rate < 0.9
    assert min(state.stats.accepted_histogram) > 250  # cycles that accepted none, some and all
    pairs = torch.tensor(state.tokens[:-1]) * VOCAB + torch.tensor(state.tokens[1:])
    counts = torch.bincount(pairs, minlength=VOCAB**2).view(VOCAB, VOCAB)
    law = logits_to_probs(P_LOGITS, sampling)
    assert min(chi_square(seen, p) for seen, p in zip(counts, law, strict=True)) > CHI_SQUARE_LEVEL


@FORMS
def test_coupled_through_the_loop_is_the_text_without_drafts(form: type[ChainDrafter]) -> None:
    """Under `coupled` 20 seeds give the text of the same seed without drafts, with penalty, top-k and a stop rule."""
    num_accepted = 0
    for seed in range(20):
        settings = {"seed": seed, "sampling": Sampling(temperature=0.9, top_k=4, repetition_penalty=1.3)}
        state = through_the_loop(table_drafter(form), 30, **settings)
        assert state.tokens == through_the_loop(NoDrafter(), 30, **settings).tokens
        num_accepted += state.stats.num_accepted
    assert num_accepted > 60
