"""The LM head of a target, with its true function, whatever the model does behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class TargetHead:
    """The target's LM head with its true function: `softcap(scale * (hidden @ weight.T + bias))`.

    Args:
        module: the output embeddings as the model holds them (hooks, adapters and quantisation included).
        weight: `[V, H]`.
        bias: `[V]` or None.
        scale: factor on the logits (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`).
        softcap: Gemma's `final_logit_softcapping`, or None.
    """

    module: nn.Module
    weight: Tensor
    bias: Tensor | None
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits `[..., V]` of hidden rows `[..., H]`, exactly as the model computes them."""
        return self._finish(self.module(hidden))

    def project(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits `[..., W]` over chosen rows of the head: `weight` `[W, H]`, `bias` `[W]` or None."""
        return self._finish(nn.functional.linear(hidden, weight, bias))

    def _finish(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def read_head(model: PreTrainedModel, config: Any) -> TargetHead:
    module = model.get_output_embeddings()
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 2 or not weight.is_floating_point() or weight.is_meta:
        raise ValueError(
            f"The LM head of {type(model).__name__} ({type(module).__name__}) does not hold its rows as a plain "
            "floating-point matrix, so that rows cannot be gathered from it. Keep the head unquantised and on a device "
            '(for example llm_int8_skip_modules=["lm_head"]).'
        )
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return TargetHead(
        module=module,
        weight=weight,
        bias=getattr(module, "bias", None),
        scale=scale,
        softcap=getattr(config, "final_logit_softcapping", None),
    )
