"""A CUDA graph's meaning on a CPU: what a function does to tensors is recorded without being done, and done again.

Everything that is decided in Python while recording - sizes, branches, values read on the host - is frozen, and every
operation writes where it wrote then. A round that survives this has no state on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::_unique2")


def capture(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """As `engine.CudaCapture`: the function's result, and what does it again."""
    recorder = Recorder()
    with recorder:
        outcome = function()
    recorder.undo()
    return outcome, recorder.replay


class Recorder(TorchDispatchMode):
    """Keeps every operation with its very tensors, and what they held before."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().split(".")[0]
        assert name not in READS, f"{name} waits for the device, which a capture forbids"
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            for tensor in given:
                self._remember(tensor)
        results = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
        storages = {_storage(tensor) for tensor in given}
        is_view = bool(made) and all(_storage(tensor) in storages for tensor in made)
        if func._schema.is_mutable or not is_view:
            fresh = [tensor for tensor in made if _storage(tensor) not in storages]
            self.made |= {_storage(tensor) for tensor in fresh}
            self.calls.append((func, args, kwargs, fresh))
        return results

    def _remember(self, tensor: Tensor) -> None:
        if _storage(tensor) not in self.made and _storage(tensor) not in self.before:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self.before[_storage(tensor)] = whole, whole.clone()

    def undo(self) -> None:
        """A capture does nothing."""
        for tensor, held in self.before.values():
            tensor.copy_(held)

    def replay(self) -> None:
        for func, args, kwargs, fresh in self.calls:
            results = func(*args, **kwargs)
            made = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
            known = {_storage(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            for target, source in zip(fresh, [t for t in made if _storage(t) not in known], strict=True):
                target.copy_(source)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
