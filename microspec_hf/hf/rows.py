"""Where the rows of an LM head lie: in a plain matrix, quantised, below an adapter, or on another device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StoredRows:
    """The rows of a linear layer.

    Args:
        weight: `[V, H]` as the module holds it; quantised, without its adapter or on no device unless `is_plain`.
        bias: `[V]` or None.
        read: int64 `[n]` -> `[n, H]`, the rows of those ids.
        dtype: of the rows.
        device: of the rows, and of what the module computes.
        is_plain: `weight` holds the rows themselves.
    """

    weight: Tensor
    bias: Tensor | None
    read: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    device: torch.device
    is_plain: bool = False


def stored_rows(module: Any, dtype: torch.dtype) -> StoredRows | None:
    """How the rows of a linear layer are read, or None where they cannot be.

    Args:
        module: as a model holds it, adapters, quantisation and offloading hooks included.
        dtype: what the module computes in, where its weight does not say.
    """
    if hasattr(module, "base_layer"):
        return _below_lora(module, dtype)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    if weight.is_meta:
        return _offloaded(module, weight)
    if hasattr(getattr(module, "state", None), "SCB"):
        return _bitsandbytes_8bit(module, weight, dtype)
    if not weight.is_floating_point():
        return None
    bias = getattr(module, "bias", None)
    if type(weight.data) is Tensor:
        return StoredRows(
            weight, bias, lambda ids: weight.index_select(0, ids), weight.dtype, weight.device, is_plain=True
        )
    return _torchao(weight, bias)


def _below_lora(module: Any, dtype: torch.dtype) -> StoredRows | None:
    """PEFT's LoRA: the rows of B A, scaled, are added to those of the layer below; other adapters are not known."""
    below = stored_rows(module.base_layer, dtype)
    if below is None or not hasattr(module, "lora_A") or getattr(module, "lora_variant", None):  # DoRA and others
        return None
    if module.merged or module.disable_adapters:
        return below
    active = [name for name in module.active_adapters if name in module.lora_A]
    if any(module.lora_B[name].bias is not None for name in active):
        return None

    def read(ids: Tensor) -> Tensor:
        rows = below.read(ids)
        for name in active:
            a, b = module.lora_A[name].weight, module.lora_B[name].weight
            rows = rows + ((b.index_select(0, ids) @ a) * module.scaling[name]).to(rows)
        return rows

    return StoredRows(below.weight, below.bias, read, below.dtype, below.device)


def _torchao(weight: Tensor, bias: Tensor | None) -> StoredRows | None:
    """A quantised tensor that stands for its float matrix; read where single rows can be taken from it."""
    rows = StoredRows(weight, bias, lambda ids: weight[ids].dequantize(), weight.dtype, weight.device)
    return rows if _can_read(rows) else None


def _bitsandbytes_8bit(module: Any, weight: Tensor, dtype: torch.dtype) -> StoredRows:
    """int8 rows with one scale each: a row of `SCB / 127` times its integers."""

    def read(ids: Tensor) -> Tensor:
        # The first forward moves both from the parameter to the module's state.
        integers, scales = (
            getattr(module.state, name) if getattr(module.state, name) is not None else getattr(module.weight, name)
            for name in ("CB", "SCB")
        )
        rows: Tensor = integers.index_select(0, ids) * (scales.index_select(0, ids) / 127)[:, None]
        return rows.to(dtype)

    return StoredRows(weight, module.bias, read, dtype, weight.device)


def _offloaded(module: Any, weight: Tensor) -> StoredRows | None:
    """A weight that accelerate brings in for each call, from the memory of the host or from a disk."""
    hook = _offloading_hook(module)
    if hook is None:
        return None
    source, device = hook.weights_map, torch.device(hook.execution_device)

    def read(ids: Tensor) -> Tensor:
        stored: Tensor = source["weight"]
        return stored.index_select(0, ids.to(stored.device)).to(device)

    bias = None if getattr(module, "bias", None) is None else source["bias"].to(device)
    return StoredRows(weight, bias, read, weight.dtype, device)


def input_device(module: nn.Module) -> torch.device:
    """Where a layer wants its inputs: with its weights, or where accelerate brings them."""
    device = next(module.parameters()).device
    hook = _offloading_hook(module)
    return device if device.type != "meta" or hook is None else torch.device(hook.execution_device)


def _offloading_hook(module: Any) -> Any:
    hook = getattr(module, "_hf_hook", None)
    return next((h for h in getattr(hook, "hooks", (hook,)) if getattr(h, "weights_map", None) is not None), None)


def _can_read(rows: StoredRows) -> bool:
    try:
        rows.read(torch.zeros(1, dtype=torch.int64, device=rows.device))
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True
