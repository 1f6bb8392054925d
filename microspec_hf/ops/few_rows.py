"""Matrix products of a few rows, from the side on which the library is fast.

With some CPUs and libraries, `x @ W.T` of a few rows in float32 takes much longer than of one row, as if W were copied
into another order first, and `(W @ x.T).T`, the same product from the other side, does not. Whether that is so here is
measured (`autotune`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MOST_ROWS = 64


class FewRowsLinear(nn.Linear):
    """`nn.Linear` whose products are `linear`'s."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`nn.functional.linear`; a few rows by a plain float32 matrix in main memory are computed from its side.

    Args:
        rows: `[..., H]`.
        weight, bias: `[V, H]`, and `[V]` or None.

    Returns:
        `[..., V]`, contiguous.
    """
    if not _is_served(rows, weight):
        return nn.functional.linear(rows, weight, bias)
    product = torch.mm(weight, rows.reshape(-1, weight.shape[1]).t()).t()
    output = product if bias is None else product + bias
    return output.contiguous().view(*rows.shape[:-1], weight.shape[0])


def is_for(tensor: Tensor) -> bool:
    """Whether products with it can be computed from the other side: float32 in main memory."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _is_served(rows: Tensor, weight: Tensor) -> bool:
    return (
        type(weight) in (Tensor, nn.Parameter)  # others know better how to multiply themselves
        and is_for(weight)
        and is_for(rows)
        and weight.ndim == 2
        and 1 < rows.shape[:-1].numel() <= MOST_ROWS
    )
