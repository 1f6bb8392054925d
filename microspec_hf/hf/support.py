"""Which models can take a tree of drafts, and what the loop must know of their layers and positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose angles change with the longest position of a pass."""


def attention_windows(config: Any) -> dict[str, int | None]:
    """Attention window of each layer type of a model; one entry when all layers are alike."""
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if not kinds:
        return {"all": window if getattr(config, "use_sliding_window", True) else None}
    known: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    return {kind: known[kind] for kind in sorted(kinds)}


def position_limit(config: Any) -> int | None:
    """The first position that may not share a pass with those before it, or None where all may.

    A table of positions ends there (GPT-2, OPT), or the angles of all tokens change (dynamic and long RoPE). A tree
    that begins before it ends there too.
    """
    kinds = list(_rope_parameters(config))
    if not kinds:
        return getattr(config, "max_position_embeddings", None)
    limits = [
        kind.get("original_max_position_embeddings") or config.max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") in LENGTH_DEPENDENT_ROPE
    ]
    return min(limits, default=None)


def refuse_length(name: str, config: Any, prompt_length: int, max_length: float) -> None:
    """Refuse a text during which the angles of long or dynamic RoPE change.

    Args:
        name: of the model.
        prompt_length: tokens.
        max_length: tokens of prompt and text together, at most.
    """
    limit = position_limit(config)
    given = [kind.get("rope_type") for kind in _rope_parameters(config)]
    kinds = [kind for kind in LENGTH_DEPENDENT_ROPE if kind in given]
    # The last token of a text is never fed: position `limit` is, when the text has limit + 2 tokens.
    if limit is None or not kinds or max_length <= limit + 1 or (prompt_length > limit and "dynamic" not in kinds):
        return
    raise ValueError(
        f"{name} turns all keys and queries by other angles once a text has more than {limit} tokens (rope_type "
        f"{', '.join(kinds)!r}), which a tree of drafts cannot follow. The prompt has {prompt_length} tokens "
        f"and the text may grow to {max_length:.0f}: ask for at most {max(0, limit + 1 - prompt_length)} new tokens, "
        "or call generate without custom_generate."
    )


def refuse_unsupported(model: PreTrainedModel, config: Any, decoder: nn.Module | None) -> None:
    """Refuse a model that is known, from its configuration alone, not to take a tree of drafts."""
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
    if _has_alibi(config, decoder):
        raise ValueError(
            f"{name} tells positions apart by the order of the cache's rows (ALiBi), which a tree of drafts does not "
            "have. Call generate without custom_generate."
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
    width = getattr(config, "word_embed_proj_dim", config.hidden_size)
    if width != config.hidden_size:
        raise ValueError(
            f"{name} has embeddings of size {width} and hidden states of size {config.hidden_size}; an EAGLE head "
            "needs one size for both. Call generate without custom_generate."
        )
    _refuse_adapters(model, name)


def _refuse_adapters(model: PreTrainedModel, name: str) -> None:
    """PEFT methods that act on the text as a whole, which the loop feeds in parts."""
    prepare = vars(model).get("prepare_inputs_for_generation")
    own = getattr(type(model), "prepare_inputs_for_generation", None)
    if prepare is not None and getattr(prepare, "__func__", None) is not own:
        raise ValueError(
            f"{name} has a prepare_inputs_for_generation of its own (a learned prompt or prefix does that), which "
            "speculation does not call. Call generate without custom_generate, or use an adapter such as LoRA."
        )
    adapters = getattr(model, "peft_config", None) or {}
    if any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters.values()):
        raise ValueError(
            f"{name} has an activated LoRA, which changes the model from a token of the text on; a tree of drafts "
            "cannot follow. Use a plain LoRA, or call generate without custom_generate."
        )


def _has_alibi(config: Any, decoder: nn.Module) -> bool:
    makers = ("build_alibi_tensor", "build_mpt_alibi_tensor")
    return bool(getattr(config, "alibi", False)) or any(hasattr(decoder, maker) for maker in makers)


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """Rotary embeddings of all layers alike, or of each layer type."""
    given = getattr(config, "rope_parameters", None) or {}
    return (kind for kind in ([given] if "rope_type" in given else given.values()) if isinstance(kind, dict))
