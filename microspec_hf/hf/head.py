"""The LM head of a target, with its true function, whatever the model does behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from microspec_hf.hf.rows import StoredRows, stored_rows


@dataclass(frozen=True)
class TargetHead:
    """The target's LM head with its true function: `softcap(scale * (hidden @ weight.T + bias))`.

    Args:
        module: the output embeddings as the model holds them (hooks, adapters and quantisation included).
        weight: `[V, H]` as the module holds it. Its values are the head's rows only where `stored` is None; read them
            with `rows`.
        bias: `[V]` or None.
        scale: factor on the logits (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`).
        softcap: Gemma's `final_logit_softcapping`, or None.
        stored: how the rows of a quantised, adapted or offloaded head are read, or None for a plain matrix.
        linear: how `project` multiplies.
    """

    module: nn.Module
    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0
    softcap: float | None = None
    stored: StoredRows | None = None
    linear: Callable[..., Tensor] = nn.functional.linear

    @property
    def device(self) -> torch.device:
        """Device of the logits, and of `rows`."""
        return self.weight.device if self.stored is None else self.stored.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of `rows`."""
        return self.weight.dtype if self.stored is None else self.stored.dtype

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden rows `[..., H]`, exactly as the model computes them."""
        return self._finish(self.module(hidden))

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `[n, H]` of the ids int64 `[n]`, dequantised and with adapters added where the head has such."""
        return self.weight.index_select(0, ids) if self.stored is None else self.stored.read(ids)

    def project(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits `[..., W]` over chosen rows of the head: `weight` `[W, H]`, `bias` `[W]` or None."""
        return self._finish(self.linear(hidden, weight, bias))

    def _finish(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def read_head(model: PreTrainedModel, config: Any) -> TargetHead:
    """The head of a model.

    Raises:
        ValueError: its rows cannot be read one by one.
    """
    module = model.get_output_embeddings()
    found = stored_rows(module, model.dtype)
    if found is None:
        raise ValueError(
            f"The rows of the LM head of {type(model).__name__} ({type(module).__name__}) cannot be read one by one, "
            "as a draft vocabulary has to. Keep the head unquantised and free of adapters other than plain LoRA (for "
            'example llm_int8_skip_modules=["lm_head"]).'
        )
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return TargetHead(
        module=module,
        weight=found.weight,
        bias=found.bias,
        scale=scale,
        softcap=getattr(config, "final_logit_softcapping", None),
        stored=None if found.is_plain else found,
    )
