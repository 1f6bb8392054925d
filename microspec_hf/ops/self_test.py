"""A small call of each op, to see whether an implementation computes what the reference does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from microspec_hf.ops import reference

Op = Callable[..., Any]


def disagreement(name: str, function: Op, device: torch.device) -> str | None:
    """Call an implementation on a few rows and compare it with the reference, on the same device.

    Returns:
        None if they agree, else a sentence with both results.
    """
    expected_arguments, arguments = _example(name, device), _example(name, device)
    expected = _tensors((getattr(reference, name)(*expected_arguments), expected_arguments))
    actual = _tensors((function(*arguments), arguments))
    if len(expected) != len(actual):
        return f"its self-test gave {len(actual)} tensors, expected {len(expected)}."
    for got, wanted in zip(actual, expected, strict=True):
        same_kind = got.shape == wanted.shape and got.dtype == wanted.dtype
        if not (same_kind and torch.allclose(got.double(), wanted.double(), rtol=1e-5, atol=1e-5)):
            return f"its self-test gave {_short(got)}, expected {_short(wanted)}."
    return None


def _example(name: str, device: torch.device) -> tuple[Any, ...]:
    def ints(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    if name in ("draft_topk", "topk_candidates"):
        return torch.tensor([[0.5, 2.0, -1.0, 2.0, 0.25, -3.0]], device=device), 3
    if name == "build_tree":
        # The golden tree: ties aside, every step of the selection shows in it.
        scores = torch.tensor([-0.1, -2.5, -0.3, -2.0, -2.8, -3.5, -0.4, -2.9, -2.45, -3.5], device=device)
        return scores, ints(*range(20, 30)), ints(-1, -1, 0, 0, 1, 1, 2, 2, 3, 3), ints(7), 6
    if name == "gather_rows":
        weight = torch.arange(24.0, device=device).reshape(3, 8)
        count = ints(1, dtype=torch.int32)
        return torch.zeros(2, 8, device=device), weight, ints(2, 0), ints(1, 0), count
    if name == "window_update":
        slot_of, token_of = (
            ints(*[-1] * 3, 0, *[-1] * 5, dtype=torch.int32),
            ints(3, -1, -1, dtype=torch.int32),
        )
        usage, ring, pinned = ints(0, 0, 0, dtype=torch.int32), ints(dtype=torch.int32), ints(1, 0, 0).bool()
        return slot_of, token_of, usage, ring, ints(0), ints(5, 3, 6, -1, 8, 6), pinned, False
    if name == "compact_kv":
        buffers = [torch.arange(64.0, device=device).reshape(1, 2, 8, 4) + shift for shift in (0, 100)]
        return buffers, ints(0, 2, 3, 3), ints(3)
    raise ValueError(f"There is no op {name!r}.")


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [t for value in values for t in _tensors(value)] if isinstance(values, list | tuple) else []


def _short(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.flatten()[:16].tolist()}"
