"""Tiny random targets whose text depends on its whole context.

A tiny model with stock weights is nearly a bigram model: it writes the same text whatever the cache holds, so
a test on it cannot see a lost or misplaced key. Here every matrix is large enough that attention is sharp and
outweighs the embedding of the last token; `test_tiny.py` asserts the effect for each model.

Weights are drawn from a fixed seed in float32 and rounded to the dtype asked for, so that all dtypes and all
releases of transformers see the same model. No model has an end-of-text token: nothing stops early unless a
test asks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def tiny_llama(
    *, dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa", seed: int = 0
) -> PreTrainedModel:
    """Grouped-query attention, an LM head of its own; vocabulary 101, 3 layers."""
    config = LlamaConfig(vocab_size=101, num_hidden_layers=3, tie_word_embeddings=False, **_SIZES)
    return _random_model(config, dtype, attn_implementation, seed)


def tiny_qwen2(
    *, dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa", seed: int = 0
) -> PreTrainedModel:
    """Biases in the query, key and value projections; vocabulary 113, 3 layers."""
    config = Qwen2Config(vocab_size=113, num_hidden_layers=3, tie_word_embeddings=False, **_SIZES)
    return _random_model(config, dtype, attn_implementation, seed)


def tiny_mistral(
    window: int = 8,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
    seed: int = 0,
) -> PreTrainedModel:
    """Every layer sees the last `window` tokens, itself included; vocabulary 97, 3 layers.

    A token can thus reach `3 * (window - 1)` positions ahead and no further.
    """
    config = MistralConfig(
        vocab_size=97, num_hidden_layers=3, sliding_window=window, tie_word_embeddings=False, **_SIZES
    )
    return _random_model(config, dtype, attn_implementation, seed)


def tiny_gemma2(
    window: int = 8,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "eager",
    seed: int = 0,
) -> PreTrainedModel:
    """Sliding and full layers in turn, tied embeddings, soft-capped attention scores and logits.

    Vocabulary 131, 4 layers. The caps are low enough to bite. Only the eager implementation caps attention
    scores: "sdpa" ignores the cap in transformers 5.17 and is refused in 5.24.
    """
    config = Gemma2Config(
        vocab_size=131,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=window,
        attn_logit_softcapping=6.0,
        final_logit_softcapping=9.0,
        query_pre_attn_scalar=2,
        **_SIZES,
    )
    return _random_model(config, dtype, attn_implementation, seed)


def tiny_gemma3(
    window: int = 8,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str = "sdpa",
    seed: int = 0,
) -> PreTrainedModel:
    """Sliding and full layers with different rotary bases, normalised queries and keys, tied embeddings.

    Vocabulary 127, 4 layers.
    """
    config = Gemma3TextConfig(
        vocab_size=127,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        sliding_window=window,
        query_pre_attn_scalar=4,
        **_SIZES,
    )
    return _random_model(config, dtype, attn_implementation, seed)


TINY_MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "mistral": tiny_mistral,
    "gemma2": tiny_gemma2,
    "gemma3": tiny_gemma3,
}


def _random_model(config: PretrainedConfig, dtype: torch.dtype, attn_implementation: str, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):  # construction draws weights too; callers keep their random state
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    _draw_weights(model, torch.Generator().manual_seed(seed))
    return model.eval()


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, generator: torch.Generator) -> None:
    embedding = model.get_input_embeddings().weight
    is_tied = model.config.tie_word_embeddings
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        neutral = parameter.float()  # of a norm: 1, in Gemma 0
        if parameter is embedding:
            # Tied to the LM head, a large embedding would make every token predict itself.
            drawn = 0.02 * noise if is_tied else noise
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            drawn = neutral + 1 + 0.1 * noise  # twice the usual queries and keys: sharper attention
        elif is_tied and name == "model.norm.weight":
            drawn = neutral + 20 + 0.1 * noise  # logits of the usual size in spite of the small embedding
        elif "norm" in name:
            drawn = neutral + 0.1 * noise
        elif name.endswith("bias"):
            drawn = 0.5 * noise
        else:
            # A normalised input of n elements gives outputs of standard deviation 2.
            drawn = 2 * noise / parameter.shape[-1] ** 0.5
        parameter.copy_(drawn)
