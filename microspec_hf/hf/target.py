"""A causal LM as the loop sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from microspec_hf.hf.cache import TreeCache, cache_argument
from microspec_hf.hf.head import read_head


class Target:
    """A causal LM as the loop sees it: embeddings, a decoder pass, a head, the attention windows of its layers.

    Raises:
        ValueError: the model cannot be run this way exactly; the message names the reason and the way out.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.config = model.config.get_text_config()
        self.decoder = model.get_decoder()
        _refuse_unsupported(model, self.config, self.decoder)
        self.embeddings = model.get_input_embeddings()
        self.head = read_head(model, self.config)
        self.windows = _windows(self.config)
        self._cache_argument = cache_argument(self.decoder.forward)

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        return next(self.embeddings.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight.dtype if self.head.weight.is_floating_point() else torch.float32

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.head.weight.shape[0])

    def new_cache(self) -> TreeCache:
        return TreeCache(int(self.config.num_hidden_layers))

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
        masks = {kind: additive_mask(visible, positions, window, self.dtype) for kind, window in self.windows.items()}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        output = self.decoder(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            output_hidden_states=every_layer,
            **{self._cache_argument: cache},
        )
        layers: tuple[Tensor, ...] = output.hidden_states if every_layer else ()
        return output.last_hidden_state.to(self.head.weight.device), layers


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


def _windows(config: Any) -> dict[str, int | None]:
    """Attention window of each layer type of a model; one entry when all layers are alike."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if not kinds:
        return {"all": window if getattr(config, "use_sliding_window", True) else None}
    known: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    return {kind: known[kind] for kind in sorted(kinds)}


def _refuse_unsupported(model: PreTrainedModel, config: Any, decoder: nn.Module | None) -> None:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder model; tree drafting needs a decoder-only causal language model. "
            "Call generate without custom_generate."
        )
    if decoder is None or model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no decoder and LM head that could be reached; it is not a causal language model.")
    kinds = set(getattr(config, "layer_types", None) or ())
    if strange := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"{name} has layers of type {', '.join(strange)}, whose state cannot be rolled back after a rejected "
            "draft. Only full and sliding-window attention can be speculated on; call generate without custom_generate."
        )
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise ValueError(
            f"{name} keeps attention windows of its own, by the order of the cache's rows, which a tree of drafts does "
            "not have. Call generate without custom_generate."
        )
    if model._is_stateful or not hasattr(config, "num_attention_heads"):
        raise ValueError(
            f"{name} keeps a recurrent state, which cannot be rolled back after a rejected draft. "
            "Call generate without custom_generate."
        )
    if (attention := config._attn_implementation) not in ("sdpa", "eager"):
        raise ValueError(
            f"{name} was loaded with attn_implementation={attention!r}, which cannot take a tree mask. "
            'Load it with attn_implementation="sdpa" (or call model.set_attn_implementation("sdpa")).'
        )
