"""What an exit is worth on held-out rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from selfspec.exit_module import active, unwrap
from selfspec.passes import batches_of
from selfspec.training.config import TrainConfig
from selfspec.training.losses import cross_entropy, overlap
from selfspec.training.metrics import WIDEST, Metrics, RowScores, walk_cycles
from selfspec.training.states import RowStates, make_batch
from selfspec.training.student import Student


@dataclass(frozen=True)
class Scores:
    """What `score_rows` found on held-out rows; lists are indexed by draft step - 1."""

    loss: float
    agreement: list[float]
    accepted_mass: list[float]
    greedy_rows: list[RowScores]  # all rows where none is greedy

    def metrics(self) -> Metrics:
        """With a_j and tau, by walking the greedy rows in cycles."""
        depth = len(self.agreement)
        walks = [[walk_cycles(row, k) for row in self.greedy_rows] for k in range(1, depth + 1)]
        tried = [sum(w.tried[j] for w in walks[-1]) for j in range(depth)]
        accepted = [sum(w.accepted[j] for w in walks[-1]) for j in range(depth)]
        return Metrics(
            loss=round(self.loss, 4),
            agreement=self.agreement,
            accepted_mass=self.accepted_mass,
            acceptance=[a / max(t, 1) for a, t in zip(accepted, tried, strict=True)],
            tau=[sum(w.num_tokens for w in ws) / max(sum(w.num_cycles for w in ws), 1) for ws in walks],
        )


@torch.no_grad()
def score_rows(
    student: Student, states: Sequence[RowStates], config: TrainConfig, num_steps: int | None = None
) -> Scores:
    """Every draft step j at every answer position; ``num_steps`` of them (None: those that were trained)."""
    num_steps = config.num_steps if num_steps is None else num_steps
    loss, count = 0.0, 0
    hits, mass = [0] * num_steps, [0.0] * num_steps
    greedy, sampled = list[RowScores](), list[RowScores]()
    confidence = active(unwrap(student.adapter).confidence)
    for group in batches_of([row.num_tokens for row in states], config.batch_tokens):
        rows = [states[i] for i in group]
        batch = make_batch(rows, student.target.device, torch.float32)
        probs = student.teacher.probs(batch)
        right, chances, shares, ranks = [], [], [], []
        for j, guesses in enumerate(student.each_step(batch, num_steps), start=1):
            logits = student.logits(guesses, batch)
            right.append(student.guess(logits) == batch.argmaxes)
            chances.append(confidence(guesses.normed)[:, 0].sigmoid())
            first = logits.topk(min(WIDEST, logits.shape[-1]))  # [G, W]
            shares.append((first.values - logits.logsumexp(-1, keepdim=True)).exp())
            is_behind = student.ids_at(first.indices) != batch.argmaxes[:, None]
            ranks.append(is_behind.cumprod(-1).sum(-1))
            hits[j - 1] += int(right[-1].sum())
            mass[j - 1] += float(overlap(logits, probs).sum())
            if j == 1:
                loss += float(cross_entropy(logits, probs).sum())
                count += len(logits)
        begin = 0
        for row in rows:
            part = slice(begin, begin := begin + len(row.argmaxes))
            found = RowScores(*([step[part].tolist() for step in kind] for kind in (right, chances, shares, ranks)))
            (sampled if row.temperature > 0 else greedy).append(found)
    agreement, accepted_mass = [h / max(count, 1) for h in hits], [m / max(count, 1) for m in mass]
    return Scores(loss / max(count, 1), agreement, accepted_mass, greedy or sampled)


def drafted_text(
    student: Student, row: RowStates, config: TrainConfig, decode: Callable[[list[int]], str], max_tokens: int = 120
) -> str:
    """The target's answer to one held-out row in Markdown, what would be accepted of drafts of all steps in bold."""
    scores = score_rows(student, [row], config).greedy_rows[0]
    marks = walk_cycles(scores, config.num_steps).is_drafted[:max_tokens]
    text = ""
    for is_drafted, part in groupby(zip(marks, row.argmaxes.tolist(), strict=False), key=lambda pair: pair[0]):
        piece = decode([token for _, token in part])
        text += f"**{piece}**" if is_drafted and piece.strip() else piece
    return text


def evaluate(student: Student, states: Sequence[RowStates], config: TrainConfig) -> Metrics:
    """`score_rows`, summed up."""
    return score_rows(student, states, config).metrics()
