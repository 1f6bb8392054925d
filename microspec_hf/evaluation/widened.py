"""Widened pairs: the cost of a large target and its drafter, with the texts of a small pair.

How fast a pair decodes depends on two things: what a pass costs, which only the shapes decide, and how many drafts are
accepted, which only the functions decide. `widen` embeds a small trained pair in matrices of the shapes of a large
one. Every layer, head, vocabulary row and byte of the large pair is there and is computed; the logits over the small
vocabulary, the drafts, and thus the texts and the acceptance, are those of the small pair. Speeds measured with it
are those of, say, Llama-3-8B at the acceptance of SmolLM2, and must be labelled so.

Where things go, h of the small and H of the large target being the hidden sizes:

- Residual stream: the h values first, then one constant (below), then zeros. Nothing writes behind the first h, and
  what reads there may be random: zeros in the weights would draw less power than a real model's.
- RMSNorm takes its mean over H instead of h values: weights times sqrt(h / H), eps times h / H.
- Attention heads: RoPE turns the dimensions (i, i + D/2) of a head of D dimensions by the angle base^(-2i/D). With
  D = k d the pair j of a head of d goes to i = k j, whose angle is the same number at the same base. Scores are divided
  by sqrt(D) instead of sqrt(d): query rows times sqrt(D / d).
- Grouped queries: key-value head a stays head a. An added query head beside it has scores of zero, hence sees the mean
  of the live values; the output projection must not read it. Added key-value heads have values of zero.
- MLP: added neurons are silu(0) * 0 = 0.
- Added layers read only dead dimensions, so that their values, neurons and outputs are zero.
- Added vocabulary rows must never win, nor share in the drafter's softmax. A logit of zero is not enough: the EAGLE
  tree compares products of probabilities. A logit is linear in the hidden state, hence a negative one needs a
  dimension with a known sign: dimension h of the residual stream carries a constant c. It costs nothing, since RMSNorm
  adds a constant of its own: with c^2 <= h eps the new eps is (h eps - c^2) / H. The final norm, and the drafter's fc,
  pass on a tiny multiple of it, which the added rows multiply by a huge number. The product is about -2^24 over the
  root mean square of the last layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

from microspec_hf.eagle import EagleConfig, EagleHead, check_pair
from microspec_hf.evaluation.costs import COSTS, SIZES, Cost

__all__ = ["COSTS", "Cost", "Widening", "match_depth", "shorten", "widen"]

_CONFIGS: dict[str, type[Any]] = {"llama": LlamaConfig, "qwen2": Qwen2Config}

ROPE_TYPES = ("default", "linear", "llama3")
"""Rotary embeddings that scale each frequency by itself; "yarn" looks at a dimension's place in the head as well."""

PASSED_ON = 2.0**-32
"""The constant dimension behind the final norm (before the division by the root mean square) and in the drafter.

In a tied model the old rows read it too: all old logits grow by the same number, at most 2^-32 sqrt(H).
"""

NEVER = -(2.0**56)
"""What the rows of added ids have at the constant dimension; even its square is finite in bfloat16 and float32."""


