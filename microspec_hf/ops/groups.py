"""Which parts of a partitioned LM head a projection has to cover."""

from __future__ import annotations

from torch import Tensor


def chosen_groups(is_chosen: Tensor) -> list[int] | None:
    """The groups that any row has chosen, if they are known for free; None: all groups must be covered.

    On a CPU the tensor is on the host already, and rows of groups that nobody chose need not be multiplied. Elsewhere
    a look would make the host wait, and shapes must not change.

    Args:
        is_chosen: bool `[R, G]`.
    """
    if is_chosen.device.type != "cpu":
        return None
    groups: list[int] = is_chosen.any(dim=0).nonzero().flatten().tolist()
    return groups
