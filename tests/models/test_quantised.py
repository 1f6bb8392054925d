"""Quantised targets compute with their modules as they are; the drafter reads dequantised rows of their heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig

from microspec_hf.hf import Target
from tests.doubles import SCRIPTS, plain, scripted, speculate
from tests.models.families import head_for, make
from tests.test_refusals import refused

PROMPT = torch.randint(2, 90, (1, 13), generator=torch.Generator().manual_seed(3))
# Multiples of the blocks that the quantised kernels want.
SIZES: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
VOCABULARIES: list[Any] = ["full", "dynamic", {"kind": "static", "token_ids": tuple(range(0, 97, 2))}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantised")
    make("llama", seed=3, **SIZES).save_pretrained(path)
    return path


def load(folder: Path, quantization: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, device_map="cpu").eval()


def assert_same(model: PreTrainedModel) -> Tensor:
    expected = plain(model, PROMPT, max_new_tokens=20)
    head = head_for(model)
    for script in ("last_branch_right", "alternately_right"):
        with scripted(SCRIPTS[script], expected):
            output = speculate(model, PROMPT, drafter=head, max_new_tokens=20, return_dict_in_generate=True)
        assert output.sequences.tolist() == expected.tolist()
        assert output.stats[0].acceptance_length > 2
    for vocabulary in VOCABULARIES:
        got = speculate(model, PROMPT, drafter=head, max_new_tokens=4, microspec={"vocabulary": vocabulary})
        assert got.tolist() == expected[:, : 13 + 4].tolist()
    return expected


@torch.no_grad()
def head_and_its_rows(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """The model's logits at some ids, and those of the rows that the drafter reads."""
    target, ids = Target(model), torch.tensor([7, 96, 3, 7])
    output = model(PROMPT, output_hidden_states=True)
    rows = target.head.rows(ids)
    assert rows.dtype == target.head.dtype == target.dtype
    return output.logits[0][:, ids], target.head.project(output.hidden_states[-1][0], rows, None)


# torchao -----------------------------------------------------------------------------------------------------------


def int8_weights(**options: Any) -> TorchAoConfig:
    quantization = pytest.importorskip("torchao.quantization")
    return TorchAoConfig(quantization.Int8WeightOnlyConfig(), **options)


def test_int8_layers(folder: Path) -> None:
    model = load(folder, int8_weights())
    assert type(model.model.layers[0].mlp.up_proj.weight.data) is not Tensor
    text = assert_same(model)
    assert text.tolist() != plain(make("llama", seed=3, **SIZES), PROMPT, max_new_tokens=20).tolist()


def test_int8_head_is_dequantised_by_rows(folder: Path) -> None:
    model = load(folder, int8_weights(modules_to_not_convert=["none"]))
    weight = model.lm_head.weight.data
    assert type(weight) is not Tensor
    torch.testing.assert_close(*head_and_its_rows(model), rtol=1e-4, atol=1e-4)
    dequantised: list[int] = []
    dequantise = type(weight).dequantize

    def noted(self: Tensor, *arguments: Any) -> Tensor:
        dequantised.append(len(self))
        return dequantise(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(weight), "dequantize", noted)
        rows = Target(model).head.rows(torch.tensor([7, 96, 3, 7]))
    assert max(dequantised) == 4
    torch.testing.assert_close(rows, weight.dequantize()[[7, 96, 3, 7]])
    assert_same(model)


def test_int8_embeddings(folder: Path) -> None:
    assert_same(load(folder, int8_weights(include_input_output_embeddings=True)))


def test_head_without_single_rows_is_refused() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = make("llama", seed=3, **SIZES)
    quantization.quantize_(model.lm_head, quantization.Float8WeightOnlyConfig())
    with refused(model, "LM head", "read one by one"):
        speculate(model, PROMPT, drafter=head_for(model), max_new_tokens=3)


# bitsandbytes ------------------------------------------------------------------------------------------------------


def bits(**options: Any) -> BitsAndBytesConfig:
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(**options)


FOUR: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}


@pytest.mark.parametrize(
    "options", [{"bnb_4bit_quant_type": "fp4"}, {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}]
)
def test_4bit_layers(folder: Path, options: dict[str, Any]) -> None:
    assert_same(load(folder, bits(**FOUR, **options)))


def test_4bit_head_is_refused(folder: Path) -> None:
    model = load(folder, bits(**FOUR, llm_int8_skip_modules=["none"]))
    with refused(model, "Linear4bit", "read one by one", 'llm_int8_skip_modules=["lm_head"]'):
        speculate(model, PROMPT, drafter=head_for(model), max_new_tokens=3)


def test_8bit_layers_whose_tokens_depend_on_one_another_are_noticed(folder: Path) -> None:
    """LLM.int8 rounds activations, and looks for outliers over all tokens of a pass: a tree is not its texts."""
    model = load(folder, bits(load_in_8bit=True))
    with pytest.raises(ValueError, match="computes other logits for a tree"):
        speculate(model, PROMPT, drafter=head_for(model), max_new_tokens=3)


def test_8bit_head(folder: Path) -> None:
    model = load(folder, bits(load_in_8bit=True, llm_int8_skip_modules=["model"]))
    assert type(model.lm_head).__name__ == "Linear8bitLt"
    logits, own = head_and_its_rows(model)
    torch.testing.assert_close(own, logits, rtol=0.05, atol=0.05 * float(logits.abs().max()))  # activations are rounded
    assert_same(model)
