"""Small random heads, and the head's mathematics once more in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from microspec_hf.eagle import EagleConfig, EagleHead

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 53,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}


def random_head(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> EagleHead:
    """A head whose every tensor, norms and biases included, is far from its initial value."""
    head = EagleHead(EagleConfig(**(SIZES | options)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return head.to(dtype).eval()


def reference(tensors: dict[str, Tensor], config: Any, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
    """Rows `[T, H]` of a causal pass over `embeddings` and `hidden` `[T, H]`, in plain loops."""

    def linear(name: str, x: Tensor) -> Tensor:
        y = tensors[f"{name}.weight"] @ x
        return y + tensors[f"{name}.bias"] if f"{name}.bias" in tensors else y

    def rotate(x: Tensor, position: int) -> Tensor:
        half = config.head_dim // 2
        theta = config.rope_parameters["rope_theta"]
        y = x.clone()
        for i in range(half):
            angle = torch.tensor(position / theta ** (2 * i / config.head_dim), dtype=x.dtype)
            y[i] = x[i] * angle.cos() - x[i + half] * angle.sin()
            y[i + half] = x[i + half] * angle.cos() + x[i] * angle.sin()
        return y

    layer, dim = "layers.0", config.head_dim
    groups = config.num_attention_heads // config.num_key_value_heads
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    rows = []
    for e, h, position in zip(embeddings, hidden, positions.tolist(), strict=True):
        joined = linear("fc", torch.cat([e, h]))
        k, v, q = (linear(f"{layer}.self_attn.{n}_proj", joined).split(dim) for n in "kvq")
        keys.append([rotate(part, position) for part in k])
        values.append(list(v))
        heads = []
        for number, query in enumerate(q):
            query = rotate(query, position)
            scores = torch.stack([query @ past[number // groups] for past in keys]) / dim**0.5
            heads.append(scores.softmax(0) @ torch.stack([past[number // groups] for past in values]))
        a = joined + linear(f"{layer}.self_attn.o_proj", torch.cat(heads))
        norm = (
            a / (a.square().mean() + config.rms_norm_eps).sqrt() * tensors[f"{layer}.post_attention_layernorm.weight"]
        )
        gate = torch.nn.functional.silu(linear(f"{layer}.mlp.gate_proj", norm))
        rows.append(a + linear(f"{layer}.mlp.down_proj", gate * linear(f"{layer}.mlp.up_proj", norm)))
    return torch.stack(rows)
