"""What is known about transformers' inside: caches, masks, heads, and which models can take a tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    LogitsProcessorList,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from microspec_hf import hf
from microspec_hf.hf import Target, TreeCache, additive_mask, cache_argument, check_tree_pass, processors_of_row
from tests.doubles import alternately_right, last_branch_right, plain, random_prompt, scripted, speculate
from tests.tiny import TINY_MODELS, tiny_gemma2, tiny_llama, tiny_mistral, tiny_qwen2

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GPT_SIZES: dict[str, Any] = {"vocab_size": 61, "bos_token_id": None, "eos_token_id": None}


def randomised(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.5 / parameter.shape[-1] ** 0.5 if parameter.ndim == 2 else 0.3
            noise = scale * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if parameter.ndim == 2 else parameter + noise)
    return model.eval()


def cohere() -> PreTrainedModel:
    return randomised(CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.3)))


def granite() -> PreTrainedModel:
    return randomised(GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0, embedding_multiplier=3.0)))


def phi() -> PreTrainedModel:
    """Its LM head has a bias."""
    return randomised(PhiForCausalLM(PhiConfig(**SIZES)))


def gpt2() -> PreTrainedModel:
    """Learned positions."""
    return randomised(GPT2LMHeadModel(GPT2Config(**GPT_SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=64)))


OTHER_MODELS = {"cohere": cohere, "granite": granite, "phi": phi, "gpt2": gpt2}


def test_cache_argument() -> None:
    def newer(cache: Any = None) -> None: ...

    def older(past_key_values: Any = None) -> None: ...

    assert (cache_argument(newer), cache_argument(older)) == ("cache", "past_key_values")
    assert cache_argument(LlamaForCausalLM.forward) in ("cache", "past_key_values")


# Masks -------------------------------------------------------------------------------------------------------------


def test_mask_is_additive_float_and_never_bool() -> None:
    visible = torch.tensor([[0, 1, -1], [0, -1, 2]])
    mask = additive_mask(visible, torch.tensor([1, 2]), None, torch.float32)
    low = torch.finfo(torch.float32).min
    assert mask.shape == (1, 1, 2, 3)
    assert mask.dtype == torch.float32
    assert mask[0, 0].tolist() == [[0, 0, low], [0, low, 0]]
    assert additive_mask(visible, torch.tensor([1, 2]), None, torch.bfloat16).isfinite().all()


def test_window_counts_positions_and_the_token_itself() -> None:
    visible = torch.tensor([[0, 1, 2, 3, 4, -1]])
    mask = additive_mask(visible, torch.tensor([4]), 3, torch.float32)
    assert (mask[0, 0] == 0).tolist() == [[False, False, True, True, True, False]]


def test_windows_of_layer_types() -> None:
    assert list(Target(tiny_llama()).windows.values()) == [None]
    assert list(Target(tiny_mistral(5)).windows.values()) == [5]
    assert list(Target(tiny_qwen2()).windows.values()) == [None]
    assert Target(tiny_gemma2(7)).windows == {"full_attention": None, "sliding_attention": 7}


# Cache -------------------------------------------------------------------------------------------------------------


def rows(*values: float) -> Tensor:
    return torch.tensor(values).reshape(1, 1, -1, 1)


def test_cache_writes_named_rows_and_shows_a_view() -> None:
    cache = TreeCache(num_layers=2)
    cache.prepare(torch.tensor([[0, 1, 2]]), view=3)
    cache.update(rows(1, 2, 3), rows(4, 5, 6), 0)
    cache.update(rows(7, 8, 9), rows(7, 8, 9), 1)
    cache.length = 2
    cache.prepare(torch.tensor([[4, 2]]), view=5)
    keys, values = cache.update(rows(40, 20), rows(41, 21), 0)
    assert keys.flatten().tolist() == [1, 2, 20, 0, 40]
    assert values.flatten().tolist() == [4, 5, 21, 0, 41]
    assert cache.buffers()[2][0, 0, :5, 0].tolist() == [7, 8, 9, 0, 0]
    assert cache.get_seq_length() == 2


def test_cache_grows_and_keeps_its_rows() -> None:
    cache = TreeCache(num_layers=1)
    cache.reserve(10)
    assert cache.capacity == 64
    cache.prepare(torch.arange(3)[None], view=3)
    cache.update(rows(1, 2, 3), rows(1, 2, 3), 0)
    for view in (65, 100, 300):
        cache.prepare(torch.tensor([[view - 1]]), view)
        keys, _ = cache.update(rows(view), rows(view), 0)
        assert keys.shape[2] == view
        assert keys.flatten()[:3].tolist() == [1, 2, 3]
        assert cache.buffers()[0].shape[2] == cache.capacity >= view
    assert [b.shape[2] for b in cache.buffers()] == [cache.capacity] * 2


# Head --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*TINY_MODELS.values(), *OTHER_MODELS.values()], ids=[*TINY_MODELS, *OTHER_MODELS])
@torch.no_grad()
def test_head_is_the_models_own_function(make: Any) -> None:
    """Scale, bias and soft-capping included, over the whole vocabulary and over chosen rows."""
    model = make()
    target = Target(model)
    prompt = random_prompt(model, 9)
    output = model(prompt, output_hidden_states=True)
    hidden = output.hidden_states[-1][0]
    torch.testing.assert_close(target.head(hidden), output.logits[0])
    chosen = torch.tensor([7, 3, 3, 50])
    bias = None if target.head.bias is None else target.head.bias[chosen]
    torch.testing.assert_close(
        target.head.project(hidden, target.head.weight[chosen], bias), output.logits[0][:, chosen], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("make", OTHER_MODELS.values(), ids=OTHER_MODELS)
def test_other_architectures(make: Any) -> None:
    model = make()
    prompt = random_prompt(model)
    expected = plain(model, prompt, max_new_tokens=20)
    for script in (last_branch_right, alternately_right):
        with scripted(script, expected):
            assert speculate(model, prompt, max_new_tokens=20).tolist() == expected.tolist()


# Models that cannot take a tree ------------------------------------------------------------------------------------


def test_architectures_that_ignore_the_tree_are_refused() -> None:
    gpt_neo = GPTNeoConfig(
        **GPT_SIZES, hidden_size=32, num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=4
    )
    for model, words in (
        (GPTNeoForCausalLM(gpt_neo), "keeps attention windows of its own"),
        (BloomForCausalLM(BloomConfig(**GPT_SIZES, hidden_size=32, n_layer=2, n_head=4)), "ALiBi"),
        (BertLMHeadModel(BertConfig(**SIZES, is_decoder=True)), "computes other logits"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            speculate(randomised(model), torch.tensor([[3, 4, 5]]), max_new_tokens=3)
        assert type(model).__name__ in str(error.value)
        assert "Call generate without custom_generate" in str(error.value)


def test_what_a_model_does_beside_its_head_is_noticed() -> None:
    model = tiny_llama()
    check_tree_pass(Target(model))
    other = tiny_llama()
    forward = other.forward
    other.forward = lambda *args, **kwargs: _doubled(forward(*args, **kwargs))
    with pytest.raises(ValueError, match=r"computes other logits .*relative error"):
        check_tree_pass(Target(other))


def _doubled(output: Any) -> Any:
    output.logits = 2 * output.logits
    return output


def test_a_decoder_that_ignores_the_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def causal(visible: Tensor, *arguments: Any) -> Tensor:
        everything = torch.where(torch.arange(visible.shape[-1]) <= int(visible.max()) + 1, 0, -1).expand_as(visible)
        return original(everything, *arguments)

    original = hf.additive_mask
    monkeypatch.setattr(hf.target, "additive_mask", causal)
    with pytest.raises(ValueError, match="computes other logits"):
        check_tree_pass(Target(tiny_llama()))


def test_a_model_is_checked_once() -> None:
    model = tiny_llama()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for _ in range(3):
        speculate(model, random_prompt(model), max_new_tokens=3)
    assert 0 < len(calls) <= 4


# Processors --------------------------------------------------------------------------------------------------------


def test_processors_of_a_row_leave_the_callers_alone() -> None:
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])
    processors[0].prompt_ignore_length = torch.tensor([0, 2, 5])
    chosen = processors_of_row(processors, 1)
    assert chosen[0].prompt_ignore_length.tolist() == [2]
    assert processors[0].prompt_ignore_length.tolist() == [0, 2, 5]
