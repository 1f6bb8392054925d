"""The head computes what EAGLE computes, and survives saving, loading and half precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from microspec_hf.eagle import EagleConfig, EagleHead
from microspec_hf.hf import TreeCache, additive_mask
from tests.eagle.heads import SIZES, random_head, reference

T, H = 9, SIZES["hidden_size"]


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    embeddings, hidden = torch.randn(2, 1, T, H, generator=generator).to(dtype)
    return embeddings, hidden, torch.arange(T)[None]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("biases", [(), ("fc_bias",), ("fc_bias", "qkv_bias"), ("qkv_bias", "o_bias", "mlp_bias")])
def test_forward_is_eagles(attention: str, biases: tuple[str, ...]) -> None:
    head = random_head(**dict.fromkeys(biases, True))
    head.set_attn_implementation(attention)
    embeddings, hidden, positions = inputs()
    wanted = reference(dict(head.state_dict()), head.config, embeddings[0], hidden[0], positions[0])
    # transformers computes angles in float32
    torch.testing.assert_close(head(embeddings, hidden, positions)[0], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_row_by_row_with_a_cache_equals_one_pass(attention: str) -> None:
    head = random_head()
    head.set_attn_implementation(attention)
    embeddings, hidden, positions = inputs()
    wanted = head(embeddings, hidden, positions)
    cache = TreeCache(num_layers=1)
    for row in range(T):
        columns = torch.arange(row + 1)
        cache.prepare(columns[-1:], row + 1)
        mask = additive_mask(columns[None], columns[-1:], None, hidden.dtype)
        part = slice(row, row + 1)
        got = head(embeddings[:, part], hidden[:, part], positions[:, part], mask, cache)
        # transformers computes angles in float32, of several positions at once otherwise than of one
        torch.testing.assert_close(got, wanted[:, part], atol=1e-5, rtol=1e-5)


def test_embedding_first_hidden_second_and_no_input_norm() -> None:
    head = random_head()
    with torch.no_grad():
        for projection in (head.layers[0].self_attn.o_proj, head.layers[0].mlp.down_proj):
            projection.weight.zero_()
        head.fc.weight.copy_(torch.cat([2 * torch.eye(H), 5 * torch.eye(H)], dim=1))
    embeddings, hidden, positions = inputs()
    torch.testing.assert_close(head(embeddings, hidden, positions), 2 * embeddings + 5 * hidden)


def test_tensor_names_are_the_official_ones() -> None:
    assert sorted(random_head(fc_bias=True, qkv_bias=True).state_dict()) == [
        "fc.bias",
        "fc.weight",
        "layers.0.mlp.down_proj.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.post_attention_layernorm.weight",
        "layers.0.self_attn.k_proj.bias",
        "layers.0.self_attn.k_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.0.self_attn.q_proj.bias",
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.v_proj.bias",
        "layers.0.self_attn.v_proj.weight",
    ]


def test_round_trip(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    head = random_head(
        dtype=torch.float32,
        rope_parameters=rope,
        qkv_bias=True,
        target="org/model",
        expected_acceptance={"math": 4.0},
    )
    head.save_pretrained(tmp_path)
    again = EagleHead.from_pretrained(tmp_path)
    x = inputs(torch.float32)
    assert torch.equal(head(*x), again(*x))
    assert again.config.target == "org/model"
    assert again.config.expected_acceptance == {"math": 4.0}


def test_a_partial_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    random_head(dtype=torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = tensors.pop("layers.0.mlp.up_proj.weight")
    save_file(tensors | {"layers.0.extra.weight": lost}, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks layers\.0\.mlp\.up_proj\.weight and also has layers\.0\.extra\.weight"
    ):
        EagleHead.from_pretrained(tmp_path)


def test_half_precision_keeps_the_angles() -> None:
    head = random_head(dtype=torch.float32, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    positions = torch.tensor([[0, 1, 777, 5000]])
    wanted = head.rotary_emb(torch.zeros(1), positions)
    head.to(torch.bfloat16)
    assert head.fc.weight.dtype == torch.bfloat16
    for got, angle in zip(head.rotary_emb(torch.zeros(1), positions), wanted, strict=True):
        assert torch.equal(got, angle)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 500_000.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
        ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
        (
            {"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}},
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "rope_theta": 5e5,
                }
            },
        ),
    ],
    ids=["theta", "default", "linear", "llama3"],
)
def test_both_spellings_of_rope_turn_alike(old: dict[str, object], new: dict[str, object]) -> None:
    positions = torch.arange(201)[None]
    angles = [EagleHead(EagleConfig(**SIZES, **o)).rotary_emb(torch.zeros(1), positions) for o in (old, new)]
    assert torch.equal(angles[0][0], angles[1][0])
    assert torch.equal(angles[0][1], angles[1][1])


def test_linear_scaling_halves_the_angles() -> None:
    positions = torch.arange(100)[None]
    plain = EagleHead(EagleConfig(**SIZES, rope_theta=1000.0))
    scaled = EagleHead(EagleConfig(**SIZES, rope_theta=1000.0, rope_scaling={"type": "linear", "factor": 2.0}))
    torch.testing.assert_close(
        scaled.rotary_emb(torch.zeros(1), 2 * positions)[0], plain.rotary_emb(torch.zeros(1), positions)[0]
    )


@pytest.mark.parametrize("kind", ["spiral", "dynamic", "longrope"])
def test_unknown_rope_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        EagleConfig(**SIZES, rope_scaling={"rope_type": kind, "factor": 2.0})


def test_more_than_one_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="one layer"):
        EagleConfig(**SIZES, num_hidden_layers=2)
