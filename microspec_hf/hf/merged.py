"""Linear layers that read the same input, as one matrix product: query, key and value; gate and up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

SHARING_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that every transformers model feeds with one tensor, in the order in which they are called."""


class MergedLinears:
    """The rows of several linear layers in one weight, of which the layers' own weights become views.

    Args:
        linears: with one number of input features.
    """

    def __init__(self, linears: Sequence[nn.Linear]):
        self._linears = list(linears)
        with torch.no_grad():
            self.weight = torch.cat([linear.weight for linear in linears])
            self.bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
            self._point(self.weight, self.bias)

    def undo(self) -> None:
        """Give every layer memory of its own again."""
        with torch.no_grad():
            for linear in self._linears:
                linear.weight.data = linear.weight.data.clone()
                if linear.bias is not None:
                    linear.bias.data = linear.bias.data.clone()

    def parts(self) -> list[MergedPart]:
        """What stands in for each of the layers, in a module's shadow."""
        group = _Group(self.weight, self.bias)
        sizes = [linear.out_features for linear in self._linears]
        return [MergedPart(group, sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]

    def _point(self, weight: Tensor, bias: Tensor | None) -> None:
        first = 0
        for linear in self._linears:
            rows = slice(first, first + linear.out_features)
            linear.weight.data = weight[rows]
            if bias is not None:
                linear.bias.data = bias[rows]
            first = rows.stop


class _Group:
    """The product that the parts of a group share; computed by the first one."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias = weight, bias
        self.output: Tensor | None = None


class MergedPart(nn.Module):
    """One of the layers: columns of the shared product.

    Args:
        group: shared by all parts; the part with the first columns is called before the others.
        first, last: its columns.
    """

    def __init__(self, group: _Group, first: int, last: int):
        super().__init__()
        self.group, self.first, self.last = group, first, last
        self.in_features, self.out_features = group.weight.shape[1], last - first

    def forward(self, hidden: Tensor) -> Tensor:
        group = self.group
        if self.first == 0:
            group.output = nn.functional.linear(hidden, group.weight, group.bias)
        assert group.output is not None
        columns = group.output[..., self.first : self.last]
        if self.last == group.weight.shape[0]:
            group.output = None
        return columns


def mergeable(module: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Modules of a tree, each with the names of layers that can be merged."""
    for part in module.modules():
        for names in SHARING_INPUT:
            linears = [getattr(part, name, None) for name in names]
            if all(type(linear) is nn.Linear for linear in linears) and _alike(linears):  # type: ignore[arg-type]
                yield part, names


def _alike(linears: Sequence[nn.Linear]) -> bool:
    kinds = {(linear.in_features, linear.bias is None, linear.weight.dtype, linear.weight.device) for linear in linears}
    return len(kinds) == 1