def widen(
    model: PreTrainedModel,
    head: EagleHead,
    cost: str | Cost = "llama-3-8b",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> tuple[PreTrainedModel, EagleHead]:
    """A target and its drafter with the cost of a large pair and the function of a small one.

    Logits over the old vocabulary, hidden states (in their first dimensions), drafts and trees are equal up to the
    rounding of the same sums in another order: RMSNorm computes in float32 in every dtype, which leaves a few 1e-6 of
    the largest logit in float32 and float64. In bfloat16 the factors sqrt(h / H) and sqrt(D / d) also round the
    weights once more where they are no powers of two, so that the pair is a rounding of the small one, as the small
    pair in bfloat16 is. Give the small pair in float32 then, and `dtype=torch.bfloat16`.

    Added ids are neither drafted nor emitted. They must not be in a prompt.

    Args:
        model: a Llama or Qwen2 with plain weights and no more layers than the cost has.
        head: its EAGLE head.
        cost: a name in `COSTS`, or other shapes.
        dtype: of the new weights (default: that of `model`).
        seed: of the weights that nothing live reads.

    Returns:
        The pair, on the device of `model`. Neither shares memory with the small one.

    Raises:
        ValueError: the small pair does not fit into these shapes; the message has all reasons.
    """
    widening = Widening(model, head, cost, dtype, seed)
    with init_empty_weights():
        target: Any = AutoModelForCausalLM.from_config(
            widening.target_config,
            dtype=widening.dtype,
            attn_implementation=model.config._attn_implementation,
        )
        drafter = EagleHead(widening.drafter_config)
    _fill(target, dict(widening.target_tensors()), widening.device)
    _fill(drafter, dict(widening.drafter_tensors()), widening.device)
    target.generation_config = copy.deepcopy(model.generation_config)
    return target, drafter


@torch.no_grad()
def shorten(model: PreTrainedModel, num_layers: int, ids: Tensor) -> PreTrainedModel:
    """A copy of a target without the layers that change the hidden state least (ShortGPT section 3.2).

    It is another target, which writes other texts and agrees less with the drafter; `widen` keeps what it does. Two of
    SmolLM2's 30 layers can go without much harm; without half of them it writes nonsense, and only the times of its
    rounds mean something. `Cost.spread` is the other way out.

    Args:
        model: a target that can be widened.
        num_layers: how many layers to keep.
        ids: int64 `[1, L]`, a text over which the influence of a layer is measured.

    Raises:
        ValueError: there are not that many layers.
    """
    total = int(model.config.num_hidden_layers)
    if not 1 <= num_layers <= total:
        raise ValueError(f"A target of {total} layers can be shortened to 1 to {total} layers, got {num_layers}.")
    states = model(ids.to(model.device), output_hidden_states=True).hidden_states
    similarity = [torch.cosine_similarity(a, b, dim=-1).mean() for a, b in pairwise(states)]
    kept = sorted(torch.stack(similarity).argsort(stable=True)[:num_layers].tolist())
    short: Any = copy.deepcopy(model)
    layers = short.get_decoder().layers
    for index, layer in enumerate(kept):
        layers[index] = layers[layer]
        layers[index].self_attn.layer_idx = index
    del layers[num_layers:]
    short.config.num_hidden_layers = num_layers
    if getattr(short.config, "layer_types", None):
        short.config.layer_types = [short.config.layer_types[layer] for layer in kept]
    return short  # type: ignore[no-any-return]


def match_depth(model: PreTrainedModel, cost: str | Cost, deep: str, ids: Tensor) -> tuple[PreTrainedModel, Cost]:
    """A target and a cost that it fits into by its number of layers.

    Args:
        model: the small target.
        cost: a name in `COSTS`, or other shapes.
        deep: for a target with too many layers: `"spread"` keeps its text, `"shorten"` keeps the cost, and `"refuse"`
            leaves it to `widen` to say so.
        ids: int64 `[1, L]`, for `shorten`.
    """
    shape, num_layers = _cost(cost), int(model.config.num_hidden_layers)
    if num_layers <= shape.num_hidden_layers or deep == "refuse":
        return model, shape
    if deep == "spread":
        return model, shape.spread(num_layers)
    return shorten(model, shape.num_hidden_layers, ids), shape


class Widening:
    """A widened pair that is made one tensor at a time.

    Args: as `widen` has them.

    Attributes:
        target_config, drafter_config: configurations of the new pair.
        dtype, device: of its tensors.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        head: EagleHead,
        cost: str | Cost = "llama-3-8b",
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ):
        self.cost = _cost(cost)
        self.dtype = dtype or model.dtype
        self.device = model.device
        _refuse(model, head, self.cost, self.dtype)
        self._target, self._drafter = _Embedding.of(model.config, self.cost), _Embedding.of(head.config, self.cost)
        # The largest power of two whose square the old eps can make room for: exact in every dtype.
        room = model.config.hidden_size * model.config.rms_norm_eps
        self._constant = 2.0 ** math.floor(math.log2(room) / 2)
        self.target_config = self._target_config(model.config)
        self.drafter_config = self._drafter_config(head.config)
        self._model, self._head = model, head
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def target_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of each tensor of the target's state dict; a tied LM head is not among them."""
        source, places = self._model.state_dict(), self._target
        old_layers = int(self._model.config.num_hidden_layers)
        yield "model.embed_tokens.weight", self._embeddings(source["model.embed_tokens.weight"])
        for index in range(self.cost.num_hidden_layers):
            prefix = f"model.layers.{index}."
            added = index >= old_layers
            layer = self._layer({} if added else _below(prefix, source), places.unused() if added else places)
            yield from ((prefix + name, tensor) for name, tensor in layer)
        norm = self._vector(source["model.norm.weight"], places.residual, places.norm_scale, others=1.0)
        norm[places.constant] = PASSED_ON / self._constant
        yield "model.norm.weight", norm
        if not self.cost.tie_word_embeddings:
            rows = self._matrix(source["lm_head.weight"], places.vocabulary, places.residual)
            rows[places.vocabulary.count :, places.constant] = NEVER
            yield "lm_head.weight", rows

    def drafter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of each tensor of the drafter's state dict."""
        source, places = self._head.state_dict(), self._drafter
        joining = self._matrix(source["fc.weight"], places.residual, places.joined)
        joining[places.constant, places.constant] = PASSED_ON / self._constant  # from the embedding, not the state
        yield "fc.weight", joining
        if self.cost.drafter_fc_bias:
            yield "fc.bias", self._vector(source.get("fc.bias"), places.residual)
        prefix = "layers.0."
        yield from ((prefix + name, tensor) for name, tensor in self._layer(_below(prefix, source), places, True))

    def _layer(
        self, source: Mapping[str, Tensor], places: _Embedding, is_drafter: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Tensors of a layer; of an added one where there is no source."""
        has_biases = self.cost.drafter_qkv_bias if is_drafter else self.cost.model_type == "qwen2"
        residual, queries, keys, neurons = places.residual, places.queries, places.keys, places.neurons
        for name, rows, columns, scale in (
            ("self_attn.q_proj", queries, residual, places.query_scale),
            ("self_attn.k_proj", keys, residual, 1.0),
            ("self_attn.v_proj", keys, residual, 1.0),
            ("self_attn.o_proj", residual, queries, 1.0),
            ("mlp.gate_proj", neurons, residual, 1.0),
            ("mlp.up_proj", neurons, residual, 1.0),
            ("mlp.down_proj", residual, neurons, 1.0),
        ):
            yield f"{name}.weight", self._matrix(source.get(f"{name}.weight"), rows, columns, scale)
            if has_biases and columns is residual and rows is not neurons:
                yield f"{name}.bias", self._vector(source.get(f"{name}.bias"), rows, scale)
        for name in ("input_layernorm", "post_attention_layernorm"):
            if not is_drafter or name != "input_layernorm":
                norm = source.get(f"{name}.weight")
                yield f"{name}.weight", self._vector(norm, residual, places.norm_scale, others=1.0)

    def _embeddings(self, source: Tensor) -> Tensor:
        """Old rows: the values, the constant, zeros. Added rows are read as rows of a tied head only."""
        places, old = self._target, self._target.vocabulary.count
        matrix = self._random(places.vocabulary.size, places.residual.size)
        matrix[:old] = 0
        matrix[:old, : places.constant] = source.to(self.dtype)
        matrix[:old, places.constant] = self._constant
        if self.cost.tie_word_embeddings:
            matrix[old:, : places.constant] = 0
            matrix[old:, places.constant] = NEVER
        return matrix

    def _matrix(self, source: Tensor | None, rows: _Axis, columns: _Axis, scale: float = 1.0) -> Tensor:
        """`[rows, columns]`: the source at its places, zeros below live inputs, random numbers below dead ones."""
        matrix = self._random(rows.size, columns.size).index_fill_(1, columns.live.to(self.device), 0.0)
        if source is not None:
            row, column = rows.places.to(self.device), columns.places.to(self.device)
            matrix[row[:, None], column] = self._scaled(source, scale)
        return matrix

    def _vector(self, source: Tensor | None, axis: _Axis, scale: float = 1.0, others: float = 0.0) -> Tensor:
        vector = torch.full((axis.size,), others, dtype=self.dtype, device=self.device)
        if source is not None:
            vector[axis.places.to(self.device)] = self._scaled(source, scale)
        return vector

    def _scaled(self, source: Tensor, scale: float) -> Tensor:
        """Rounded once, to the new dtype."""
        return (source.to(torch.promote_types(source.dtype, torch.float32)) * scale).to(self.dtype)

    def _random(self, rows: int, columns: int) -> Tensor:
        empty = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return empty.normal_(std=0.02, generator=self._generator)

    def _target_config(self, source: Any) -> PretrainedConfig:
        kept = ("hidden_act", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
        made = _CONFIGS[self.cost.model_type]
        config: PretrainedConfig = made(
            architectures=[made.__name__.replace("Config", "ForCausalLM")],
            **{name: getattr(self.cost, name) for name in SIZES},
            num_hidden_layers=self.cost.num_hidden_layers,
            tie_word_embeddings=self.cost.tie_word_embeddings,
            rms_norm_eps=self._target.eps(source.rms_norm_eps, self._constant),
            rope_parameters=copy.deepcopy(source.rope_parameters),
            dtype=self.dtype,
            **{name: getattr(source, name) for name in kept},
        )
        return config

    def _drafter_config(self, source: PretrainedConfig) -> EagleConfig:
        config: Any = copy.deepcopy(source)  # with what was measured of its acceptance, which stays true
        for name in SIZES:
            setattr(config, name, getattr(self.cost, name))
        config.fc_bias, config.qkv_bias = self.cost.drafter_fc_bias, self.cost.drafter_qkv_bias
        config.rms_norm_eps = self._drafter.eps(config.rms_norm_eps, PASSED_ON)
        config.dtype = self.dtype
        return config  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Axis:
    """Where the elements of an axis go.

    Args:
        size: of the new axis.
        places: int64 `[n]`, the new index of each old element.
        live: int64, the new indices of inputs that are not always zero: only what is meant to may read them.
    """

    size: int
    places: Tensor
    live: Tensor

    @property
    def count(self) -> int:
        return len(self.places)

    def unused(self) -> _Axis:
        return replace(self, places=self.places[:0], live=self.live[:0])


@dataclass(frozen=True)
class _Embedding:
    """How the axes and scales of a small target or head go into those of a cost."""

    residual: _Axis
    joined: _Axis
    queries: _Axis
    keys: _Axis
    neurons: _Axis
    vocabulary: _Axis
    query_scale: float

    @classmethod
    def of(cls, config: Any, cost: Cost) -> _Embedding:
        hidden, wide = int(config.hidden_size), cost.hidden_size
        heads, kv_heads, head_dim = _heads(config)
        old_group, group = heads // kv_heads, cost.num_attention_heads // cost.num_key_value_heads
        first = torch.arange(hidden)
        within = _within_head(head_dim, cost.head_dim)
        kept = torch.arange(kv_heads)[:, None] * group + torch.arange(old_group)
        return cls(
            residual=_Axis(wide, first, torch.arange(hidden + 1)),
            joined=_Axis(
                2 * wide,
                torch.cat([first, wide + first]),
                torch.cat([torch.arange(hidden + 1), wide + torch.arange(hidden + 1)]),
            ),
            # All query heads of a live group put out live values, the added ones the mean of them.
            queries=_Axis(
                cost.num_attention_heads * cost.head_dim,
                _in_heads(kept.flatten(), within, cost.head_dim),
                _in_heads(torch.arange(kv_heads * group), within, cost.head_dim),
            ),
            keys=_plain_axis(
                cost.num_key_value_heads * cost.head_dim, _in_heads(torch.arange(kv_heads), within, cost.head_dim)
            ),
            neurons=_plain_axis(cost.intermediate_size, torch.arange(int(config.intermediate_size))),
            vocabulary=_plain_axis(cost.vocab_size, torch.arange(int(config.vocab_size))),
            query_scale=math.sqrt(cost.head_dim / head_dim),
        )

    @property
    def constant(self) -> int:
        """The dimension that carries the constant."""
        return self.residual.count

    @property
    def norm_scale(self) -> float:
        return math.sqrt(self.residual.count / self.residual.size)

    def eps(self, old: float, constant: float) -> float:
        """The eps with which (sum of squares + constant^2) / H + eps is h / H times the old mean square plus eps."""
        return (self.residual.count * old - constant**2) / self.residual.size

    def unused(self) -> _Embedding:
        """Of an added layer, which is given the residual stream and makes nothing of it."""
        return replace(self, queries=self.queries.unused(), keys=self.keys.unused(), neurons=self.neurons.unused())


def _plain_axis(size: int, places: Tensor) -> _Axis:
    return _Axis(size, places, places)


def _within_head(old: int, new: int) -> Tensor:
    """New dimension of each dimension of a head: rotary pair j goes to pair j * new / old, which turns as fast."""
    pairs = torch.arange(old // 2) * (new // old)
    return torch.cat([pairs, pairs + new // 2])


def _in_heads(heads: Tensor, within: Tensor, head_dim: int) -> Tensor:
    return (heads[:, None] * head_dim + within).flatten()


def _heads(config: Any) -> tuple[int, int, int]:
    """Query heads, key-value heads, and dimensions of a head."""
    heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, int(config.num_key_value_heads or heads), int(head_dim)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _fill(module: Any, tensors: dict[str, Tensor], device: torch.device) -> None:
    """Make the tensors the parameters of a module without memory; its buffers go to the device."""
    if module.config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    module.load_state_dict(tensors, assign=True)
    module.tie_weights()
    module.to(device).eval()


def _cost(cost: str | Cost) -> Cost:
    if isinstance(cost, Cost):
        return cost
    if cost not in COSTS:
        raise ValueError(
            f"No cost is called {cost!r}. Known are {', '.join(COSTS)}; others can be made with Cost(...)."
        )
    return COSTS[cost]


def _refuse(model: PreTrainedModel, head: EagleHead, cost: Cost, dtype: torch.dtype) -> None:
    """Raise with every reason why a pair does not fit."""
    config: Any = model.config
    if config.model_type not in _CONFIGS:
        raise ValueError(
            f"Only {' and '.join(_CONFIGS)} models can be widened, whose weights are known one by one; "
            f"{type(model).__name__} is a {config.model_type}."
        )
    check_pair(head, config, "")
    reasons = [*_misfits("target", config, cost), *_misfits("drafter", head.config, cost)]
    if dtype not in (torch.bfloat16, torch.float32, torch.float64):
        reasons.append(f"{dtype} cannot hold the rows of ids that must never win; use bfloat16, float32 or float64")
    if not all(parameter.is_floating_point() for parameter in [*model.parameters(), *head.parameters()]):
        reasons.append("the weights are quantised; load the pair in bfloat16 or float32")
    if config.num_hidden_layers > cost.num_hidden_layers:
        reasons.append(
            f"the target has {config.num_hidden_layers} layers, the cost {cost.num_hidden_layers}, and no layer can do "
            "the work of two; take a target with fewer layers (shorten), or a cost with more (Cost.spread)"
        )
    if cost.tie_word_embeddings and not config.tie_word_embeddings:
        reasons.append("the target has an LM head of its own, the cost one tied to the embeddings")
    if config.model_type == "qwen2" and (cost.model_type != "qwen2" or config.use_sliding_window):
        reasons.append("the target's query, key and value biases or sliding windows have no place in the cost")
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        reasons.append("the target's attention or MLP has biases, which the cost lacks")
    for name, is_in_cost in (
        ("fc_bias", cost.drafter_fc_bias),
        ("qkv_bias", cost.drafter_qkv_bias),
        ("o_bias", False),
        ("mlp_bias", False),
    ):
        if getattr(head.config, name) and not is_in_cost:
            reasons.append(f"the drafter has {name}, the cost's drafter has not")
    if reasons:
        raise ValueError(f"This pair cannot be widened to {cost}: {'; '.join(reasons)}.")


def _misfits(who: str, config: Any, cost: Cost) -> Iterator[str]:
    """Sizes of a target or drafter that do not go into a cost."""
    heads, kv_heads, head_dim = _heads(config)
    group, new_group = heads // kv_heads, cost.num_attention_heads // cost.num_key_value_heads
    for name, old, most in (
        ("a hidden size", config.hidden_size, cost.hidden_size - 1),  # and room for the constant
        ("an intermediate size", config.intermediate_size, cost.intermediate_size),
        ("a vocabulary", config.vocab_size, cost.vocab_size),
        ("a number of key-value heads", kv_heads, cost.num_key_value_heads),
        ("a number of query heads for each key-value head", group, new_group),
    ):
        if old > most:
            yield f"the {who} has {name} of {old}, and at most {most} goes into the cost"
    if cost.head_dim % head_dim:
        yield f"the {who} has heads of {head_dim} dimensions, of which the cost's {cost.head_dim} is no multiple"
    rope_type = (config.rope_parameters or {}).get("rope_type")
    if rope_type not in ROPE_TYPES:
        yield f"the {who} has rotary embeddings of type {rope_type!r}, and only {', '.join(ROPE_TYPES)} stay the same"
