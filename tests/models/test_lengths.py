"""Short and long texts: one token, thousands, and texts that reach the end of what a model has positions for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from microspec_hf.hf import Target
from microspec_hf.tree import DraftTree
from tests.doubles import SCRIPTS, plain, scripted, speculate
from tests.models.families import SERVED, head_for, make
from tests.test_refusals import refused

DRAFTERS = ["perfect", "last_branch_right", "alternately_right"]


def prompt_of(length: int, seed: int = 3) -> Tensor:
    return torch.randint(2, 90, (1, length), generator=torch.Generator().manual_seed(seed))


def assert_same(model: PreTrainedModel, prompt: Tensor, script: str, chunk: int = 512, **arguments: Any) -> float:
    """Plain and speculative text agree. Returns the acceptance length."""
    expected = plain(model, prompt, **arguments)
    with scripted(SCRIPTS[script], expected):
        output = speculate(
            model,
            prompt,
            drafter=head_for(model),
            return_dict_in_generate=True,
            microspec={"prefill_chunk": chunk},
            **arguments,
        )
    assert output.sequences.tolist() == expected.tolist()
    return float(output.stats[0].acceptance_length)


@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma3_text", "phi3", "deepseek_v3", "gpt_oss", "qwen2_vl"])
def test_prompt_of_one_token(family: str) -> None:
    model = make(family, seed=3, attention="eager")
    assert assert_same(model, prompt_of(1), "last_branch_right", max_new_tokens=14) > 4
    assert assert_same(model, prompt_of(1), "nothing", max_new_tokens=3) == 1


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"max_position_embeddings": 8300}),
        ("gemma3_text", {"max_position_embeddings": 8300}),
        pytest.param("gpt2", {"n_positions": 8300}, marks=pytest.mark.slow),
    ],
)
def test_prompt_of_8000_tokens(family: str, fields: dict[str, int]) -> None:
    """Read in chunks; the drafter was made for 128 positions."""
    model, prompt = make(family, seed=3, **fields), prompt_of(8000)
    head = head_for(model)
    head.config.max_position_embeddings = 128
    expected = plain(model, prompt, max_new_tokens=9)
    with scripted(SCRIPTS["alternately_right"], expected):
        output = speculate(model, prompt, drafter=head, max_new_tokens=9)
    assert output.tolist() == expected.tolist()


def test_text_beyond_the_positions_of_the_drafter() -> None:
    model, prompt = make("llama", seed=3), prompt_of(13)
    head = head_for(model)
    head.config.max_position_embeddings = 16
    output = speculate(model, prompt, drafter=head, max_new_tokens=30)
    assert output.tolist() == plain(model, prompt, max_new_tokens=30).tolist()


# The end of the positions ------------------------------------------------------------------------------------------

LEARNED = ["gpt2", "opt", "gptj", "codegen", "gpt_bigcode"]
"""Families with a table of 64 positions: a text of 65 tokens is the longest, since its last token is never fed."""


@pytest.mark.parametrize("script", DRAFTERS)
@pytest.mark.parametrize("family", ["gpt2", "opt", *(pytest.param(f, marks=pytest.mark.slow) for f in LEARNED[2:])])
def test_text_up_to_the_last_learned_position(family: str, script: str) -> None:
    model = make(family, seed=4)
    for prompt_length in (40, 59, 63, 64):
        acceptance = assert_same(model, prompt_of(prompt_length), script, max_length=65)
        if prompt_length == 40 and script != "alternately_right":
            assert acceptance > 4  # trees are cut at the end only


@pytest.mark.parametrize("family", LEARNED)
def test_real_trees_up_to_the_last_learned_position(family: str) -> None:
    model, prompt = make(family, seed=4), prompt_of(50)
    expected = plain(model, prompt, max_length=65)
    for vocabulary in ("full", "dynamic"):
        output = speculate(model, prompt, drafter=head_for(model), max_length=65, microspec={"vocabulary": vocabulary})
        assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("family", LEARNED)
def test_text_beyond_the_last_learned_position_fails_as_plain_does(family: str) -> None:
    model, prompt = make(family, seed=4), prompt_of(60)
    errors = []
    for decode in (plain, speculate):
        with pytest.raises((IndexError, RuntimeError)) as caught:
            decode(model, prompt, max_length=66, **({"drafter": head_for(model)} if decode is speculate else {}))
        errors.append((caught.type, str(caught.value)))
    assert errors[0][0] == errors[1][0]


def test_text_that_stops_before_the_last_learned_position() -> None:
    model, prompt = make("gpt2", seed=4), prompt_of(58)
    text = plain(model, prompt, max_length=65)
    stop = int(text[0, 63])
    assert_same(model, prompt, "perfect", max_length=100, eos_token_id=stop, pad_token_id=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "phi3", "glm4"])
def test_rotary_positions_end_nowhere(family: str) -> None:
    model = make(family, seed=3, attention="eager", max_position_embeddings=24)
    assert Target(model).position_limit is None
    for script in DRAFTERS:
        assert_same(model, prompt_of(13), script, max_new_tokens=30)


# Angles that depend on the length of the text ----------------------------------------------------------------------

LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [3.0, 5.0, 8.0, 12.0],
    "original_max_position_embeddings": 24,
    "factor": 4.0,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def phi3_long() -> PreTrainedModel:
    fields = {"rope_parameters": {**LONG, "partial_rotary_factor": 1.0}, "original_max_position_embeddings": 24}
    return make("phi3", seed=3, max_position_embeddings=96, **fields)


def llama_dynamic() -> PreTrainedModel:
    return make("llama", seed=3, max_position_embeddings=24, rope_parameters=DYNAMIC)


@pytest.mark.parametrize("script", DRAFTERS)
@pytest.mark.parametrize("make_model", [phi3_long, llama_dynamic])
def test_text_up_to_the_length_where_the_angles_change(make_model: Any, script: str) -> None:
    """A tree that looks beyond it must not turn the keys of the nodes before it."""
    model = make_model()
    assert Target(model).position_limit == 24
    for length in (5, 20, 23, 24):
        assert_same(model, prompt_of(length), script, max_length=25)


@pytest.mark.parametrize("chunk", [7, 512])
@pytest.mark.parametrize("script", DRAFTERS)
def test_prompt_longer_than_the_length_where_the_angles_change(script: str, chunk: int) -> None:
    model = phi3_long()
    for length in (25, 40):
        assert_same(model, prompt_of(length), script, chunk, max_new_tokens=20)


CHANGING = [(phi3_long, 5, 26), (phi3_long, 24, 90), (llama_dynamic, 5, 26), (llama_dynamic, 30, 40)]


@pytest.mark.parametrize(("make_model", "length", "max_length"), CHANGING)
def test_text_in_which_the_angles_change_is_refused(make_model: Any, length: int, max_length: int) -> None:
    model = make_model()
    words = ("more than 24 tokens", f"{length} tokens", str(max_length), f"at most {max(0, 25 - length)} new tokens")
    with refused(model, type(model).__name__, *words):
        speculate(model, prompt_of(length), drafter=head_for(model), max_length=max_length)


def test_tables_and_angles_are_told_apart() -> None:
    assert {family: Target(make(family, attention="eager")).position_limit for family in SERVED} == {
        family: 64 if family in LEARNED else 2048 if family in ("gpt_neo", "xglm") else None for family in SERVED
    }


def test_a_cut_tree_has_no_nodes_from_the_limit_on() -> None:
    tree = DraftTree.from_parents(torch.tensor([5, 6, 7, 8]), torch.tensor([-1, 0, 1, 0]))
    assert tree.cut(torch.tensor([10]), limit=11).tokens.tolist() == [5, -1, -1, -1]
    assert tree.cut(torch.tensor([10]), limit=12).tokens.tolist() == [5, 6, -1, 8]
    assert tree.cut(torch.tensor([10]), limit=13).tokens.tolist() == [5, 6, 7, 8]
    assert tree.cut(torch.tensor([13]), limit=13).tokens.tolist() == [5, 6, 7, 8]
