"""The fused losses: the formulas of training, their gradients, and the head's, with few rows of logits at a time."""

import pytest
import torch
from torch import Tensor

from selfspec.kernels import exit_loss_reference
from selfspec.kernels.exit_loss_reference import LOSSES
from selfspec.kernels.head_loss import head_loss
from tests.kernel_tools import DEVICE, assert_as_near, kernels
from tests.test_losses import formulas

exit_loss_triton = kernels("exit_loss")
Made = tuple[Tensor, Tensor]


def by_autograd(logits: Tensor, probs: Tensor, weights: Tensor, name: str) -> Made:
    """Losses and gradient of the formulas as they are written."""
    leaf = logits.detach().requires_grad_()
    losses = formulas(leaf, probs)[name]
    (gradient,) = torch.autograd.grad((losses * weights).sum(), leaf)
    return losses.detach(), gradient


def problem(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, probabilities that are short of a whole, some of them zero, and weights."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(rows, vocab, generator=generator)
    probs = 0.9 * (logits + 2 * torch.randn(rows, vocab, generator=generator)).softmax(-1)
    probs[0, ::3] = 0.0
    return logits.to(DEVICE, dtype), probs.to(DEVICE), torch.rand(rows, generator=generator).to(DEVICE)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (30, 7), (40, 97), (2, 2048), (12, 5003)])
def test_losses_and_gradients_are_those_of_the_formulas(name: str, rows: int, vocab: int) -> None:
    """The definition equals autograd in float64; the kernel is as near to it as float32 autograd is.

    Many rows, since the largest error of a few says little.
    """
    logits, probs, weights = problem(rows, vocab)
    truth = by_autograd(logits.double(), probs.double(), weights.double(), name)
    defined = exit_loss_reference.exit_loss(logits.double(), probs.double(), weights.double(), name)
    for ours, theirs in zip(defined, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    plain = by_autograd(logits, probs, weights, name)
    held = torch.full((rows, vocab + 3), torch.nan, device=DEVICE)  # rows apart: what lies between them is not theirs
    held[:, :vocab] = logits
    losses, gradient = exit_loss_triton.exit_loss(held[:, :vocab], probs, weights, name)
    assert gradient.data_ptr() == held.data_ptr()
    assert bool(held[:, vocab:].isnan().all())
    assert_as_near(losses, plain[0], truth[0])
    assert_as_near(gradient, plain[1], truth[1])


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_rounded_once(name: str) -> None:
    """Logits and gradient in float16: within one rounding of the gradient that float32 has of the same logits."""
    logits, probs, weights = problem(3, 300, torch.float16)
    losses, gradient = exit_loss_triton.exit_loss(logits.clone(), probs, weights, name)
    wide = exit_loss_triton.exit_loss(logits.float(), probs, weights, name)
    assert gradient.dtype == torch.float16
    assert torch.equal(losses, wide[0])
    assert torch.equal(gradient, wide[1].half())


def test_unknown_losses_and_other_shapes_are_refused() -> None:
    logits, probs, weights = problem(3, 5)
    for module in (exit_loss_triton, exit_loss_reference):
        with pytest.raises(ValueError, match="unknown loss 'mse'; choose one of cross_entropy, kl, reverse_kl, tv, lk"):
            module.exit_loss(logits, probs, weights, "mse")
        with pytest.raises(ValueError, match=r"probs must be \[3, 5\], got \[3, 4\]"):
            module.exit_loss(logits, probs[:, :4], weights, "kl")
    with pytest.raises(ValueError, match="a row of logits must lie in one piece"):
        exit_loss_triton.exit_loss(logits.T.contiguous().T, probs, weights, "kl")


@pytest.mark.parametrize("num_held", [1, 4, 100])
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_head_is_that_of_its_logits(name: str, num_held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradients by states and head are autograd's, in float64 exactly; logits of few rows exist at a time."""
    _, probs, weights = problem(11, 37)
    normed, head = torch.randn(11, 6, device=DEVICE), torch.randn(37, 6, device=DEVICE)
    sizes: list[int] = []

    def run(dtype: torch.dtype, is_ours: bool) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (normed, head)]
        p, w = probs.to(dtype), weights.to(dtype)

        def logits(states: Tensor, rows: slice) -> Tensor:
            sizes.append(len(range(11)[rows]))
            return states @ leaves[1].T

        if is_ours:
            loss = head_loss(leaves[0], logits, lambda rows: p[rows], w, name, num_held, leaves[1:])
        else:
            loss = (formulas(leaves[0] @ leaves[1].T, p)[name] * w).sum()
        return [loss.detach(), *torch.autograd.grad(3 * loss, leaves)]

    truth = run(torch.float64, False)
    monkeypatch.setenv("SELFSPEC_KERNELS", "reference")
    for ours, theirs in zip(run(torch.float64, True), truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    monkeypatch.setenv("SELFSPEC_KERNELS", "triton")
    sizes.clear()
    fused = run(torch.float32, True)
    assert max(sizes) == min(num_held, 11)
    assert sum(sizes) == 11
    for ours, theirs in zip(fused, truth, strict=True):
        torch.testing.assert_close(ours, theirs.float())


def test_what_a_head_keeps_does_not_grow_with_its_vocabulary() -> None:
    """Nothing of [A, V] is held between forward and backward; a frozen head gets no gradient."""
    _, probs, weights = problem(8, 1000)
    normed, head = torch.randn(8, 4, device=DEVICE, requires_grad=True), torch.randn(1000, 4, device=DEVICE)
    with pytest.raises(ValueError, match="num_held must be positive, got 0"):
        head_loss(normed, lambda states, _: states @ head.T, lambda rows: probs[rows], weights, "lk", 0)
    loss = head_loss(normed, lambda states, _: states @ head.T, lambda rows: probs[rows], weights, "lk", 2)
    assert [kept.shape for kept in loss.grad_fn.saved_tensors] == [normed.shape]
    loss.backward()
    assert normed.grad is not None
