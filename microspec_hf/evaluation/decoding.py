"""Greedy decoding of one prompt, plainly and with speculation, as every measurement here does it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from microspec_hf.config import MicroSpecConfig
from microspec_hf.eagle import EagleHead
from microspec_hf.stats import SpeculationStats

GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
"""Arguments of `generate` for greedy decoding, whatever the target's own defaults are."""


def decode_plainly(model: PreTrainedModel, ids: Tensor, max_new_tokens: int) -> list[int]:
    """The new ids of the target's own greedy `generate` on a prompt, int64 `[1, L]`."""
    output = generate_greedily(model, ids, max_new_tokens=max_new_tokens)
    return output.sequences[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


def decode(
    model: PreTrainedModel,
    drafter: EagleHead | str | Path,
    ids: Tensor,
    config: MicroSpecConfig,
    max_new_tokens: int,
) -> tuple[list[int], SpeculationStats]:
    """The same with speculation: the new ids, and what was counted on the way."""
    speculation = {"custom_generate": "microspec", "drafter": drafter, "microspec": config}
    output = generate_greedily(model, ids, max_new_tokens=max_new_tokens, **speculation)
    return output.sequences[0, ids.shape[1] :].tolist(), output.stats[0]


def next_token_scores(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """fp32 `[V]`: what greedy decoding compares for the token after `ids`, from one pass over all of them.

    The logits, after the processors that the target's generation config asks for (a repetition penalty, say).
    """
    output = generate_greedily(model, ids, max_new_tokens=1, output_scores=True)
    return output.scores[0][0].float()  # type: ignore[no-any-return]


@contextmanager
def exact_matmul() -> Iterator[None]:
    """Compute float32 matrix products in float32, not in TF32, whatever the process is set to."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def generate_greedily(model: Any, ids: Tensor, **arguments: Any) -> Any:
    """`generate`'s output for a prompt int64 `[1, L]`, with these arguments besides those of greedy decoding."""
    ids = ids.to(model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **GREEDY, **arguments)
