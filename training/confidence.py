"""The confidence of an exit: a calibrated chance that its next draft will be accepted."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from selfspec.exit_module import active, unwrap
from selfspec.passes import batches_of
from selfspec.training.config import TrainConfig
from selfspec.training.data import num_rows_for
from selfspec.training.fresh_states import num_answer_tokens
from selfspec.training.losses import overlap
from selfspec.training.states import RowStates, make_batch
from selfspec.training.student import Student

CONFIDENCE_TOKENS = 20_000  # training tokens that the confidence is fitted on


def fit_confidence(
    student: Student, states: Sequence[RowStates], held_out: Sequence[RowStates], config: TrainConfig
) -> float:
    """Logistic regression from normed states to the chance of acceptance; returns its held-out cross-entropy.

    The direction comes from training rows, scale and bias from held-out ones, on which the exit is less sure of itself.
    """
    count = num_rows_for(num_answer_tokens(states), CONFIDENCE_TOKENS)
    x, y = _confidence_data(student, states[:count], config)
    held_x, held_y = _confidence_data(student, held_out, config)
    scale = x.std(0).clamp(min=1e-6)
    direction = nn.Linear(x.shape[1], 1, device=x.device)
    fit_logistic(direction, x / scale, y)
    calibration = nn.Linear(1, 1, device=x.device)
    with torch.no_grad():
        score = direction(held_x / scale)
    nn.init.ones_(calibration.weight)
    loss = fit_logistic(calibration, score, held_y)
    confidence = active(unwrap(student.adapter).confidence)
    with torch.no_grad():
        confidence.weight.copy_(calibration.weight * direction.weight / scale)
        confidence.bias.copy_(calibration.weight[0] * direction.bias + calibration.bias)
    return loss


@torch.no_grad()
def _confidence_data(student: Student, states: Sequence[RowStates], config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Normed states [A, D] and chances of acceptance [A]: right or wrong in greedy rows, sum min(p, q) in others."""
    features, targets = [], []
    generator = torch.Generator().manual_seed(config.seed)
    for group in batches_of([row.num_tokens for row in states], config.batch_tokens):
        rows = [states[i] for i in group]
        batch = make_batch(rows, student.target.device, torch.float32)
        guesses = student(batch, student.draw_steps(batch, generator))
        logits, places = student.logits(guesses, batch), guesses.places
        is_sampled = torch.cat([torch.full((len(r.argmaxes),), r.temperature > 0) for r in rows]).to(logits.device)
        shared = overlap(logits, student.teacher.probs(batch)[places]).clamp(0, 1)
        is_right = student.guess(logits) == batch.argmaxes[places]
        features.append(guesses.normed)
        targets.append(torch.where(is_sampled[places], shared, is_right.float()))
    return torch.cat(features), torch.cat(targets)


def fit_logistic(linear: nn.Linear, x: Tensor, y: Tensor, num_steps: int = 300) -> float:
    """Fit chances y [A] from x [A, D]; returns the cross-entropy reached."""
    optimizer = torch.optim.AdamW(linear.parameters(), lr=1e-2, weight_decay=1e-2)
    nn.init.zeros_(linear.bias)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(linear(x)[:, 0], y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())
