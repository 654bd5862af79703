"""Linear layers that read one input are multiplied together, and nobody can tell."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from selfspec.clones import detached_clone
from selfspec.exits import ExitConfig, ExitHead, build_adapter
from selfspec.kernels import dispatch
from selfspec.linears import DispatchedLinear, forget_changed, with_dispatched_linears
from selfspec.target import Target
from tests.conftest import build_model


class Attention(nn.Module):
    def __init__(self, bias: bool = False, v_bias: bool | None = None) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 48, bias=bias)
        self.k_proj = nn.Linear(32, 16, bias=bias)
        self.v_proj = nn.Linear(32, 16, bias=bias if v_bias is None else v_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Widths of the packed products made; every product of these tests is packed, on any machine."""
    made: list[int] = []

    def pack(weight: torch.Tensor) -> object:
        kept = weight.clone()

        def product(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            made.append(len(kept))
            return nn.functional.linear(x, kept, bias)

        return product

    monkeypatch.setattr(dispatch, "pack", pack)
    monkeypatch.setattr(dispatch, "profits_from_packing", lambda *_: True)
    torch.manual_seed(0)
    with torch.no_grad():
        yield made


X = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_serves_three_layers(products: list[int], bias: bool) -> None:
    base = Attention(bias)
    clone = with_dispatched_linears(base)
    for x in (X, 2 * X):
        torch.testing.assert_close(clone(x), base(x))
    assert products == [80, 80]
    assert type(base.q_proj) is nn.Linear


def test_layers_that_differ_in_kind_are_multiplied_apart(products: list[int]) -> None:
    base = Attention(bias=True, v_bias=False)
    torch.testing.assert_close(with_dispatched_linears(base)(X), base(X))
    assert products == [48, 16, 16]


def test_any_order_of_calls_gives_each_layer_its_own(products: list[int]) -> None:
    """Asked twice, left out, asked about another input in between."""
    base, other = Attention(), X + 1
    clone = with_dispatched_linears(base)
    for name, x in [("k", X), ("k", X), ("q", X), ("q", other), ("v", X), ("v", other), ("k", other), ("q", X)]:
        torch.testing.assert_close(getattr(clone, f"{name}_proj")(x), getattr(base, f"{name}_proj")(x))


def test_a_pre_hook_that_changes_one_input_is_heeded(products: list[int]) -> None:
    base = Attention()
    base.k_proj.register_forward_pre_hook(lambda _, args: (3 * args[0],))
    torch.testing.assert_close(with_dispatched_linears(base)(X), base(X))


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("is_seen_by_versions", [True, False])
def test_an_edit_of_one_weight_is_noticed(products: list[int], name: str, is_seen_by_versions: bool) -> None:
    base = Attention()
    clone = with_dispatched_linears(base)
    clone(X)
    weight = getattr(base, name).weight
    if is_seen_by_versions:
        weight.mul_(2)
    else:
        weight.data *= 2
        forget_changed(clone)
    torch.testing.assert_close(clone(X), base(X))


def test_a_copy_with_weights_of_its_own_does_not_use_the_originals(products: list[int]) -> None:
    clone = with_dispatched_linears(Attention())
    copied = detached_clone(clone)
    copied.k_proj.weight = nn.Parameter(copied.k_proj.weight + 1)
    assert isinstance(copied.k_proj, DispatchedLinear)
    for again in (copied, with_dispatched_linears(copied)):
        torch.testing.assert_close(again.k_proj(X), nn.functional.linear(X, copied.k_proj.weight))


def test_without_a_copy_the_plain_product_is_used(products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "pack", lambda _: None)
    base = Attention(bias=True)
    assert torch.equal(with_dispatched_linears(base)(X), base(X))
    assert products == []


def test_all_linear_layers_of_a_trained_exit_go_through_the_kernels() -> None:
    target = Target(build_model("llama"))
    config = ExitConfig(exit_layer=2, recall_layers=(2, 4), draft_vocab=tuple(range(3, 80)), lora_rank=2)
    head = ExitHead(target, "new", config, build_adapter(target, config))
    modules = [m for part in (head.block, head.bridge, head.head.output) for m in part.modules()]
    linears = [m for m in modules if isinstance(m, nn.Linear)]
    assert len(linears) == 7 + config.num_steps + 1
    assert all(type(m) is DispatchedLinear and m.packed.linears[m.index] is m for m in linears)
