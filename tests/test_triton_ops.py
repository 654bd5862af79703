"""The kernels as operators: what torch's own check demands, by reference and kernel alike, and one graph of all."""

from typing import Any

import pytest
import torch
from torch import Tensor

from selfspec.kernels import compact_reference, dispatch, ops
from tests.kernel_tools import DEVICE, kernels

kernels("sample")  # skips where there is no triton
CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


def arguments() -> dict[str, tuple[Any, ...]]:
    """Of every operator."""
    draft = torch.tensor([[1, 1, 2]]), torch.tensor([[0, 0, 1]])
    seeds, lengths, positions = torch.tensor([3]), torch.tensor([4]), torch.tensor([[5, 6, 6, 7]])
    probs, q = torch.rand(1, 4, 9).softmax(-1), torch.rand(1, 3, 9).softmax(-1)
    caches, table = list(torch.rand(4, 1, 2, 12, 8)), torch.rand(9, 8)
    held = compact_reference.hold(caches)
    own, path, two = torch.tensor([[1, 2, 0, 0]]), torch.tensor([[2, 3, -1]]), torch.tensor([2])
    return {
        "sample": (torch.rand(1, 4, 9), seeds, positions, 0.7, 0, None, False),
        "verify_coupled": (own, *draft, lengths),
        "verify_rejection": (probs, *draft, q, seeds, positions, lengths),
        "compact": (caches, held.table, held.num_heads, held.num_bytes, held.alignment, path, two, lengths),
        "rope_append": (torch.rand(1, 4, 56), table, table.sin(), positions, *caches[:2], positions, table[0],
                        table[1], 1e-5),
        "rms_norm": (torch.rand(2, 3, 10), torch.rand(10), 1e-5, False),
        "add_rms_norm": (torch.rand(2, 3, 10), torch.rand(2, 3, 10), torch.rand(10), 1e-5, False),
        "exit_loss_": (torch.rand(3, 9), torch.rand(3, 9).softmax(-1), torch.rand(3), "lk"),
    }  # fmt: skip


@pytest.fixture(params=["reference", "triton"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(dispatch, "implementation", lambda *_: request.param)
    return request.param


@pytest.mark.parametrize("name", arguments())
def test_operators_keep_what_they_promise(name: str, implementation: str) -> None:
    """Schema, what is mutated, and shapes without data: `torch.library.opcheck`."""
    with DEVICE:
        torch.library.opcheck(getattr(ops, name), arguments()[name], test_utils=CHECKS)


def test_a_cycle_is_one_graph(implementation: str) -> None:
    """Traced whole, without a look at any value; the graph gives what the calls give."""

    def cycle(logits: Tensor, seeds: Tensor, positions: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, ...]:
        own = ops.sample(logits, seeds, positions, 1.0, 0, None, False)
        return ops.verify_coupled(own, tokens, parents, positions[:, 0])

    with DEVICE:
        logits, seeds = torch.randn(2, 4, 9), torch.tensor([1, 2])
        positions = torch.tensor([[5, 6, 6, 7], [0, 1, 1, 2]])
        tokens, parents = torch.randint(0, 9, (2, 3)), torch.tensor([[0, 0, 1]] * 2)
        given = (logits, seeds, positions, tokens, parents)
        traced = torch.compile(cycle, backend="eager", fullgraph=True)(*given)
        assert all(torch.equal(a, b) for a, b in zip(traced, cycle(*given), strict=True))
