"""The CPU's packed linear maps: the same numbers, whatever the rows beside them, or no copy at all."""

import types

import psutil
import pytest
import torch
from torch.nn.functional import linear

from selfspec.kernels import dispatch, linear_cpu

needs_half = pytest.mark.skipif(not linear_cpu.has_half(), reason="this CPU has bfloat16 instructions, or no FBGEMM")
needs_blocked = pytest.mark.skipif(not linear_cpu.HAS_BLOCKED, reason="torch was built without oneDNN")
LAYOUTS = [
    pytest.param(torch.bfloat16, marks=needs_half, id="bfloat16"),
    pytest.param(torch.float32, marks=needs_blocked, id="float32"),
]


def problem(dtype: torch.dtype, rows: int, inputs: int = 72, outputs: int = 40) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((2, rows, inputs), (outputs, inputs), (outputs,))
    )
    return x.to(dtype), (0.05 * weight).to(dtype), bias.to(dtype)


@pytest.mark.parametrize("dtype", LAYOUTS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 16, 33])
def test_packed_products_are_the_plain_ones(dtype: torch.dtype, with_bias: bool, rows: int) -> None:
    """Root-mean-square error against float64 at most twice that of torch's own product in the same dtype."""
    x, weight, bias = problem(dtype, rows)
    used = bias if with_bias else None
    packed = dispatch.pack(weight)
    assert packed is not None
    truth = linear(x.double(), weight.double(), None if used is None else used.double())
    ours = dispatch.linear(x, weight, used, packed)
    assert (ours.dtype, ours.shape) == (x.dtype, truth.shape)
    error, plain = (float((y.double() - truth).square().mean().sqrt()) for y in (ours, linear(x, weight, used)))
    assert error <= 2 * plain


@pytest.mark.parametrize("dtype", LAYOUTS)
@pytest.mark.parametrize("rows", [3, 4, 7])  # 6, 8 and 14 in all: a whole tile, two rows over, two rows over
def test_rows_may_lie_anywhere_in_memory(dtype: torch.dtype, rows: int) -> None:
    x, weight, _ = problem(dtype, rows)
    packed = dispatch.pack(weight)
    assert packed is not None
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    assert torch.equal(packed(turned, None), packed(x, None))


@needs_half
def test_a_row_in_half_precision_knows_neither_its_index_nor_its_neighbours() -> None:
    """From 3 rows on every row comes to the same bits; one and two rows are summed in another order.

    Sums that differ in the last bit of float32 seldom differ in bfloat16: hence so many outputs, at counts that leave
    FBGEMM one or two rows over and at some that do not.
    """
    x, weight, _ = problem(torch.bfloat16, 64, inputs=576, outputs=8192)
    rows, packed = x.flatten(0, 1), dispatch.pack(weight)
    assert packed is not None
    alone = torch.cat([packed(rows[i : i + 1].expand(3, -1), None)[:1] for i in range(len(rows))])
    for count in (3, 4, 5, 6, 7, 8, 13, 14, 16, 31, 32, 37, 38, 61, 62, 64, 85, 86, 127, 128):
        assert torch.equal(packed(rows[:count], None), alone[:count]), count


@needs_half
@pytest.mark.parametrize(
    ("weight", "is_packed"),
    [
        ([1.0, 2.0**-20], True),
        ([2.0**100, 2.0**90], True),
        ([1.0, 1.9921875 * 2.0**-40], False),  # not in float16, whatever it is multiplied by
        ([1.0, float("inf")], False),
        ([1.0, float("nan")], False),
        ([0.0, 0.0], True),
    ],
)
def test_no_bit_of_a_weight_is_lost(weight: list[float], is_packed: bool) -> None:
    held = torch.tensor([weight], dtype=torch.bfloat16).repeat(8, 8)
    packed = dispatch.pack(held)
    assert (packed is not None) is is_packed
    if packed is not None:
        picked = torch.eye(16, dtype=torch.bfloat16)
        assert torch.equal(packed(picked, None), held.T)


@pytest.mark.parametrize("dtype", LAYOUTS)
def test_no_copy_where_memory_is_short(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight, _ = problem(dtype, 4)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=2 * 10**9, total=16 * 10**9))
    assert dispatch.pack(weight) is None


def test_gradients_go_through_plain_products() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, _ = problem(dtype, 4)
        with torch.enable_grad():
            assert not dispatch.profits_from_packing(x, weight)
