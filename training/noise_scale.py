"""How much of the target's noise an exit should guess with, where the target's tokens are drawn."""

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.passes import batches_of
from selfspec.sampling import guess_scores
from selfspec.training.config import TrainConfig
from selfspec.training.data import num_rows_for
from selfspec.training.fresh_states import num_answer_tokens
from selfspec.training.states import RowStates, make_batch
from selfspec.training.student import Student

NUM_TOKENS = 10_000  # held-out tokens that the scale is fitted on
SCALES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@torch.no_grad()
def fit_noise_scale(student: Student, states: Sequence[RowStates], config: TrainConfig) -> float:
    """The scale with which guesses of all draft steps are most often the target's draws at temperature 1."""
    generator = torch.Generator().manual_seed(config.seed)
    hits = dict.fromkeys(SCALES, 0)
    states = states[: num_rows_for(num_answer_tokens(states), NUM_TOKENS)]
    for group in batches_of([row.num_tokens for row in states], config.batch_tokens):
        batch = make_batch([states[i] for i in group], student.target.device, torch.float32)
        probs = student.teacher.probs(batch)
        for guesses in student.each_step(batch, config.num_steps):
            for scale, count in agreements(probs, student.logits(guesses, batch), generator).items():
                hits[scale] += count
    return max(SCALES, key=lambda scale: hits[scale])


def agreements(probs: Tensor, logits: Tensor, generator: torch.Generator) -> dict[float, int]:
    """By scale, how many of A guesses by an exit's ``logits`` [A, V_d] are what the target draws from ``probs``.

    These are [A, V_d], less than 1 in sum where tokens are not drafted.
    """
    rest = (1 - probs.sum(-1, keepdim=True)).clamp(min=0)  # no guess is right there
    noise = torch.rand(len(probs), probs.shape[1] + 1, generator=generator).clamp(1e-7, 1 - 1e-7).to(probs.device)
    drawn = guess_scores(torch.cat([probs, rest], dim=-1), noise, 1.0, 1.0).argmax(-1)
    q = logits.softmax(-1)
    return {c: int((guess_scores(q, noise[:, :-1], 1.0, c).argmax(-1) == drawn).sum()) for c in SCALES}
