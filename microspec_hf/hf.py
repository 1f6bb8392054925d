"""The only module that knows the inside of transformers: caches, masks, hidden states, heads, and their versions.

A target is a plain `PreTrainedModel`. `Target` runs its decoder over explicit positions, masks and a `TreeCache`, and
computes its logits with the model's own head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import GenerateDecoderOnlyOutput


def cache_argument(forward: Callable[..., Any]) -> str:
    """Name of the KV-cache keyword of a forward: `cache` in newer transformers (5.24), `past_key_values` before."""
    # inspect follows __wrapped__, so the decorator that still accepts the old name does not hide the new one.
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


class TreeCacheLayer(CacheLayerMixin):
    """K and V of one layer in one buffer `[1, heads, capacity, head_dim]`, written at the rows the cache names."""

    is_compileable = True
    is_croppable = True
    is_sliding = False

    def __init__(self, cache: TreeCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_zeros(*key_states.shape[:2], self.cache.capacity, key_states.shape[3])
        self.values = value_states.new_zeros(*value_states.shape[:2], self.cache.capacity, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        rows = self.cache.rows.to(key_states.device)
        self.keys.index_copy_(2, rows, key_states)
        self.values.index_copy_(2, rows, value_states)
        return self.keys[:, :, : self.cache.view], self.values[:, :, : self.cache.view]

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            extra = capacity - self.keys.shape[2]
            self.keys = nn.functional.pad(self.keys, (0, 0, 0, extra))
            self.values = nn.functional.pad(self.values, (0, 0, 0, extra))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.view, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return self.cache.capacity


class TreeCache(Cache):
    """A KV cache whose rows are written where the caller says, so that a tree's rows can be kept, moved or left behind.

    Every layer is a full-length buffer, also those of sliding-window layers: a window is a matter of the mask, and a
    row that was overwritten could not be rolled back.

    `prepare(rows, view)` is called before each forward: `rows` int64 `[T]` are the buffer rows of the T tokens, `view`
    how many rows attention sees. `length` counts the committed rows, which never change again.
    """

    def __init__(self, num_layers: int, capacity: int = 0):
        super().__init__(layers=[TreeCacheLayer(self) for _ in range(num_layers)])
        self.capacity = capacity
        self.length = 0
        self.view = 0
        self.rows = torch.empty(0, dtype=torch.int64)

    def prepare(self, rows: Tensor, view: int) -> None:
        self.reserve(view)
        self.rows, self.view = rows, view

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows; growth is by half, so that a long text reallocates a few times only."""
        if capacity > self.capacity:
            self.capacity = -(-max(capacity, self.capacity * 3 // 2) // 64) * 64
            for layer in self.layers:
                layer.grow(self.capacity)

    def buffers(self) -> list[Tensor]:
        """K and V buffers of all layers that hold any, `[1, heads, capacity, head_dim]` each."""
        return [buffer for layer in self.layers if layer.is_initialized for buffer in (layer.keys, layer.values)]


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
        self.head = _read_head(model, self.config)
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

    def forward(self, tokens: Tensor, positions: Tensor, visible: Tensor, cache: TreeCache) -> Tensor:
        """Hidden rows `[T, H]` after the final norm, exactly what the head consumes.

        Args:
            tokens: int64 `[T]`.
            positions: int64 `[T]`.
            visible: int64 `[T, view]`, the position of each cache row that a token may attend to, -1 for the others.
            cache: prepared with the rows of the T tokens.
        """
        masks = {kind: additive_mask(visible, positions, window, self.dtype) for kind, window in self.windows.items()}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        output = self.decoder(
            input_ids=tokens[None],
            attention_mask=mask,
            position_ids=positions[None],
            use_cache=True,
            **{self._cache_argument: cache},
        )
        return output.last_hidden_state[0].to(self.head.weight.device)


def additive_mask(visible: Tensor, positions: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Float mask `[1, 1, T, view]`: 0 where a token may look, the dtype's lowest value elsewhere.

    Float and never bool: eager attention adds a bool mask as 0 and 1, without an error (algorithms, pitfall 5).

    Args:
        visible: int64 `[T, view]`, positions of the visible rows, -1 elsewhere.
        positions: int64 `[T]`, positions of the tokens.
        window: a sliding window of this many positions, or None.
    """
    allowed = visible >= 0
    if window is not None:
        allowed &= visible > positions[:, None] - window
    mask = torch.full(visible.shape, torch.finfo(dtype).min, dtype=dtype, device=visible.device)
    return mask.masked_fill_(allowed, 0.0)[None, None]


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


def _read_head(model: PreTrainedModel, config: Any) -> TargetHead:
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


def refuse_request(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Refuse what `generate` would start to work on before our decoding method could say no."""
    Target(model)
    if arguments.get("assistant_model") is not None:
        raise ValueError(
            'assistant_model and custom_generate="microspec" are two ways to speculate; the drafter of this one is '
            "named by drafter=. Pass one of them."
        )
    if arguments.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds is not supported with speculation: the drafter reads token ids. Pass input_ids.")


def caller_cache(model_kwargs: dict[str, Any]) -> None:
    """Refuse forward arguments that the loop would not pass on, and a cache that already holds a text."""
    understood = {"attention_mask", "position_ids", "cache_position", "use_cache", "cache", "past_key_values"}
    harmless = {"logits_to_keep", "num_logits_to_keep", "synced_gpus", "tokenizer", "assistant_tokenizer"}
    unknown = [k for k, v in model_kwargs.items() if v is not None and k not in understood | harmless]
    if unknown:
        raise ValueError(
            f"Speculation does not pass {', '.join(unknown)} on to the model, so that the text would differ. "
            "Leave it out, or call generate without custom_generate."
        )
    for name in ("cache", "past_key_values"):
        cache = model_kwargs.get(name)
        if cache is None:
            continue
        if not isinstance(cache, Cache) or type(cache).__name__ in ("QuantizedCache", "EncoderDecoderCache"):
            raise ValueError(
                f"A {type(cache).__name__} cannot be rolled back after a rejected draft. "
                "Leave the cache out; speculation brings its own."
            )
        if int(cache.get_seq_length()) > 0:
            raise ValueError(
                f"The cache that was passed already holds {int(cache.get_seq_length())} tokens, for which the drafter "
                "has no hidden states. Pass the whole text as input_ids and leave the cache out."
            )


def export_cache(target: Target, cache: TreeCache, length: int) -> dict[str, Cache]:
    """The first `length` rows as the cache that plain `generate` returns, under this version's output field."""
    plain = DynamicCache(config=target.config)
    for index, layer in enumerate(cache.layers):
        if layer.is_initialized:
            plain.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), index)
    field = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
    return {field: plain}
