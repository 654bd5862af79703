"""Second module objects over the same parameters, so that a base model is never edited.

A clone differs from its original in what it says about itself (attention function, class of its linear layers, hooks,
children) and shares every weight.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.kernels import dispatch


def shallow_clone(module: nn.Module, **attributes: Any) -> nn.Module:
    """A second module object over the same parameters, children and hooks; its child table is its own."""
    clone = copy.copy(module)
    clone.__dict__["_modules"] = dict(module._modules)
    clone.__dict__.update(attributes)
    return clone


def detached_clone(module: nn.Module) -> nn.Module:
    """A whole tree of `shallow_clone`s over the same storage, with hook tables and parameter objects of its own.

    So what PEFT does to a clone (gradient flags, wrappers) does not show on the original.
    """
    clone = shallow_clone(module)
    for name in [n for n in clone.__dict__ if n.endswith("_hooks") or n.endswith("_hooks_with_kwargs")]:
        if clone.__dict__[name] is not None:
            clone.__dict__[name] = type(clone.__dict__[name])()
    clone.__dict__["_parameters"] = {n: _same_storage(p) for n, p in module._parameters.items()}
    clone.__dict__["_buffers"] = dict(module._buffers)
    for name, child in module._modules.items():
        if child is not None:
            clone._modules[name] = detached_clone(child)
    return clone


class DispatchedLinear(nn.Linear):
    """A linear layer that goes through `kernels.dispatch`; made only by `with_dispatched_linears`."""

    _packed: Any = None  # what `dispatch.pack` made of the weight
    _packed_of: tuple[int, int] | None = None  # which memory, and which version of it, was packed
    _sampled: Tensor | None = None  # one row and one column of what was packed

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self._parameters["weight"], self._parameters["bias"]  # past Module.__getattr__: a pass has 211
        assert weight is not None
        if not dispatch.profits_from_packing(input, weight):
            return dispatch.linear(input, weight, bias)
        source = (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        if self._packed_of != source:
            self._packed, self._packed_of = dispatch.pack(weight), source
            self.__dict__["_sampled"] = self._sample()
        return dispatch.linear(input, weight, bias, self._packed)

    def forget_if_changed(self) -> None:
        """Drop the packed copy if the weight was edited through ``.data``, as merging an adapter does, unseen."""
        if self._sampled is not None and not torch.equal(self._sampled, self._sample()):
            self._packed = self._packed_of = None
            self.__dict__["_sampled"] = None

    def _sample(self) -> Tensor:
        weight = self.weight.detach()
        return torch.cat([weight[0], weight[:, 0]])


def with_dispatched_linears(module: nn.Module) -> nn.Module:
    """A `shallow_clone` of ``module``, and of what lies in it, whose plain linear layers go through the kernels."""
    clone = shallow_clone(module)
    if type(module) is nn.Linear:
        clone.__class__ = DispatchedLinear
    for name, child in module._modules.items():
        if child is not None:
            clone._modules[name] = with_dispatched_linears(child)
    return clone


def _same_storage(parameter: nn.Parameter | None) -> nn.Parameter | None:
    if type(parameter) is not nn.Parameter:  # quantised ones carry more than their data
        return parameter
    return nn.Parameter(parameter.detach(), requires_grad=False)


def bare_clone(module: Any, config: Any) -> nn.Module:
    """A `shallow_clone` with a configuration of its own and without the original's hooks."""
    clone = shallow_clone(module, config=config)
    for name in [n for n in clone.__dict__ if n.endswith("_hooks")]:
        clone.__dict__[name] = type(clone.__dict__[name])() if clone.__dict__[name] is not None else None
    return clone
