"""Losses: their formulas, and the same in parts."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

from selfspec.exit_module import build_adapter
from selfspec.kernels.exit_loss_reference import LOSSES, SMALLEST, exit_loss
from selfspec.target import Target
from selfspec.training.config import TrainConfig
from selfspec.training.losses import cross_entropy
from selfspec.training.states import collect, make_batch
from selfspec.training.student import Student
from selfspec.training.trainer import ExitTrainer
from tests.test_training import build, settings, written_rows


def formulas(logits: Tensor, p: Tensor) -> dict[str, Tensor]:
    """Every loss [A] as it is written, for autograd to differentiate."""
    log_q = logits.log_softmax(-1)
    q = log_q.exp()
    accepted = torch.minimum(p, q).sum(-1)
    kl, weight = (torch.special.xlogy(p, p) - p * log_q).sum(-1), torch.exp(-3 * accepted.detach())
    return {
        "cross_entropy": -(p * log_q).sum(-1), "kl": kl,
        "reverse_kl": (q * (log_q - p.clamp_min(SMALLEST).log())).sum(-1),
        "tv": 1 - accepted, "lk": weight * kl + (1 - weight) * (1 - accepted),
    }  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_their_formulas(name: str) -> None:
    """In float64, p short of a whole; all but the cross-entropy vanish where q is p; finite where p is certain."""
    assert {name} <= set(get_args(TrainConfig.model_fields["loss"].annotation)) == set(LOSSES)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    p = torch.rand(5, 7, generator=generator, dtype=torch.float64) / 10
    weights = torch.rand(5, generator=generator, dtype=torch.float64)
    expected = formulas(logits, p)[name]
    (wanted,) = torch.autograd.grad((expected * weights).sum(), logits)
    found, gradient = exit_loss(logits.detach(), p, weights, name)
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(gradient, wanted)
    whole = p / p.sum(-1, keepdim=True)
    if name == "cross_entropy":
        torch.testing.assert_close(cross_entropy(logits, p), expected)
    else:
        assert exit_loss(whole.log(), whole, weights, name)[0].abs().max() < 1e-12
    certain = torch.eye(7, dtype=torch.float64)[:5]
    assert all(torch.isfinite(made).all() for made in exit_loss(logits.detach(), certain, weights, name))


@pytest.mark.parametrize("form", ["chain", "recursive", "parallel"])
def test_a_loss_in_parts_is_the_whole_loss(tmp_path: Path, form: str) -> None:
    """Its gradients too, however few guesses' logits are held at once."""
    rows, grads, losses = written_rows(build(), 12), [], []
    for size in (4096, 7):
        target = Target(build())
        config = settings(tmp_path, form=form, correction_rank=4 * (form == "parallel"), loss="lk", loss_positions=size)
        exit_config = config.exit_config(target.num_layers, None)
        torch.manual_seed(3)
        student = Student(target, build_adapter(target, exit_config), exit_config)
        states = collect(target, exit_config, rows)
        trainer = ExitTrainer(student, states, config, tmp_path)
        loss = trainer.compute_loss(trainer.model, {"batch": make_batch(states, target.device, torch.float32)})
        loss.backward()
        losses.append(loss.detach())
        grads.append({n: p.grad for n, p in student.named_parameters() if p.grad is not None})
    torch.testing.assert_close(losses[0], losses[1])
    assert grads[0].keys() == grads[1].keys()
    assert any("bridge" in name for name in grads[0])
    assert any("correction" in name for name in grads[0]) == (form == "parallel")
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-6)
