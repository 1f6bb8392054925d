"""The only module that knows the inside of transformers: caches, masks, hidden states, heads, and their versions.

A target is a plain `PreTrainedModel`. `Target` runs its decoder over explicit positions, masks and a `TreeCache`, and
computes its logits with the model's own head.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerateDecoderOnlyOutput,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


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
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_zeros(*key_states.shape[:2], self.cache.capacity, key_states.shape[3])
        self.values = value_states.new_zeros(*value_states.shape[:2], self.cache.capacity, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        rows = self.cache.rows.to(key_states.device)
        self.keys.index_copy_(2, rows, key_states)
        self.values.index_copy_(2, rows, value_states)
        return self.keys[:, :, : self.cache.view], self.values[:, :, : self.cache.view]

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
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
        self.rows_of: list[TreeCacheLayer] = [TreeCacheLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.rows_of))
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
            for layer in self.rows_of:
                layer.grow(self.capacity)

    def buffers(self) -> list[Tensor]:
        """K and V buffers of all layers that hold any, `[1, heads, capacity, head_dim]` each."""
        return [buffer for layer in self.rows_of for buffer in (layer.keys, layer.values) if buffer is not None]


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
        hidden: Tensor = output.last_hidden_state[0]
        return hidden.to(self.head.weight.device)


_checked: WeakKeyDictionary[PreTrainedModel, tuple[str, torch.dtype]] = WeakKeyDictionary()


@torch.no_grad()
def check_tree_pass(target: Target) -> None:
    """Compare a small tree with plain forwards, once for each model, so that no architecture is trusted unseen.

    A decoder may ignore the mask, take positions from the row numbers or keep a window of its own; a model may do more
    between decoder and logits than its head. Each of them would change the text without an error.

    Raises:
        ValueError: the tree's logits are not those of plain forwards.
    """
    kind = target.config._attn_implementation, target.dtype
    if _checked.get(target.model) == kind or target.model.training:  # dropout: nothing could be compared
        return
    try:
        ours, plain = _tree_logits(target), _plain_logits(target)
        error = float((ours - plain).norm(dim=-1).div(plain.norm(dim=-1)).amax())
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as reason:
        raise ValueError(
            f"{type(target.model).__name__} cannot take a tree of drafts ({type(reason).__name__}: {reason}). "
            "Call generate without custom_generate."
        ) from reason
    if not error <= (1e-2 if torch.finfo(target.dtype).eps < 1e-6 else 0.3):  # TF32; experts chosen in half precision
        raise ValueError(
            f"{type(target.model).__name__} computes other logits for a tree of drafts than for the same texts one by "
            f"one (relative error {error:.1e}), so that speculation would change the text. "
            "Call generate without custom_generate."
        )
    _checked[target.model] = kind


# The tree of the check, behind a prompt of four tokens: a root, its two children, and a child of the second one.
_PROMPT, _NODES, _PATHS = [1, 2, 3, 4], [5, 6, 7, 8], [[5], [5, 6], [5, 7], [5, 7, 8]]


def _tree_logits(target: Target) -> Tensor:
    cache, device = target.new_cache(), target.device
    length, columns = len(_PROMPT), torch.arange(8, device=device)
    cache.prepare(columns[:length], length)
    causal = torch.where(columns[:length] <= columns[:length, None], columns[:length], -1)
    target.forward(torch.tensor(_PROMPT, device=device) % target.vocab_size, columns[:length], causal, cache)
    cache.length = length

    positions = torch.tensor([4, 5, 5, 6], device=device)
    visible = columns.repeat(4, 1)
    for node, (path, position) in enumerate(zip(_PATHS, positions.tolist(), strict=True)):
        for other, token in enumerate(_NODES):
            visible[node, length + other] = positions[other] if token in path and positions[other] <= position else -1
    cache.prepare(columns[length:], 8)
    hidden = target.forward(torch.tensor(_NODES, device=device) % target.vocab_size, positions, visible, cache)
    return target.head(hidden).float()


def _plain_logits(target: Target) -> Tensor:
    first, second = (
        target.model(
            input_ids=torch.tensor([_PROMPT + path], device=target.device) % target.vocab_size, use_cache=False
        ).logits[0, len(_PROMPT) :]
        for path in (_PATHS[1], _PATHS[3])  # the two leaves: their texts hold those of the inner nodes
    )
    return torch.stack([first[0], first[1], second[1], second[2]]).float().to(target.head.weight.device)


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
    for source in (arguments, vars(arguments.get("generation_config") or model.generation_config)):
        kind = source.get("cache_implementation") or ""
        if kind == "quantized" or "offloaded" in kind:  # transformers would begin to make such a cache
            raise ValueError(
                f"cache_implementation={kind!r}: its rows cannot be moved or rolled back after a rejected draft. "
                "Leave cache_implementation out; speculation brings its own cache."
            )
    if arguments.get("inputs_embeds") is not None:
        raise ValueError(
            "inputs_embeds is not supported with speculation: the drafter reads token ids. Pass input_ids."
        )


def processors_of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The processors of a batch, ready to be called with one of its rows alone."""
    return LogitsProcessorList([_processor_of_row(processor, row) for processor in processors])


def refuse_processors_of_batch(processors: LogitsProcessorList) -> None:
    """Refuse those of transformers' processors that keep a state for all rows of a batch together."""
    together = (
        EncoderNoRepeatNGramLogitsProcessor,
        SynthIDTextWatermarkLogitsProcessor,
        UnbatchedClassifierFreeGuidanceLogitsProcessor,
    )
    if names := [type(processor).__name__ for processor in processors if isinstance(processor, together)]:
        raise ValueError(
            f"{', '.join(names)} must see all rows of a batch at once, but speculation writes one row after the other. "
            "Pass one prompt at a time."
        )


def _processor_of_row(processor: Any, row: int) -> Any:
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), num_beams=1)
    for kind, field in (
        (EncoderRepetitionPenaltyLogitsProcessor, "encoder_input_ids"),
        (RepetitionPenaltyLogitsProcessor, "prompt_ignore_length"),  # since 5.2x the padding of each row
    ):
        if isinstance(processor, kind) and isinstance(of_rows := getattr(processor, field), Tensor):
            processor = copy.copy(processor)
            setattr(processor, field, of_rows[row : row + 1])
    return processor


def caller_cache(model_kwargs: dict[str, Any]) -> None:
    """Refuse forward arguments that the loop would not pass on, and a cache that already holds a text."""
    understood = {"attention_mask", "position_ids", "cache_position", "use_cache", "cache", "past_key_values"}
    harmless = {"logits_to_keep", "num_logits_to_keep", "synced_gpus", "tokenizer", "assistant_tokenizer"}
    harmless |= {"output_attentions", "output_hidden_states"}  # `generation` has refused them where they would be seen
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
    for index, layer in enumerate(cache.rows_of):
        if layer.keys is not None and layer.values is not None:
            plain.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), index)
    field = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
    return {field: plain}
