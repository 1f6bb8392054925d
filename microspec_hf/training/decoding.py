"""Continues thousands of prompts at once by one fixed-shape step, captured as a CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from microspec_hf.hf import Target

CHECK_EVERY = 16
"""Steps between two looks, on the host, at whether all answers have ended."""


@torch.no_grad()
def continue_prompts(
    target: Target,
    prompts: Sequence[Sequence[int]],
    width: int,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    temperature: float | None,
) -> list[list[int]]:
    """The target's answer to each prompt, its stop token included.

    Args:
        target: the model that answers.
        prompts: token ids of B prompts, each at most `width` long.
        width: columns that the prompts are padded to, on the left.
        max_new_tokens: where an answer ends at the latest.
        stop_ids: tokens that end an answer.
        temperature: of the sampling, with the generator of the device; None takes the most likely token.
    """
    with _folded_attention(target.model), fused_attention(target.device):
        answers = _Batch(target, prompts, width, max_new_tokens, stop_ids, temperature).run().tolist()
    stops = set(stop_ids)
    ends = [next((i + 1 for i, token in enumerate(answer) if token in stops), max_new_tokens) for answer in answers]
    return [answer[:end] for answer, end in zip(answers, ends, strict=True)]


class _Batch:
    """Prompts and answers in columns: column c of row b holds the token at position c - padding[b]."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        width: int,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        temperature: float | None,
    ):
        device, size = target.device, len(prompts)
        self.target, self.width, self.temperature = target, width, temperature
        self.padding = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
        self.prompts = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        self.stop_ids = torch.tensor(list(stop_ids), device=device)
        self.answers = torch.zeros(size, max_new_tokens, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.ended = torch.zeros(size, dtype=torch.bool, device=device)
        self.count = torch.zeros(1, dtype=torch.int64, device=device)  # of chosen tokens
        self.cache = target.new_cache()
        self.cache.reserve(width + max_new_tokens)

    def run(self) -> Tensor:
        """Answers `[B, max_new_tokens]`; what follows a stop token has no meaning."""
        columns = torch.arange(self.width, device=self.padding.device)
        self._choose(self._forward(self.prompts, columns, self.width))
        step = self._step if self.padding.device.type != "cuda" else self._captured_step()
        for count in range(1, self.answers.shape[1]):
            if count % CHECK_EVERY == 0 and bool(self.ended.all()):
                break
            step()
        return self.answers

    def _step(self) -> None:
        column = self.count + (self.width - 1)
        self._choose(self._forward(self.tokens[:, None], column, self.cache.capacity))

    def _captured_step(self) -> Any:
        """`_step` as one launch: a small target's hundreds of kernels take longer to launch than to run."""
        state = (self.tokens, self.ended, self.count)
        before = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is allocated on first use must not be allocated while capturing
            self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        return graph.replay

    def _forward(self, tokens: Tensor, columns: Tensor, view: int) -> Tensor:
        """Hidden rows `[B, H]` of the last of the `tokens` `[B, T]`, which stand in `columns` `[T]`."""
        target = self.target
        keys = torch.arange(view, device=columns.device)
        allowed = (keys <= columns[:, None]) & (keys >= self.padding[:, None, None])
        masks = {kind: self._mask(allowed, keys, columns, window) for kind, window in target.windows.items()}
        self.cache.prepare(columns[None], view)
        output = target.decoder(
            input_ids=tokens,
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            position_ids=(columns - self.padding[:, None]).clamp(min=0),
            use_cache=True,
            **{target._cache_argument: self.cache},
        )
        return output.last_hidden_state[:, -1]  # type: ignore[no-any-return]

    def _mask(self, allowed: Tensor, keys: Tensor, columns: Tensor, window: int | None) -> Tensor:
        if window is not None:
            allowed = allowed & (keys > columns[:, None] - window)
        mask = torch.zeros(allowed.shape, dtype=self.target.dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(mask.dtype).min)[:, None]

    def _choose(self, hidden: Tensor) -> None:
        scores = self.target.head(hidden).float()
        if self.temperature is not None:
            # Gumbel's trick: the largest of log p - log(exponential noise) is a draw from p.
            scores = scores / self.temperature - torch.empty_like(scores).exponential_().log_()
        chosen = scores.argmax(dim=-1)
        self.tokens.copy_(torch.where(self.ended, self.tokens, chosen))
        self.answers.index_copy_(1, self.count, self.tokens[:, None])
        self.ended |= (self.tokens[:, None] == self.stop_ids).any(dim=1)
        self.count += 1


@contextmanager
def _folded_attention(model: PreTrainedModel) -> Iterator[None]:
    """Lets a model with sdpa attention read its cache once a step, not a copy for every query of a group."""
    before = model.config._attn_implementation
    if before != "sdpa":
        yield
        return
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attend_folded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of single tokens with the queries of a group as rows of one head: `[B, heads, 1, D]`."""
    batch, heads, count, dim = query.shape
    if count > 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    folded = query.view(batch, key.shape[1], -1, dim)
    output = nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return output.reshape(batch, 1, heads, dim), None


def fused_attention(device: torch.device) -> Any:
    """SDPA without cuDNN, which builds a plan for every new shape: slow where shapes change all the time."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


_NAME = "microspec_folded"
AttentionInterface.register(_NAME, _attend_folded)
AttentionMaskInterface.register(_NAME, sdpa_mask)
