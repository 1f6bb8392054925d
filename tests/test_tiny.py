"""The tiny targets are worth testing with: their text depends on all that they may see."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from tests.tiny import TINY_MODELS, tiny_gemma2, tiny_llama, tiny_mistral

NUM_PROMPTS = 8
PROMPT_LENGTH = 12
NUM_NEW_TOKENS = 40


def random_prompts(model: PreTrainedModel, length: int = PROMPT_LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (NUM_PROMPTS, length), generator=generator)


def with_other_token(prompts: torch.Tensor, position: int, vocab_size: int) -> torch.Tensor:
    changed = prompts.clone()
    changed[:, position] = (changed[:, position] + vocab_size // 2) % vocab_size
    return changed


def greedy(model: PreTrainedModel, prompts: torch.Tensor, num_tokens: int = NUM_NEW_TOKENS) -> list[list[int]]:
    output = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=num_tokens, do_sample=False
    )
    return output[:, prompts.shape[1] :].tolist()


def share_changed(model: PreTrainedModel, prompts: torch.Tensor, position: int, num_tokens: int) -> float:
    """Share of prompts whose greedy text differs after the token at `position` was replaced."""
    others = with_other_token(prompts, position, model.config.vocab_size)
    pairs = zip(greedy(model, prompts, num_tokens), greedy(model, others, num_tokens), strict=True)
    return sum(text != other for text, other in pairs) / NUM_PROMPTS


def has_period(text: list[int], period: int) -> bool:
    return text[period:] == text[:-period]


def test_first_token_changes_the_text(tiny_target: PreTrainedModel) -> None:
    assert share_changed(tiny_target, random_prompts(tiny_target), position=0, num_tokens=12) >= 0.75


def test_text_is_varied(tiny_target: PreTrainedModel) -> None:
    for text in greedy(tiny_target, random_prompts(tiny_target)):
        assert len(text) == NUM_NEW_TOKENS
        assert len(set(text)) >= 12
        assert not any(has_period(text[NUM_NEW_TOKENS // 2 :], period) for period in range(1, 10))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_text_is_the_same_in_float64(name: str) -> None:
    single, double = TINY_MODELS[name](), TINY_MODELS[name](dtype=torch.float64)
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    prompts = random_prompts(single)
    assert greedy(double, prompts) == greedy(single, prompts)


@pytest.mark.parametrize("name", sorted(TINY_MODELS.keys() - {"gemma2"}))  # eager alone caps Gemma-2's scores
def test_text_is_the_same_with_every_attention_implementation(name: str) -> None:
    eager, sdpa = (TINY_MODELS[name](attn_implementation=which) for which in ("eager", "sdpa"))
    assert (eager.config._attn_implementation, sdpa.config._attn_implementation) == ("eager", "sdpa")
    prompts = random_prompts(eager)
    assert greedy(eager, prompts) == greedy(sdpa, prompts)


def test_nothing_ends_the_text(tiny_target: PreTrainedModel) -> None:
    assert tiny_target.generation_config.eos_token_id is None
    assert tiny_target.config.eos_token_id is None


def test_window_is_seen_to_its_edge_and_no_further() -> None:
    model = tiny_mistral(window=6)
    reach = model.config.num_hidden_layers * (6 - 1)
    prompts = random_prompts(model, length=reach + 4)
    last = prompts.shape[1] - 1

    assert share_changed(model, prompts, position=last - 5, num_tokens=1) >= 0.5
    assert share_changed(model, prompts, position=last - reach - 1, num_tokens=NUM_NEW_TOKENS) == 0


def test_window_is_an_argument() -> None:
    prompts = random_prompts(tiny_mistral())
    assert greedy(tiny_mistral(window=4), prompts) != greedy(tiny_mistral(window=8), prompts)


def test_qwen2_has_biases(tiny_qwen2: PreTrainedModel) -> None:
    biases = {name: bias for name, bias in tiny_qwen2.named_parameters() if name.endswith("bias")}
    assert len(biases) == 3 * tiny_qwen2.config.num_hidden_layers
    assert all(bias.abs().min() > 0 for bias in biases.values())


@pytest.mark.parametrize("cap", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_gemma2_caps_bite(cap: str) -> None:
    capped, uncapped = tiny_gemma2(), tiny_gemma2()
    setattr(uncapped.config, cap, None)
    for module in uncapped.modules():
        if hasattr(module, cap):
            setattr(module, cap, None)
    prompts = random_prompts(capped)
    with torch.no_grad():
        assert (capped(prompts).logits - uncapped(prompts).logits).abs().max() > 0.1


def test_gemma_mixes_layer_types_and_ties_its_embeddings(
    tiny_gemma2: PreTrainedModel, tiny_gemma3: PreTrainedModel
) -> None:
    for model in (tiny_gemma2, tiny_gemma3):
        assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_seed_decides_the_weights() -> None:
    state = torch.random.get_rng_state()
    first, again, other = tiny_llama(), tiny_llama(), tiny_llama(seed=1)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert torch.equal(torch.random.get_rng_state(), state)
