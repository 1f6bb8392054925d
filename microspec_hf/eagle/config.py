"""Configuration of an EAGLE-1/2 head."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose angles depend on the position alone: cached keys stay right as the text grows."""


class EagleConfig(LlamaConfig):
    """Shapes of an `EagleHead`. The layer is a Llama layer, hence the fields of a `LlamaConfig`.

    Rotary embeddings may be given as `rope_parameters` or in the older spelling, `rope_theta` and
    `rope_scaling`.

    Args:
        fc_bias: bias of the layer that joins embedding and hidden state.
        qkv_bias: biases of the query, key and value projections (Qwen2's heads have them).
        o_bias: bias of the attention's output projection.
        target: Hub id of the target that the head was trained for, or None.
        expected_acceptance: measured tokens a pass by depth and nodes, `{"5": {"60": 3.6}}`; `tree="auto"` reads it.

    Raises:
        ValueError: the type of rotary embedding is unknown, or its angles change with the length of the text.
    """

    model_type = "microspec_eagle"

    num_hidden_layers: int = 1
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    target: str | None = None
    expected_acceptance: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.expected_acceptance = self.expected_acceptance or {}
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        rope_type = (self.rope_parameters or {}).get("rope_type")
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"The drafter's configuration asks for rotary embeddings of type {rope_type!r}. An EAGLE "
                "head can run "
                f"with {', '.join(ROPE_TYPES)}; others are unknown or change the angles of keys already "
                "cached."
            )
        if self.num_hidden_layers != 1:
            raise ValueError(f"An EAGLE head has one layer; num_hidden_layers is {self.num_hidden_layers}.")

    def validate_architecture(self) -> None:
        """Head counts must divide; the hidden size need not be their multiple: `head_dim` is a field."""
        if self.num_key_value_heads is None or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}."
            )
