"""Every family that can take a tree of drafts writes plain `generate`'s text; the others are refused."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedModel

from tests.doubles import SCRIPTS, plain, scripted, speculate
from tests.models.families import REFUSED, REFUSED_BY_CHECK, SERVED, from_config, head_for, make
from tests.test_refusals import refused

PROMPT_LENGTH, NUM_NEW = 13, 24  # both longer than the windows of 8 tokens
SEEDS = (4, 3, 5)  # even: sdpa, odd: eager


def prompt_of(seed: int) -> Tensor:
    return torch.randint(2, 90, (1, PROMPT_LENGTH), generator=torch.Generator().manual_seed(seed))


@functools.cache
def target(family: str, seed: int) -> PreTrainedModel:
    return make(family, seed=seed, attention="eager" if seed % 2 else "sdpa")


@functools.cache
def written(family: str, seed: int) -> Tensor:
    return plain(target(family, seed), prompt_of(seed), max_new_tokens=NUM_NEW)


@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])])
@pytest.mark.parametrize("family", SERVED)
def test_text_is_that_of_the_family(family: str, seed: int) -> None:
    model, expected = target(family, seed), written(family, seed)
    head = head_for(model, seed)
    for name in ("last_branch_right", "alternately_right"):
        with scripted(SCRIPTS[name], expected):
            output = speculate(
                model, prompt_of(seed), drafter=head, max_new_tokens=NUM_NEW, return_dict_in_generate=True
            )
        assert output.sequences.tolist() == expected.tolist()
        assert output.stats[0].acceptance_length > 2
    output = speculate(model, prompt_of(seed), drafter=head, max_new_tokens=5)
    assert output.tolist() == expected[:, : PROMPT_LENGTH + 5].tolist()


@pytest.mark.parametrize("family", SERVED)
def test_text_depends_on_tokens_far_back(family: str) -> None:
    """Otherwise a lost or misplaced row of the cache would go unseen."""
    other = prompt_of(SEEDS[0])
    other[0, 3] = (other[0, 3] + 7) % 90  # ten tokens before the end: beyond one window, within two
    assert plain(target(family, SEEDS[0]), other, max_new_tokens=NUM_NEW)[0, PROMPT_LENGTH:].tolist() != (
        written(family, SEEDS[0])[0, PROMPT_LENGTH:].tolist()
    )


@pytest.mark.parametrize(("kind", "fields", "words"), REFUSED.values(), ids=REFUSED)
def test_family_whose_configuration_says_no(kind: str, fields: dict[str, Any], words: str) -> None:
    model = from_config(AutoConfig.for_model(kind, **fields))
    with refused(model, type(model).__name__, words, "all generate without custom_generate"):
        speculate(model, prompt_of(0), drafter=head_for(make("llama")), max_new_tokens=3)


@pytest.mark.parametrize(("kind", "fields", "words"), REFUSED_BY_CHECK.values(), ids=REFUSED_BY_CHECK)
def test_family_whose_tree_is_not_its_text(kind: str, fields: dict[str, Any], words: str) -> None:
    model = from_config(AutoConfig.for_model(kind, **fields))
    with pytest.raises(ValueError, match=rf"{type(model).__name__} .*{words}.*Call generate without custom_generate"):
        speculate(model, prompt_of(0), drafter=head_for(make("llama")), max_new_tokens=3)


def test_encoder_decoder() -> None:
    sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = AutoConfig.for_model("t5", **sizes, decoder_start_token_id=0)
    model = AutoModelForSeq2SeqLM.from_config(config)
    with refused(model, "T5ForConditionalGeneration", "encoder-decoder", "without custom_generate"):
        speculate(model, prompt_of(0), drafter=head_for(make("llama")), max_new_tokens=3)


def test_pictures_are_refused() -> None:
    model = make("gemma3")
    with refused(model, "pixel_values", "text alone", "without custom_generate"):
        speculate(
            model,
            torch.tensor([[3, 96, 96, 96, 96, 5]]),
            pixel_values=torch.zeros(1, 3, 28, 28),
            drafter=head_for(model),
            max_new_tokens=3,
        )
