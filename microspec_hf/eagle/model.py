"""The EAGLE-1/2 head (EAGLE section 3.1): a token and the hidden state before it give the one after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from microspec_hf.eagle.config import EagleConfig
from microspec_hf.hf import cache_argument


class EagleHead(PreTrainedModel):
    """One Llama layer without input norm behind a linear layer that joins embedding and hidden state.

    Embeddings and LM head are the target's and are not part of the module; there is no final norm. Tensor
    names are those of the official EAGLE-1/2 checkpoints. `from_pretrained`, `save_pretrained` and
    `push_to_hub` are those of every transformers model; a checkpoint with missing or unknown tensors is
    refused.
    """

    config_class = EagleConfig
    base_model_prefix = ""
    _no_split_modules = ["LlamaDecoderLayer"]  # noqa: RUF012 (transformers' own field)
    _supports_sdpa = True

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        layer: Any = LlamaDecoderLayer(config, layer_idx=0)
        # Not a norm of weight 1: EAGLE feeds the joined features to the attention as they are.
        layer.input_layernorm = nn.Identity()
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            _set_bias(projection, config.qkv_bias)
        _set_bias(layer.self_attn.o_proj, config.o_bias)
        self.layers = nn.ModuleList([layer])
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self._cache_argument = cache_argument(LlamaDecoderLayer.forward)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Predicted hidden rows `[B, T, H]`: row j stands for the target's hidden state at position j + 1.

        Args:
            embeddings: `[B, T, H]`, the target's embedding of the token at j + 1 for each row j.
            hidden: `[B, T, H]`, the target's hidden state at j after its final norm, or an earlier output.
            positions: int64 `[B, T]` or `[1, T]`, the rows' own positions j.
            mask: float additive `[B | 1, 1, T, keys]`, or None: each row then sees itself and the rows before
                it.
            cache: KV cache with rows prepared for this call (`TreeCache`), or None.
        """
        joined = self.fc(torch.cat([embeddings, hidden], dim=-1))
        if mask is None and self.config._attn_implementation == "eager":
            mask = _causal_mask(joined)
        output: Tensor = self.layers[0](
            joined,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary_emb(joined, positions),
            **{self._cache_argument: cache},
        )
        return output

    def _apply(self, fn: Any, recurse: bool = True) -> EagleHead:
        """Keeps the rotary frequencies in float32 when the weights change dtype; rounded, they are wrong."""
        frequencies = dict(self.rotary_emb.named_buffers())
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, moved in list(self.rotary_emb.named_buffers()):
            if moved.dtype != frequencies[name].dtype:
                setattr(self.rotary_emb, name, frequencies[name].to(moved.device))
        return self

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As transformers', but a checkpoint that has not exactly the head's tensors is refused.

        Raises:
            ValueError: tensors are missing or unknown; the message names them.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        head, info = loaded
        source = str(args[0] if args else "the state dict")
        refuse_tensors(source, info["missing_keys"], info["unexpected_keys"])
        return (head, info) if output_loading_info else head


def refuse_tensors(source: str, missing: Any, unexpected: Any) -> None:
    """Raise when a checkpoint lacks tensors or has some that nothing would read."""
    problems = [
        f"{problem} {', '.join(sorted(names))}"
        for problem, names in (("lacks", missing), ("also has", unexpected))
        if names
    ]
    if problems:
        raise ValueError(
            f"{source} is not a complete EAGLE head: it {' and '.join(problems)}. "
            "A head that was loaded in part would draft nonsense; check that the files belong to one "
            "checkpoint."
        )


def _set_bias(linear: nn.Linear, wanted: bool) -> None:
    linear.register_parameter("bias", nn.Parameter(torch.zeros(linear.out_features)) if wanted else None)


def _causal_mask(rows: Tensor) -> Tensor:
    count = rows.shape[1]
    mask = torch.full((count, count), torch.finfo(rows.dtype).min, dtype=rows.dtype, device=rows.device)
    return mask.triu(1)[None, None]
