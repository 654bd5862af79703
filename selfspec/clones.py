"""Second module objects over the same parameters, so that a base model is never edited.

A clone differs from its original in what it says about itself (attention function, class of its linear layers, hooks,
children) and shares every weight.
"""

import copy
from typing import Any

import torch
from accelerate.utils import align_module_device
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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


def dense_clone(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A `detached_clone` without accelerate's hooks, its linear maps dense in ``dtype`` where they are quantised.

    What is offloaded is brought here, what several processes share is put together. Everything else still shares its
    weights.
    """
    clone = detached_clone(module)
    for (path, child), (_, original) in zip(clone.named_modules(), module.named_modules(), strict=True):
        for name in ("_hf_hook", "_old_forward", "forward"):  # they would call the original
            child.__dict__.pop(name, None)
        for name, parameter in child._parameters.items():
            if parameter is not None and (parameter.is_meta or isinstance(parameter, DTensor)):
                child._parameters[name] = nn.Parameter(present(original, name), requires_grad=False)
        if isinstance(child, nn.Linear) and type(child._parameters["weight"]) is not nn.Parameter:
            parent, _, name = path.rpartition(".")
            clone.get_submodule(parent)._modules[name] = _dense(child, dtype)
    return clone


def is_split(model: nn.Module) -> bool:
    """Whether several processes hold the weights together (tensor parallelism): all of them take part in every pass."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def present(module: nn.Module, name: str) -> Tensor:
    """A parameter or buffer of ``module``'s own, brought here where accelerate keeps it elsewhere.

    Of one that several processes hold parts of, all of it: every one of them has to ask.
    """
    held: Tensor = getattr(module, name)
    if isinstance(held, DTensor):
        return held.full_tensor().detach()
    if not held.is_meta:
        return held.detach()
    with align_module_device(module):
        return getattr(module, name).detach().clone()


def _dense(linear: nn.Linear, dtype: torch.dtype) -> nn.Linear:
    made = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    made.weight = nn.Parameter(dequantize_module_weight(linear).detach().to(dtype), requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.detach().to(dtype), requires_grad=False)
    return made


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
