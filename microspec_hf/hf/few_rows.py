"""Matrix products of a few rows, from the side on which the library is fast.

For 2 to some 60 rows, MKL's product `x @ W.T` in float32 takes longer than reading W does, and more than twice as long
as for one row; `(W @ x.T).T`, the same sums in another order, takes about as long as for one row. Which is so on a
machine is measured (`autotune`), since the one is not faster everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

MOST_ROWS = 64


class FewRows(TorchFunctionMode):
    """While it is active, `linear` of a few rows by a plain float32 matrix in main memory is computed from its side."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is nn.functional.linear and not kwargs and _is_served(*args):
            return linear(*args)
        return function(*args, **(kwargs or {}))


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`nn.functional.linear` with its operands changed over: `[..., H]` by `[V, H]` gives `[..., V]`."""
    product = torch.mm(weight, rows.reshape(-1, weight.shape[1]).t()).t()
    output = product.contiguous() if bias is None else product + bias
    return output.contiguous().view(*rows.shape[:-1], weight.shape[0])


def is_for(tensor: Tensor) -> bool:
    """Whether products with it can be computed from the other side: float32 in main memory."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _is_served(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return (
        type(weight) in (Tensor, nn.Parameter)  # others know better how to multiply themselves
        and is_for(weight)
        and is_for(rows)
        and weight.ndim == 2
        and 1 < rows.numel() // weight.shape[1] <= MOST_ROWS
    )
