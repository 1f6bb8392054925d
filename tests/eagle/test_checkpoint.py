"""The layouts that people have: read exactly, or refused by name; and which head belongs to which target."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from microspec_hf.eagle import EagleConfig, EagleHead, check_pair, load_drafter
from tests.eagle.heads import SIZES, random_head

H, V = SIZES["hidden_size"], SIZES["vocab_size"]
OFFICIAL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rope_theta": 5000.0,
    **SIZES,
}


def official(folder: Path, head: EagleHead, pickled: bool = False, **changes: Any) -> dict[str, Tensor]:
    """Write a head as the EAGLE authors do, with a copy of the embeddings; returns what was written."""
    config = {name: value for name, value in (OFFICIAL | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    tensors["embed_tokens.weight"] = torch.randn(V, H)
    write(folder, tensors, pickled)
    return tensors


def write(folder: Path, tensors: dict[str, Tensor], pickled: bool = False) -> None:
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


def load(source: str | Path | EagleHead) -> EagleHead:
    return load_drafter(source, torch.float32, "cpu")


def outputs(head: EagleHead) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    embeddings, hidden = torch.randn(2, 1, 7, H, generator=generator)
    return head(embeddings, hidden, torch.arange(7)[None])


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize(
    "biases",
    [(), ("fc_bias",), ("qkv_bias",), ("fc_bias", "qkv_bias"), ("o_bias", "mlp_bias")],
    ids=["none", "fc", "qkv", "qwen2", "o-mlp"],
)
def test_official_layout(tmp_path: Path, pickled: bool, biases: tuple[str, ...]) -> None:
    head = random_head(dtype=torch.float32, rope_theta=5000.0, **dict.fromkeys(biases, True))
    official(tmp_path, head, pickled)
    loaded = load(tmp_path)
    assert torch.equal(outputs(loaded), outputs(head))
    assert not loaded.training
    assert [name for name in ("fc_bias", "qkv_bias", "o_bias", "mlp_bias") if getattr(loaded.config, name)] == sorted(
        biases, key=["fc_bias", "qkv_bias", "o_bias", "mlp_bias"].index
    )


def test_rope_of_the_drafters_own_config(tmp_path: Path) -> None:
    head = random_head(dtype=torch.float32, rope_theta=5000.0)
    tensors = official(tmp_path, head)
    old = outputs(load(tmp_path))
    new_spelling = OFFICIAL | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    del new_spelling["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(new_spelling))
    assert torch.equal(outputs(load(tmp_path)), old)
    official(tmp_path, head, rope_theta=None)
    assert load(tmp_path).config.rope_parameters["rope_theta"] == 10_000.0
    assert not torch.equal(outputs(load(tmp_path)), old)
    assert tensors


def test_head_dim_and_kv_heads_may_be_left_to_the_shapes(tmp_path: Path) -> None:
    head = random_head(dtype=torch.float32, rope_theta=5000.0, head_dim=8)
    official(tmp_path, head, head_dim=None, num_key_value_heads=None)
    assert torch.equal(outputs(load(tmp_path)), outputs(head))


def test_shards(tmp_path: Path) -> None:
    head = random_head(dtype=torch.float32, rope_theta=5000.0)
    tensors = official(tmp_path, head)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:4], names[4:])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(outputs(load(tmp_path)), outputs(head))
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-1\.safetensors"):
        load(tmp_path)


def test_ignored_tensors_are_the_known_ones(tmp_path: Path) -> None:
    head = random_head(dtype=torch.float32, rope_theta=5000.0)
    tensors = official(tmp_path, head)
    extras = {"lm_head.weight": torch.randn(V, H), "rotary_emb.inv_freq": torch.randn(3)}
    write(tmp_path, tensors | extras)
    assert torch.equal(outputs(load(tmp_path)), outputs(head))
    write(tmp_path, tensors | {"layers.0.input_layernorm.weight": torch.ones(H)})
    with pytest.raises(ValueError, match=r"also has layers\.0\.input_layernorm\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    "lost",
    ["layers.0.mlp.down_proj.weight", "layers.0.self_attn.k_proj.weight", "layers.0.self_attn.v_proj.bias"],
)
def test_missing_tensors_are_named(tmp_path: Path, lost: str) -> None:
    tensors = official(tmp_path, random_head(dtype=torch.float32, qkv_bias=True))
    del tensors[lost]
    write(tmp_path, tensors)
    with pytest.raises(ValueError, match=f"lacks {lost}"):
        load(tmp_path)


@pytest.mark.parametrize("wrong", [{"num_key_value_heads": 4}, {"intermediate_size": 41}, {"hidden_size": 34}])
def test_config_that_contradicts_the_shapes(tmp_path: Path, wrong: dict[str, int]) -> None:
    official(tmp_path, random_head(dtype=torch.float32), **wrong)
    with pytest.raises(ValueError, match="belong to different heads"):
        load(tmp_path)


@pytest.mark.parametrize("absent", ["num_attention_heads", "vocab_size"])
def test_config_without_a_needed_entry(tmp_path: Path, absent: str) -> None:
    official(tmp_path, random_head(dtype=torch.float32), **{absent: None})
    with pytest.raises(ValueError, match=absent):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "tensors", "named"),
    [
        ({"speculators_model_type": "eagle3"}, {}, "speculators checkpoint"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40}, {}, "SpecForge EAGLE-3"),
        ({"draft_vocab_size": 40}, {}, "an EAGLE-3 checkpoint"),
        ({}, {"fc.weight": (H, 3 * H), "midlayer.mlp.up_proj.weight": (40, H)}, "EAGLE-3"),
        ({}, {"fc.weight": (H, 3 * H), "layers.0.mlp.up_proj.weight": (40, H)}, "three hidden states"),
        (
            {},
            {"fusion_fc.weight": (H, 2 * H), "transformer.mlp.up_proj.weight": (40, H)},
            "speculators EAGLE-1",
        ),
        ({}, {"0.0.linear.weight": (H, H)}, r"not known \(its tensors: 0\.0\.linear\.weight\)"),
        ({}, {"fc.weight": (H, 2 * H)}, "not known"),
    ],
    ids=[
        "speculators",
        "specforge",
        "eagle3-config",
        "midlayer",
        "three-hidden",
        "eagle1-speculators",
        "medusa",
        "fc",
    ],
)
def test_other_layouts_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, tuple[int, ...]], named: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OFFICIAL | config))
    write(tmp_path, {name: torch.zeros(shape) for name, shape in tensors.items()} or {"d2t": torch.zeros(1)})
    with pytest.raises(ValueError, match=named):
        load(tmp_path)


class Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["MICROSPEC_TEST_TRAP"],)


def test_a_hostile_pickle_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = tmp_path / "trap"
    monkeypatch.setenv("MICROSPEC_TEST_TRAP", str(trap))
    (tmp_path / "config.json").write_text(json.dumps(OFFICIAL))
    file = tmp_path / "pytorch_model.bin"
    for save in (
        lambda: torch.save({"fc.weight": Hostile()}, file),
        lambda: file.write_bytes(pickle.dumps(Hostile())),
    ):
        save()
        with pytest.raises(ValueError, match=r"was refused.*Nothing of it was run"):
            load(tmp_path)
        assert not trap.exists()
    pickle.loads(file.read_bytes())
    assert trap.exists()  # the trap works


def test_a_pickle_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OFFICIAL))
    torch.save([1, 2, 3], tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="a dict of tensors, got list"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_damaged_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(OFFICIAL))
    (tmp_path / name).write_bytes(b"not a checkpoint at all")
    with pytest.raises(ValueError, match=name):
        load(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json was not found"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(OFFICIAL))
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="got list"):
        load(tmp_path)


@pytest.mark.parametrize("source", ["no/such-drafter", "./no-such-folder", "not a name"])
def test_a_source_that_does_not_exist(source: str) -> None:
    with pytest.raises(ValueError, match="No drafter could be read"):
        load(source)


def test_our_own_layout(tmp_path: Path) -> None:
    head = random_head(dtype=torch.float32, target="org/model")
    head.save_pretrained(tmp_path)
    loaded = load_drafter(str(tmp_path), torch.bfloat16, "cpu")
    assert loaded.fc.weight.dtype == torch.bfloat16
    assert loaded.rotary_emb.inv_freq.dtype == torch.float32
    assert loaded.config.target == "org/model"
    assert torch.equal(outputs(load(tmp_path)), outputs(head))


def test_a_head_is_copied_only_when_it_must_change() -> None:
    head = random_head(dtype=torch.float32)
    assert load(head) is head
    half = load_drafter(head, torch.bfloat16, "cpu")
    assert half is not head
    assert half.fc.weight.dtype == torch.bfloat16
    assert head.fc.weight.dtype == torch.float32


def target_config(**changes: Any) -> EagleConfig:
    return EagleConfig(**(SIZES | changes))


def test_a_fitting_pair() -> None:
    check_pair(random_head(), target_config(), "")
    check_pair(random_head(target="org/Model-1B"), target_config(), "mirror/model-1b")


@pytest.mark.parametrize(("name", "value"), [("hidden_size", 64), ("vocab_size", 97)])
def test_a_pair_of_different_sizes(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{SIZES[name]}.*{value}.*org/model"):
        check_pair(random_head(target="org/model"), target_config(**{name: value}), "somewhere")


def test_a_pair_of_different_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = random_head(target="org/model-1b")
    with pytest.raises(ValueError, match=r"org/model-1b.*other/model-3b"):
        check_pair(head, target_config(), "other/model-3b")
    monkeypatch.chdir(tmp_path)
    Path("other/model-3b").mkdir(parents=True)
    check_pair(head, target_config(), "other/model-3b")  # a folder may be called anything
    check_pair(head, target_config(), str(tmp_path))
    check_pair(random_head(target=None), target_config(), "org/anything")
