"""What large targets and their EAGLE heads cost: the shapes that decide how long a pass takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

MODEL_TYPES = ("llama", "qwen2")


@dataclass(frozen=True)
class Cost:
    """Shapes of a target and of its EAGLE head, which has the target's sizes and one layer.

    Args:
        model_type: "llama", or "qwen2", whose query, key and value projections have biases.
        head_dim: dimensions of an attention head.
        tie_word_embeddings: the LM head is the matrix of the embeddings.
        drafter_fc_bias: the head's layer that joins embedding and hidden state has a bias.
        drafter_qkv_bias: the head's query, key and value projections have biases.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False
    drafter_fc_bias: bool = False
    drafter_qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.model_type not in MODEL_TYPES:
            raise ValueError(f"The model_type of a cost is {' or '.join(MODEL_TYPES)}, got {self.model_type!r}.")
        small = [name for name in (*SIZES, "num_hidden_layers") if getattr(self, name) < 1]
        if small:
            raise ValueError(f"The sizes of a cost are positive; {', '.join(small)} of {self} must be at least 1.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}."
            )

    @property
    def num_parameters(self) -> int:
        """Of the target."""
        matrices = 1 if self.tie_word_embeddings else 2
        rest = (matrices * self.vocab_size + 1) * self.hidden_size
        return rest + self.num_hidden_layers * (self._num_attention_parameters + self._num_mlp_parameters)

    def spread(self, num_layers: int) -> Cost:
        """The same parameters in more layers, to within 64 neurons a layer, by a narrower MLP.

        For a small target with more layers than the large one has. A pass reads the same bytes of weights but runs
        `num_layers` layers, so it is slower than the large target's, never faster.

        Raises:
            ValueError: there are fewer layers than now, or so many that no MLP is left.
        """
        room = (self._num_attention_parameters + self._num_mlp_parameters) * self.num_hidden_layers / max(1, num_layers)
        neurons = round((room - self._num_attention_parameters) / (3 * self.hidden_size * 64)) * 64
        if num_layers < self.num_hidden_layers or neurons < 1:
            raise ValueError(
                f"{self.num_hidden_layers} layers of {self.intermediate_size} neurons cannot be spread over "
                f"{num_layers}: more layers are possible as long as some of the MLP is left, fewer are not."
            )
        return replace(self, num_hidden_layers=num_layers, intermediate_size=neurons)

    @property
    def _num_attention_parameters(self) -> int:
        """Of one layer, its norms included."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        biases = queries + 2 * keys if self.model_type == "qwen2" else 0
        return 2 * self.hidden_size * (queries + keys + 1) + biases

    @property
    def _num_mlp_parameters(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
"""Fields that the configurations of target and drafter have in common."""

COSTS: dict[str, Cost] = {
    # meta-llama/Meta-Llama-3-8B-Instruct, yuhuili/EAGLE-LLaMA3-Instruct-8B
    "llama-3-8b": Cost(
        model_type="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    ),
    # meta-llama/Llama-3.2-1B-Instruct, thunlp/LLaMA3.2-Instruct-1B-FR-Spec
    "llama-3.2-1b": Cost(
        model_type="llama",
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        tie_word_embeddings=True,
    ),
    # Qwen/Qwen2-7B-Instruct, yuhuili/EAGLE-Qwen2-7B-Instruct
    "qwen2-7b": Cost(
        model_type="qwen2",
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=152064,
        drafter_fc_bias=True,
        drafter_qkv_bias=True,
    ),
}
