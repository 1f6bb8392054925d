"""Heads of every kind: tied and untied, with bias, scale and soft-cap, with more rows than the tokenizer has ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from microspec_hf.hf import Target
from tests.doubles import SCRIPTS, plain, scripted, speculate
from tests.models.families import SERVED, head_for, make

PROMPT = torch.randint(2, 90, (1, 13), generator=torch.Generator().manual_seed(3))
VOCABULARIES: dict[str, Any] = {
    "full": "full",
    "static": {"kind": "static", "token_ids": tuple(range(0, 97, 2))},
    "dynamic": {"kind": "dynamic", "max_rows": 40},
}

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "bias": ("phi", {}),
    "scale, tied": ("cohere", {}),
    "scale": ("granite", {"tie_word_embeddings": False}),
    "soft-cap, tied": ("gemma2", {"final_logit_softcapping": 3.0}),
    "soft-cap": ("gemma2", {"final_logit_softcapping": 3.0, "tie_word_embeddings": False}),
    "learned positions, tied": ("gpt2", {}),
}


def padded(family: str, fields: dict[str, Any], seed: int = 3) -> PreTrainedModel:
    """Rows up to a multiple of 64, as `resize_token_embeddings` leaves them; one of them scores high."""
    model = make(family, seed=seed, attention="eager", **fields)
    with torch.random.fork_rng(devices=[]):
        model.resize_token_embeddings(97, pad_to_multiple_of=64, mean_resizing=False)
    assert model.get_output_embeddings().weight.shape[0] == 128
    return model.eval()


def assert_same(model: PreTrainedModel) -> list[int]:
    expected = plain(model, PROMPT, max_new_tokens=16)
    head = head_for(model)
    for vocabulary in VOCABULARIES.values():
        ask: dict[str, Any] = {"drafter": head, "microspec": {"vocabulary": vocabulary}}
        with scripted(SCRIPTS["last_branch_right"], expected):
            output = speculate(model, PROMPT, max_new_tokens=16, return_dict_in_generate=True, **ask)
        assert output.sequences.tolist() == expected.tolist()
        assert output.stats[0].acceptance_length > 4
        assert speculate(model, PROMPT, max_new_tokens=4, **ask).tolist() == expected[:, : 13 + 4].tolist()
    return expected[0, 13:].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("family", "fields"), HEADS.values(), ids=HEADS)
def test_text_with_every_kind_of_head(family: str, fields: dict[str, Any]) -> None:
    model = make(family, seed=3, attention="eager", **fields)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert is_tied == ("tied" in next(name for name, head in HEADS.items() if head == (family, fields)).split(", "))
    assert_same(model)


@pytest.mark.parametrize(("family", "fields"), HEADS.values(), ids=HEADS)
def test_text_with_a_padded_vocabulary(family: str, fields: dict[str, Any]) -> None:
    assert_same(padded(family, fields))


def test_ids_beyond_the_tokenizer_are_written_where_the_target_writes_them() -> None:
    model = padded("llama", {})
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[100] = 1.5 * head[int(plain(model, PROMPT, max_new_tokens=1)[0, -1])]
    assert 100 in assert_same(model)


@pytest.mark.parametrize("family", SERVED)
@torch.no_grad()
def test_rows_give_the_logits_of_the_model(family: str) -> None:
    """The function over chosen rows is the model's own: bias, scale and soft-cap included."""
    model = make(family, seed=3, attention="eager")
    target, ids = Target(model), torch.tensor([7, 3, 96, 3])
    output = model(PROMPT, output_hidden_states=True)
    hidden = output.hidden_states[-1][0]
    torch.testing.assert_close(target.head(hidden), output.logits[0])
    bias = None if target.head.bias is None else target.head.bias[ids]
    own = target.head.project(hidden, target.head.rows(ids), bias)
    torch.testing.assert_close(own, output.logits[0][:, ids], rtol=1e-4, atol=1e-4)
