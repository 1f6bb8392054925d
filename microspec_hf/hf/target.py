"""A causal LM as the loop sees it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from microspec_hf.hf.cache import TreeCache, cache_argument
from microspec_hf.hf.head import read_head
from microspec_hf.hf.rows import input_device
from microspec_hf.hf.shadow import with_linears
from microspec_hf.hf.sight import Sight
from microspec_hf.hf.support import attention_windows, position_limit, refuse_length, refuse_unsupported
from microspec_hf.hf.tree_pass import TreePass
from microspec_hf.ops import few_rows

Module = TypeVar("Module", bound=nn.Module)


class Target:
    """A causal LM as the loop sees it: embeddings, a decoder pass, a head, the attention windows of its layers.

    Raises:
        ValueError: the model cannot be run this way exactly; the message names the reason and the way out.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        refuse_unsupported(model, self.config, self.decoder)
        self.embeddings = model.get_input_embeddings()
        self.head = read_head(model, self.config)
        self.windows = attention_windows(self.config)
        self.position_limit = position_limit(self.config)
        self.tree_pass: TreePass | None = None
        self._has_few_rows = False
        self._round_decoder = self.decoder
        self._cache_argument = cache_argument(self.decoder.forward)

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return input_device(self.embeddings)

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.head.weight.shape[0])

    def refuse_length(self, prompt_length: int, max_length: float) -> None:
        """Refuse a text of up to `max_length` tokens behind such a prompt where it cannot be exact."""
        refuse_length(type(self.model).__name__, self.config, prompt_length, max_length)

    def with_few_rows(self) -> Target:
        """The same target, whose rounds compute their matrix products as `ops.few_rows` does."""
        target = copy.copy(self)
        target._has_few_rows = True
        target._round_decoder = target.for_rounds(self.decoder)
        target.head = replace(self.head, module=target.for_rounds(self.head.module), linear=few_rows.linear)
        return target

    def for_rounds(self, module: Module) -> Module:
        """A module of a round, in the body that computes products as this target's rounds do."""
        return with_linears(module, few_rows.FewRowsLinear) if self._has_few_rows else module

    def new_cache(self, is_fixed: bool = False) -> TreeCache:
        return TreeCache(int(self.config.num_hidden_layers), is_fixed=is_fixed)

    def see(
        self, tokens: Tensor, positions: Tensor, sight: Sight, cache: TreeCache, every_layer: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `forward`, for rows that stand behind their texts in the order of a tree's columns.

        Args:
            tokens, positions: int64 `[B, T]`.
            sight: what they see; column j is row j.
            cache: with room for them.
        """
        view = cache.length + tokens.shape[1]
        cache.prepare(sight.length[:, None] + torch.arange(tokens.shape[1], device=tokens.device), view)
        if self.tree_pass is None or every_layer:
            # Hidden states are caught by hooks, which the body of the rounds has none of.
            decoder = self.decoder if every_layer else self._round_decoder
            return self._forward(decoder, tokens, positions, sight.positions(view), cache, every_layer)
        decode = self.tree_pass.over(cache, sight)
        hidden = decode(
            input_ids=tokens, attention_mask=self.tree_pass.mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        return hidden.to(self.head.device), ()

    def forward(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: TreeCache, every_layer: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Hidden rows `[B, T, H]` after the final norm, exactly what the head consumes.

        Args:
            tokens: int64 `[B, T]`.
            positions: int64 `[B, T]`.
            visible: int64 `[B, T, view]`, the position of each cache row that a token may attend to, -1 for the others.
            cache: prepared with the rows of the tokens.
            every_layer: also give what `output_hidden_states` does: the embeddings and each layer's output `[B, T, H]`.

        Returns:
            hidden: on the device of the head.
            layers: empty unless asked for.
        """
        return self._forward(self.decoder, tokens, positions, visible, cache, every_layer)

    def _forward(
        self,
        decoder: nn.Module,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        cache: TreeCache,
        every_layer: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        masks = {kind: additive_mask(visible, positions, window, self.dtype) for kind, window in self.windows.items()}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        output = decoder(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            output_hidden_states=every_layer,
            **{self._cache_argument: cache},
        )
        layers: tuple[Tensor, ...] = output.hidden_states if every_layer else ()
        return output.last_hidden_state.to(self.head.device), layers


def additive_mask(visible: Tensor, positions: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Float mask `[B, 1, T, view]`: 0 where a token may look, the dtype's lowest value elsewhere.

    Float and never bool: eager attention adds a bool mask as 0 and 1, without an error (algorithms, pitfall 5).

    Args:
        visible: int64 `[B, T, view]` or `[T, view]`, positions of the visible rows, -1 elsewhere.
        positions: int64 `[B, T]` or `[T]`, positions of the tokens.
        window: a sliding window of this many positions, or None.
    """
    allowed = visible >= 0
    if window is not None:
        allowed &= visible > positions[..., None] - window
    mask = torch.full(visible.shape, torch.finfo(dtype).min, dtype=dtype, device=visible.device)
    return mask.masked_fill_(allowed, 0.0).view(-1, 1, *visible.shape[-2:])
