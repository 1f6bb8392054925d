"""A second body for a model's modules: the same weights, and code that may be changed without the model noticing."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)

_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_PASSIVE = "transformers.utils.output_capturing"
"""Its hooks stay on a model that was asked for hidden states once, and do nothing unless it is asked again."""


def shadow(module: Module) -> Module:
    """A copy of every module object of a tree; parameters and buffers are shared, submodules and attributes are not.

    Whatever is changed on the copy - an attribute, a forward, a submodule - another thread that runs the original at
    the same time does not see.

    Raises:
        ValueError: a module has a forward or hooks of its own, which would still run on the original.
    """
    twin: Module = _copy(module, {})
    return twin


def with_linears(module: Module, kind: type[nn.Linear]) -> Module:
    """A shadow whose linear layers are of this kind; a module that cannot have one stays itself."""
    try:
        twin = shadow(module)
    except ValueError:
        return module
    for part in twin.modules():
        if type(part) is nn.Linear:
            part.__class__ = kind
    return twin


def _copy(module: Any, made: dict[int, Any]) -> Any:
    if id(module) not in made:
        name = type(module).__name__
        if "forward" in vars(module):
            raise ValueError(f"{name} has a forward of its own, as offloading and adapters give it")
        if any(hook.__module__ != _PASSIVE for hooks in _HOOKS for hook in vars(module)[hooks].values()):
            raise ValueError(f"{name} has forward hooks")
        twin = made[id(module)] = object.__new__(type(module))
        vars(twin).update(vars(module))
        for table in _TABLES:
            vars(twin)[table] = copy.copy(vars(module)[table])
        for hooks in _HOOKS:
            vars(twin)[hooks] = OrderedDict()
        vars(twin)["_modules"] = {
            child: None if part is None else _copy(part, made) for child, part in module._modules.items()
        }
    return made[id(module)]
