"""Linear layers of clones, multiplied by the kernels; those that read one input are multiplied together.

A decoding pass is hundreds of small products, so what surrounds them counts: three projections of one state cost less
as one product over their stacked weights. A family need not know: its module asks for q, k and v one after another, the
first call multiplies for all three, the others find theirs ready.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.clones import shallow_clone
from selfspec.kernels import dispatch

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Packed:
    """A packed copy of the weights of one linear layer, or of several that are called one after another on one input.

    It is made at the first product and made again when a weight was edited.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = linears
        self._product: Any = None
        self._made_of: tuple[Any, ...] | None = None  # which memory, and which version of it, was packed
        self._sample: Tensor | None = None
        self._input: Tensor | None = None
        self._ready: dict[int, Tensor] = {}

    def is_ready(self) -> bool:
        """Whether there is a copy of the weights as they are now, made here if need be."""
        weights = [linear._parameters["weight"] for linear in self.linears]  # past Module.__getattr__: called often
        source = tuple((w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights if w is not None)
        if self._made_of != source:
            self._product, self._made_of = dispatch.pack(_stacked(weights)), source
            self._sample = self._take_sample()
        return self._product is not None

    def take(self, index: int, x: Tensor) -> Tensor:
        """The product of ``x`` [..., R, I] with the linear layer of this ``index``, [..., R, O]."""
        if len(self.linears) == 1:
            return self._multiply(x)
        if x is not self._input or index not in self._ready:
            sizes = [linear.out_features for linear in self.linears]
            self._input, self._ready = x, dict(enumerate(self._multiply(x).split(sizes, dim=-1)))
        part = self._ready.pop(index)
        if not self._ready:
            self._input = None
        return part

    def forget_if_changed(self) -> None:
        """Drop the copy if a weight was edited through ``.data``, as merging an adapter does, unseen by versions."""
        if self._sample is not None and not torch.equal(self._sample, self._take_sample()):
            self._product = self._made_of = self._sample = None

    def _multiply(self, x: Tensor) -> Tensor:
        first = self.linears[0]._parameters
        bias = None if first["bias"] is None else _stacked([linear.bias for linear in self.linears])
        assert first["weight"] is not None
        return dispatch.linear(x, first["weight"], bias, self._product)

    def _take_sample(self) -> Tensor:
        weights = [linear.weight.detach() for linear in self.linears]
        return torch.cat([part for w in weights for part in (w[0], w[:, 0])])  # one row and one column of each


class DispatchedLinear(nn.Linear):
    """A linear layer that goes through `kernels.dispatch`; made only by `with_dispatched_linears`."""

    packed: Packed
    index: int  # its place in ``packed``

    def forward(self, input: Tensor) -> Tensor:
        weight, packed = self._parameters["weight"], self.packed
        assert weight is not None
        is_own = packed.linears[self.index] is self  # not so in a copy, which may have weights of its own
        if is_own and dispatch.profits_from_packing(input, weight) and packed.is_ready():
            return packed.take(self.index, input)
        return dispatch.linear(input, weight, self._parameters["bias"])


def with_dispatched_linears(module: nn.Module) -> nn.Module:
    """A `shallow_clone` of ``module``, and of what lies in it, whose plain linear layers go through the kernels."""
    clone: Any = shallow_clone(module)
    if type(module) in (nn.Linear, DispatchedLinear):
        clone.__class__ = DispatchedLinear
        clone.__dict__.update(packed=Packed([clone]), index=0)
    for name, child in module._modules.items():
        if child is not None:
            clone._modules[name] = with_dispatched_linears(child)
    for names in SIBLINGS:
        found = [clone._modules.get(name) for name in names]
        if all(type(linear) is DispatchedLinear for linear in found) and _are_alike(found):
            packed = Packed(found)
            for index, linear in enumerate(found):
                linear.__dict__.update(packed=packed, index=index)
    return clone


def forget_changed(module: nn.Module) -> None:
    """`Packed.forget_if_changed` for all linear layers in ``module``."""
    for packed in {linear.packed for linear in module.modules() if isinstance(linear, DispatchedLinear)}:
        packed.forget_if_changed()


def _are_alike(linears: Sequence[nn.Linear]) -> bool:
    return len({(linear.in_features, linear.bias is None) for linear in linears}) == 1


def _stacked(tensors: Sequence[Any]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([t.detach() for t in tensors])
