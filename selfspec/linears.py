"""Linear layers of clones, multiplied by the kernels."""

from typing import Any

from torch import Tensor, nn

from selfspec.clones import shallow_clone
from selfspec.kernels import dispatch


class DispatchedLinear(nn.Linear):
    """A linear layer that goes through `kernels.dispatch`; made only by `with_dispatched_linears`."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self._parameters["weight"]  # past Module.__getattr__: called often
        assert weight is not None
        return dispatch.linear(input, weight, self._parameters["bias"])


def with_dispatched_linears(module: nn.Module) -> nn.Module:
    """A `shallow_clone` of ``module``, and of what lies in it, whose plain linear layers go through the kernels."""
    clone: Any = shallow_clone(module)
    if type(module) is nn.Linear:
        clone.__class__ = DispatchedLinear
    for name, child in module._modules.items():
        if child is not None:
            clone._modules[name] = with_dispatched_linears(child)
    return clone
