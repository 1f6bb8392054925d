"""Tiny models of the families that people run, with weights that make their text depend on its context.

Sizes are small and windows short, so that prompt and text run beyond them. See `tests/tiny.py` for why stock weights
would hide faults of the cache.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from microspec_hf import EagleHead
from tests.doubles import random_head

VOCAB = 97
WINDOW = 8

IDS: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES: dict[str, Any] = {
    **IDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
HEADS: dict[str, Any] = {**SIZES, "head_dim": 8}
GPT: dict[str, Any] = {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MIXED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": WINDOW,
}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTRAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,  # keys have 16
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

SERVED: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "attention_bias": True, "mlp_bias": True},
    "qwen2": SIZES,
    "qwen3": HEADS,
    "mistral": {**SIZES, "sliding_window": WINDOW},
    "gemma": HEADS,
    "gemma2": {**HEADS, **MIXED, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 6.0},
    "gemma3_text": {**HEADS, **MIXED, "query_pre_attn_scalar": 4},
    "gemma4_text": {
        **HEADS,
        **MIXED,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "phi": SIZES,
    "phi3": SIZES,
    "phimoe": {**SIZES, **MIXTRAL},
    "olmo": SIZES,
    "olmo2": SIZES,
    "olmo3": {**SIZES, **MIXED},
    "olmoe": {**SIZES, **EXPERTS},
    "granite": {**SIZES, "logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.7},
    "granitemoe": {**SIZES, **MIXTRAL, "logits_scaling": 4.0},
    "cohere": {**SIZES, "logit_scale": 0.3},
    "cohere2": {**SIZES, **MIXED, "logit_scale": 0.3},
    "gpt_neox": SIZES,
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 8},
    "codegen": {**GPT, "rotary_dim": 8},
    "gpt_bigcode": GPT,
    "gpt_neo": {**IDS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "pad_token_id": 1},
    "xglm": {**IDS, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "pad_token_id": 1, **UNTIED},
    "starcoder2": {**SIZES, "sliding_window": WINDOW},
    "glm": HEADS,
    "glm4": HEADS,
    "glm4_moe": {**HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "smollm3": {**SIZES, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "stablelm": SIZES,
    "nemotron": SIZES,
    "exaone4": {**SIZES, **MIXED},
    "ernie4_5": HEADS,
    "seed_oss": HEADS,
    "mixtral": {**SIZES, **MIXTRAL},
    "qwen2_moe": {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**HEADS, **EXPERTS},
    "deepseek_v2": {**DEEPSEEK, "q_lora_rank": None},
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 16},
    "gpt_oss": {**HEADS, **MIXTRAL, **MIXED},
    "falcon": {**IDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    # Vision-language classes, which load for some text models too (Gemma-3 from 4B on, Mistral Small): text alone.
    "gemma3": {
        "text_config": {**SIZES, **MIXED, "head_dim": 8, "query_pre_attn_scalar": 4},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 96,
        "boi_token_index": 95,
        "eoi_token_index": 94,
    },
    "llava": {
        "text_config": {"model_type": "llama", **SIZES},
        "vision_config": {"model_type": "clip_vision_model", **VISION},
        "image_token_index": 96,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **SIZES},
        "vision_config": {"model_type": "pixtral", **VISION},
        "image_token_index": 96,
    },
    "fuyu": {
        "text_config": {"model_type": "persimmon", **SIZES},
        "hidden_size": 32,
        "vocab_size": VOCAB,
        "patch_size": 2,
    },
    "qwen2_vl": {
        "text_config": {
            **SIZES,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 2},
        "image_token_id": 96,
        "video_token_id": 95,
        "vision_start_token_id": 94,
        "vision_end_token_id": 93,
    },
}
"""Families that can be speculated on: model type and configuration."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("bloom", {**IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "ALiBi"),
    "mpt": ("mpt", {**IDS, "d_model": 32, "n_heads": 4, "n_layers": 2}, "ALiBi"),
    "falcon with alibi": ("falcon", {**SERVED["falcon"], "alibi": True}, "ALiBi"),
    "gpt_neo with windows": (
        "gpt_neo",
        {**SERVED["gpt_neo"], "attention_types": [[["global", "local"], 1]]},
        "windows of its own",
    ),
    "opt with a projection": ("opt", {**SERVED["opt"], "word_embed_proj_dim": 16}, "embeddings of size 16"),
    "llama4": ("llama4_text", {**HEADS, "intermediate_size_mlp": 48, "num_local_experts": 2}, "chunked_attention"),
    "minimax": ("minimax", SIZES, "linear_attention"),
    "qwen3_next": ("qwen3_next", {**HEADS, **EXPERTS, "shared_expert_intermediate_size": 24}, "linear_attention"),
    "lfm2": ("lfm2", {**SIZES, "layer_types": ["conv", "full_attention"]}, "conv"),
    "falcon_h1": ("falcon_h1", SIZES, "hybrid"),
    "jamba": ("jamba", {**SIZES, "num_experts": 2}, "rolled back"),
    "recurrent_gemma": ("recurrent_gemma", SIZES, "rolled back"),
    "mamba": ("mamba", {**IDS, "hidden_size": 32, "num_hidden_layers": 1}, "rolled back"),
    "rwkv": ("rwkv", {**IDS, "hidden_size": 32, "num_hidden_layers": 2}, "recurrent state"),
}
"""Families that are refused by what their configuration says: model type, configuration, and a part of the sentence."""

