"""Which layer to draft from, and is it worth it: agreement, cost and predicted speed of untrained exits, by layer.

Two exits that need no training are judged: the *lens* (the target's norm and output layer on the state after layer N,
nostalgebraist's logit lens) and the *bridge* (ridge regression from that state to the input of the last layer, then the
last layer itself, norm and output layer). Some of the texts fit the bridge, the others judge both.

Shapes: B texts of a batch, S positions, D hidden, V vocabulary, V_d drafted vocabulary, A judged positions.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from selfspec.bridge import RidgeAccumulator
from selfspec.eval.probe_text import Report, Sample
from selfspec.exits import slice_output
from selfspec.head import Head
from selfspec.passes import passes
from selfspec.target import Target

EXITS = ("lens", "bridge")
CHUNK = 128  # positions whose logits are held at once
BATCH_TOKENS = 1024
MAX_LAYERS = 12  # judged when none are named
DRAFT_LENS = (1, 2, 3, 4, 5)
RIDGE = 1e-2  # a few thousand tokens are little for D inputs


@dataclass(frozen=True)
class Score:
    """How well an exit guesses, on texts that it was not fitted on."""

    agreement: float  # share of positions where its likeliest token is the target's: greedy acceptance of one draft
    overlap: float  # mean of sum_v min(p_v, q_v) at T=1: acceptance of one draft under `rejection`


@dataclass(frozen=True)
class Prediction:
    """The best chain length and its speed over plain decoding."""

    draft_len: int
    speedup: float


@dataclass(frozen=True)
class Candidate:
    """One exit at one layer."""

    layer: int
    exit: str
    score: Score
    cost: float  # of a draft step, in plain decoding steps
    best: Prediction


def default_layers(num_layers: int) -> list[int]:
    """All exit layers of a shallow model; of a deep one up to twelve, dense where drafting is cheap."""
    if num_layers - 1 <= MAX_LAYERS:
        return list(range(1, num_layers))
    steps = torch.linspace(0, 1, MAX_LAYERS).tolist()
    return sorted({round((num_layers - 1) ** step) for step in steps})


def draft_vocab(samples: Sequence[Sample], size: int | None, num_ids: int, vocab_size: int) -> tuple[int, ...] | None:
    """The ``size`` ids (all if None) that exits may draft: the most frequent of ``samples``, then the lowest.

    Ids from the tokenizer's ``num_ids`` on only pad the vocabulary. None where all ``vocab_size`` ids are drafted.
    """
    num_ids = min(num_ids, vocab_size)
    if size is None or size >= num_ids:
        return None if num_ids == vocab_size else tuple(range(num_ids))
    counts = Counter(i for sample in samples for i in sample.ids.tolist())
    ranked = sorted(range(num_ids), key=lambda i: (-counts[i], i))  # low ids are common pieces
    return tuple(sorted(ranked[:size]))


def predict(agreement: float, cost: float, row_costs: Sequence[float]) -> Prediction:
    """The chain length k with the largest speed over plain decoding, tau / (k c + v_(k+1) / v_1).

    tau = 1 + a + ... + a^k: every draft is taken to be accepted with the same chance a, independently of the others.
    ``row_costs`` are those of passes over 1, 2, ... rows; ``cost`` c is in units of the first.
    """

    def speedup(k: int) -> float:
        tau = sum(agreement**i for i in range(k + 1))
        return tau / (k * cost + row_costs[k] / row_costs[0])

    best = max((k for k in DRAFT_LENS if k < len(row_costs)), key=speedup)
    return Prediction(best, speedup(best))


def _passes(
    target: Target, samples: Sequence[Sample], depths: Sequence[int], stage: str, report: Report
) -> Iterator[tuple[Tensor, dict[int, Tensor]]]:
    """Mask [B, S] of the positions whose next token is judged, and states [B, S, D] by depth, batch by batch."""
    done = 0
    for found in passes(target, [sample.ids for sample in samples], depths, BATCH_TOKENS):
        report(stage, done, len(samples))
        mask = torch.zeros(found.states[depths[0]].shape[:2], dtype=torch.bool)
        for row, sample in enumerate(samples[i] for i in found.indices):
            # never position 0, an outlier in every model (attention sink)
            mask[row, max(sample.start - 1, 1) : len(sample.ids) - 1] = True
        yield mask.to(target.device), found.states
        done += len(found.indices)
    report(stage, done, len(samples))


@torch.no_grad()
def fit_bridges(
    target: Target, samples: Sequence[Sample], layers: Sequence[int], report: Report
) -> dict[int, tuple[Tensor, Tensor]]:
    """Weight [D, D] and bias [D], by layer, of the ridge regression onto the input of the target's last layer."""
    size, aim = target.hidden_size, target.num_layers - 1
    sums = {layer: RidgeAccumulator(size, size) for layer in layers}
    for mask, states in _passes(target, samples, [*layers, aim], "fitting bridges", report):
        for layer, accumulator in sums.items():
            accumulator.add(states[layer][mask], states[aim][mask])
    return {layer: accumulator.solve(RIDGE) for layer, accumulator in sums.items()}


@torch.no_grad()
def score_exits(
    target: Target,
    samples: Sequence[Sample],
    bridges: dict[int, tuple[Tensor, Tensor]],
    vocab: Sequence[int] | None,
    report: Report,
) -> dict[tuple[str, int], Score]:
    """Scores by exit and layer, of the lens and of the given bridge at each of the layers of ``bridges``.

    Memory holds the logits of `CHUNK` positions of two exits at a time, whatever the number of layers and tokens.
    """
    ids = torch.arange(target.vocab_size) if vocab is None else torch.tensor(vocab)
    ids = ids.to(target.device)
    head = Head(target, None, slice_output(target.output, None if vocab is None else ids))
    sums = {(name, layer): torch.zeros(2, dtype=torch.float64) for layer in bridges for name in EXITS}
    num_judged = 0
    for mask, states in _passes(target, samples, [*bridges, target.num_layers], "judging exits", report):
        exits = dict(_exit_states(target, states, bridges))
        finals = states[target.num_layers][mask]  # [A, D]
        num_judged += len(finals)
        for chunk in torch.arange(len(finals)).split(CHUNK):
            logits = target.logits(finals[None, chunk])[0]  # [A, V]
            wanted, p = logits.argmax(-1), logits.softmax(-1)[:, ids]
            for key, hidden in exits.items():
                guess = head(hidden[mask][None, chunk])[0].float()  # [A, V_d]
                overlaps = torch.minimum(p, guess.softmax(-1)).sum(-1)
                sums[key] += torch.stack([(ids[guess.argmax(-1)] == wanted).sum(), overlaps.sum()]).double().cpu()
    return {key: Score(*(total / num_judged).tolist()) for key, total in sums.items()}


def _exit_states(
    target: Target, states: dict[int, Tensor], bridges: dict[int, tuple[Tensor, Tensor]]
) -> Iterator[tuple[tuple[str, int], Tensor]]:
    """What the final norm and the output layer of each exit get, [B, S, D]."""
    last = range(target.num_layers - 1, target.num_layers)
    for layer, (weight, bias) in bridges.items():
        yield ("lens", layer), states[layer]
        bridged = nn.functional.linear(states[layer], weight.to(states[layer]), bias.to(states[layer]))
        yield ("bridge", layer), target.run_uncached([target.layers[-1]], bridged, last)
