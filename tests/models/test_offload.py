"""Targets whose layers accelerate keeps in the memory of the host or on a disk, and brings in for each pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from microspec_hf.hf import Target
from tests.doubles import SCRIPTS, plain, scripted, speculate
from tests.models.families import head_for, make

PROMPT = torch.randint(2, 90, (1, 13), generator=torch.Generator().manual_seed(3))
VOCABULARIES: list[Any] = ["full", "dynamic", {"kind": "static", "token_ids": tuple(range(0, 97, 2))}]


def assert_same(model: PreTrainedModel, original: PreTrainedModel) -> None:
    expected = plain(original, PROMPT, max_new_tokens=16)
    assert plain(model, PROMPT, max_new_tokens=16).tolist() == expected.tolist()
    with scripted(SCRIPTS["last_branch_right"], expected):
        output = speculate(model, PROMPT, drafter=head_for(original), max_new_tokens=16, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist()
    assert output.stats[0].acceptance_length > 2
    for vocabulary in VOCABULARIES:
        ask: dict[str, Any] = {"max_new_tokens": 4, "microspec": {"vocabulary": vocabulary}}
        got, alike = (
            speculate(m, PROMPT, drafter=head_for(original), return_dict_in_generate=True, **ask)
            for m in (model, original)
        )
        assert got.sequences.tolist() == expected[:, : 13 + 4].tolist()
        assert got.stats[0].emitted == alike.stats[0].emitted  # the drafter reads the same rows


@pytest.mark.parametrize("family", ["llama", "phi", "gemma3_text", "gpt2"])  # a head bias; tied heads
def test_everything_in_the_memory_of_the_host(family: str) -> None:
    model = accelerate.cpu_offload(make(family, seed=3, attention="eager"), execution_device=torch.device("cpu"))
    assert model.get_output_embeddings().weight.is_meta
    assert Target(model).device == Target(model).head.device == torch.device("cpu")
    assert_same(model, make(family, seed=3, attention="eager"))


def test_everything_on_a_disk(tmp_path: Path) -> None:
    model = accelerate.disk_offload(make("phi", seed=3), tmp_path, execution_device=torch.device("cpu"))
    assert_same(model, make("phi", seed=3))


@pytest.mark.parametrize("head", ["cpu", "disk"])
@pytest.mark.parametrize("layers", [("cpu", "disk"), ("disk", "cpu")], ids=str)
def test_device_map(tmp_path: Path, layers: tuple[str, str], head: str) -> None:
    original = make("llama", seed=3)
    original.save_pretrained(tmp_path / "model")
    places = {
        "model.embed_tokens": "cpu",
        "model.layers.0": layers[0],
        "model.layers.1": layers[1],
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": head,
    }
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
    )
    assert any(parameter.is_meta for parameter in model.parameters())
    assert_same(model, original)


@pytest.mark.parametrize("head", ["cpu", "disk"])
def test_rows_of_an_offloaded_head(tmp_path: Path, head: str) -> None:
    original = make("phi", seed=3)
    whole = original.get_output_embeddings()
    if head == "cpu":
        model = accelerate.cpu_offload(make("phi", seed=3), execution_device=torch.device("cpu"))
    else:
        model = accelerate.disk_offload(make("phi", seed=3), tmp_path, execution_device=torch.device("cpu"))
    ids = torch.tensor([5, 96, 5, 0])
    found = Target(model).head
    assert found.rows(ids).tolist() == whole.weight[ids].tolist()
    assert found.bias is not None
    assert found.bias.tolist() == whole.bias.tolist()