REFUSED_BY_CHECK: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("bert", {**SIZES, "is_decoder": True}, "computes other logits"),
    "roberta": ("roberta", {**SIZES, "is_decoder": True, "pad_token_id": 1}, "computes other logits"),
    "trocr": (
        "trocr",
        {**IDS, "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
        "computes other logits",
    ),
    "openai-gpt": ("openai-gpt", {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4}, "cannot take a tree"),
    "xlnet": ("xlnet", {**IDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}, "cannot take a tree"),
}
"""Families that are refused because a small tree gives other logits than plain forwards."""

EAGER_ONLY = ("gemma2", "gpt_oss", "gpt_neo", "xglm", "gptj", "codegen")
"""Families without sdpa in the oldest supported release, or whose sdpa leaves something out."""


def make(family: str, *, seed: int = 0, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
    """A model of a family in float32; `changes` are fields of its configuration."""
    attention = "eager" if family in EAGER_ONLY else attention
    return from_config(AutoConfig.for_model(family, **{**SERVED[family], **changes}), seed=seed, attention=attention)


def from_config(config: PretrainedConfig, *, seed: int = 0, attention: str = "eager") -> PreTrainedModel:
    """A model with weights of `draw_weights`."""
    with torch.random.fork_rng(devices=[]):
        auto = AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation=attention)
    draw_weights(model, seed)
    return model.eval()


def text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config()


def head_for(model: PreTrainedModel, seed: int = 0) -> EagleHead:
    """A random drafter that fits, also for a model whose sizes are those of its text model."""
    return random_head(cast(PreTrainedModel, SimpleNamespace(config=text_config(model))), seed)


@torch.no_grad()
def draw_weights(model: PreTrainedModel, seed: int) -> None:
    """Matrices that make attention sharp; where the LM head is tied, small embeddings behind a large last norm."""
    generator = torch.Generator().manual_seed(seed)
    decoder: nn.Module = model.get_decoder()
    head = model.get_output_embeddings().weight
    is_tied = head is model.get_input_embeddings().weight
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    norms = [m for m in decoder.children() if "norm" in type(m).__name__.lower()]
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if any(parameter is weight for weight in embeddings):
            parameter.copy_(0.02 * noise if is_tied else noise)
        elif parameter.ndim < 2:
            parameter.add_((0.2 if name.endswith("bias") else 0.1) * noise)
        else:
            parameter.copy_(2 * noise / min(parameter.shape[-2:]) ** 0.5)
    if is_tied and norms:
        norms[-1].weight.add_(20)
