"""Linear layers of clones go through the kernels, and the originals never know."""

import pytest
import torch
from torch import nn

from selfspec.clones import detached_clone
from selfspec.exit_module import ExitConfig, build_adapter
from selfspec.exits import ExitHead
from selfspec.linears import DispatchedLinear, with_dispatched_linears
from selfspec.target import Target
from tests.conftest import build_model

X = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("is_seen_by_versions", [True, False])
def test_an_edit_of_a_weight_is_heeded_at_once(is_seen_by_versions: bool) -> None:
    base = nn.Sequential(nn.Linear(32, 48))
    clone = with_dispatched_linears(base)
    clone(X)
    if is_seen_by_versions:
        base[0].weight.mul_(2)
    else:
        base[0].weight.data *= 2
    torch.testing.assert_close(clone(X), base(X))
    assert (type(base[0]), type(clone[0])) == (nn.Linear, DispatchedLinear)


@torch.no_grad()
def test_a_copy_with_weights_of_its_own_does_not_use_the_originals() -> None:
    copied = detached_clone(with_dispatched_linears(nn.Sequential(nn.Linear(32, 48))))
    copied[0].weight = nn.Parameter(copied[0].weight + 1)
    for again in (copied, with_dispatched_linears(copied)):
        assert isinstance(again[0], DispatchedLinear)
        torch.testing.assert_close(again[0](X), nn.functional.linear(X, copied[0].weight, copied[0].bias))


def test_all_linear_layers_of_a_trained_exit_go_through_the_kernels() -> None:
    target = Target(build_model("llama"))
    config = ExitConfig(exit_layer=2, recall_layers=(2, 4), draft_vocab=tuple(range(3, 80)), lora_rank=2)
    head = ExitHead(target, "new", config, build_adapter(target, config))
    modules = [m for part in (*head.blocks, head.bridge, head.head.output) for m in part.modules()]
    linears = [m for m in modules if isinstance(m, nn.Linear)]
    assert len(linears) == 7 + config.num_steps + 1
    assert all(type(m) is DispatchedLinear for m in linears)
