"""What cannot be served exactly is refused before any work, with a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

import microspec_hf
from microspec_hf import EagleConfig, EagleHead
from microspec_hf.hf import caller_cache
from microspec_hf.hf.cache import refuse_cache
from tests.doubles import plain, random_head, random_prompt, speculate
from tests.tiny import tiny_llama, tiny_mistral, tiny_qwen2


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@contextmanager
def refused(model: PreTrainedModel, *words: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """The block raises with all of the words, and no layer of the model has run."""
    ran: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, _: ran.append(type(module).__name__))
        for module in model.modules()
        if not isinstance(module, nn.ModuleList)
    ]
    try:
        with pytest.raises(error) as caught:
            yield
    finally:
        for hook in hooks:
            hook.remove()
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert ran == []


def test_work_would_be_noticed(model: PreTrainedModel) -> None:
    def work_first() -> None:
        model(torch.tensor([[1]]))
        raise ValueError

    with pytest.raises(AssertionError), refused(model):
        work_first()


class Anything(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


ARGUMENTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "beams": ({"num_beams": 3}, ["num_beams=3", "beam search", "num_beams=1"]),
    "beam sampling": ({"num_beams": 2, "do_sample": True}, ["num_beams=2"]),
    "returned beams": ({"num_beams": 3, "num_return_sequences": 3}, ["num_beams=3"]),
    "no cache": ({"use_cache": False}, ["use_cache=False", "KV cache"]),
    "quantised cache": ({"cache_implementation": "quantized"}, ["quantized", "cache"]),
    "offloaded cache": ({"cache_implementation": "offloaded"}, ["offloaded", "cache_implementation"]),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, ["assisted generation", "without custom_generate"]),
    "attentions": (
        {"return_dict_in_generate": True, "output_attentions": True},
        ["output_attentions", "rejected", "model(sequences"],
    ),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 3, 48)}, ["inputs_embeds", "input_ids"]),
    "vocabulary": ({"microspec": {"vocabulary": "pruned"}}, ["kind", "'full', 'static', 'dynamic'", "'pruned'"]),
    "window": ({"microspec": {"vocabulary": {"max_rows": 0}}}, ["max_rows", "at least 1"]),
    "tree": ({"microspec": {"tree": {"depth": 0, "top_k": 2, "num_nodes": 9}}}, ["num_nodes=9", "2 candidates"]),
    "option": ({"microspec": {"threshold": 0.9}}, ["threshold", "tree, vocabulary, prefill_chunk"]),
    "options": ({"microspec": "fast"}, ["MicroSpecConfig", "str"]),
    "static without a list": ({"microspec": {"vocabulary": "static"}}, ["token_ids"]),
    "list of another model": (
        {"microspec": {"vocabulary": {"kind": "static", "token_ids": (900, 901)}}},
        ["token_ids", "101"],
    ),
    "floor above the window": (
        {"microspec": {"vocabulary": {"max_rows": 2, "floor": 3, "token_ids": (1, 2, 3)}}},
        ["floor=3", "max_rows=2"],
    ),
    "unknown target": ({"drafter": "auto"}, ['"auto"', "Pass drafter="]),
    "stop strings without a tokenizer": ({"stop_strings": ["."]}, ["stop_strings", "tokenizer"]),
    "right padding": (
        {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])},
        ["attention_mask", 'padding_side = "left"'],
    ),
    "holes": ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]])}, ["attention_mask", "unbroken"]),
    "nothing visible": ({"attention_mask": torch.zeros(1, 7, dtype=torch.long)}, ["attention_mask"]),
    "mask of another shape": ({"attention_mask": torch.ones(1, 1, 7, 7)}, ["attention_mask", "2D"]),
    "positions": ({"position_ids": torch.arange(3, 10)[None]}, ["position_ids", "leave them out"]),
    "typo": ({"max_nwe_tokens": 3}, ["max_nwe_tokens"]),
    "typo of ours": ({"micro_spec": {}}, ["micro_spec"]),
}


@pytest.mark.parametrize(("arguments", "words"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments(model: PreTrainedModel, arguments: dict[str, Any], words: list[str]) -> None:
    for custom_generate in ("microspec", microspec_hf.generate):
        with refused(model, *words):
            speculate(model, random_prompt(model), **{"max_new_tokens": 3} | arguments, custom_generate=custom_generate)


def test_assistant_model(model: PreTrainedModel) -> None:
    with refused(model, "assistant_model", "drafter="):
        speculate(model, random_prompt(model), max_new_tokens=3, assistant_model=tiny_llama())


def test_generation_config_is_looked_at_too(model: PreTrainedModel) -> None:
    with refused(model, "num_beams=4"):
        speculate(model, random_prompt(model), generation_config=GenerationConfig(num_beams=4, max_new_tokens=3))


# Caches ------------------------------------------------------------------------------------------------------------


def cache_name(model: PreTrainedModel) -> str:
    return microspec_hf.hf.cache_argument(model.forward)  # type: ignore[attr-defined]


def test_cache_that_holds_the_whole_text(model: PreTrainedModel) -> None:
    prompt = random_prompt(model)
    first = plain(model, prompt, max_new_tokens=2, return_dict_in_generate=True)
    with pytest.raises(ValueError, match=r"already holds 8 tokens, but input_ids has only 8"):
        refuse_cache(first[cache_name(model)], num_tokens=8)


def test_cache_whose_rows_are_in_no_order(model: PreTrainedModel) -> None:
    cache = StaticCache(config=tiny_mistral(5).config, max_cache_len=20)
    cache.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    with pytest.raises(ValueError, match=r"layers of type StaticSlidingWindowLayer .* Pass a DynamicCache"):
        refuse_cache(cache, num_tokens=8)


def test_cache_that_holds_several_texts(model: PreTrainedModel) -> None:
    prompt = random_prompt(model).repeat(2, 1)
    first = plain(model, prompt[:, :4], max_new_tokens=2, return_dict_in_generate=True)
    with refused(model, "already holds 5 tokens", "one prompt"):
        speculate(model, prompt, max_new_tokens=3, **{cache_name(model): first[cache_name(model)]})


def test_empty_cache_is_no_reason_to_refuse(model: PreTrainedModel) -> None:
    prompt = random_prompt(model)
    got = speculate(model, prompt, max_new_tokens=3, **{cache_name(model): DynamicCache(config=model.config)})
    assert got.tolist() == plain(model, prompt, max_new_tokens=3).tolist()


def test_static_cache_implementation_gives_the_same_text(model: PreTrainedModel) -> None:
    prompt = random_prompt(model)
    got = speculate(model, prompt, max_new_tokens=3, cache_implementation="static")
    assert got.tolist() == plain(model, prompt, max_new_tokens=3).tolist()


def test_cache_of_a_kind_that_cannot_be_rolled_back() -> None:
    class QuantizedCache(DynamicCache):
        pass

    with pytest.raises(ValueError, match=r"QuantizedCache cannot be rolled back .* Leave the cache out"):
        caller_cache({"past_key_values": QuantizedCache()}, [torch.zeros(3)], 3)
    with pytest.raises(ValueError, match=r"must be a transformers.Cache, got a tuple"):
        caller_cache({"past_key_values": ((torch.zeros(1), torch.zeros(1)),)}, [torch.zeros(3)], 3)


def test_forward_arguments_that_would_be_dropped() -> None:
    with pytest.raises(ValueError, match=r"does not pass token_type_ids on to the model"):
        caller_cache({"token_type_ids": torch.zeros(1, 3), "use_cache": True}, [torch.zeros(3)], 3)


# Targets -----------------------------------------------------------------------------------------------------------

SMALL = {"vocab_size": 101, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def test_encoder_decoder_model(model: PreTrainedModel) -> None:
    other = T5ForConditionalGeneration(
        T5Config(**SMALL, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with refused(other, "encoder-decoder", "without custom_generate"):
        speculate(other, random_prompt(model), drafter=random_head(model), max_new_tokens=3)


def test_recurrent_model(model: PreTrainedModel) -> None:
    other = MambaForCausalLM(MambaConfig(**SMALL, hidden_size=48, num_hidden_layers=1))
    with refused(other, "rolled back", "without custom_generate"):
        speculate(other, random_prompt(model), drafter=random_head(model), max_new_tokens=3)


def test_layers_with_a_state() -> None:
    other = tiny_llama()
    other.config.layer_types = ["full_attention", "linear_attention", "chunked_attention"]
    with refused(other, "chunked_attention, linear_attention", "rolled back"):
        speculate(other, random_prompt(other), max_new_tokens=3)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_that_takes_no_tree_mask(attention: str) -> None:
    other = tiny_llama()
    other.config._attn_implementation_internal = attention
    with refused(other, attention, "tree mask", 'attn_implementation="sdpa"'):
        speculate(other, random_prompt(other), max_new_tokens=3)


def test_head_whose_rows_cannot_be_gathered() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.zeros(101, 48, dtype=torch.int8))

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden @ self.weight.to(hidden).T

    other = tiny_llama()
    other.lm_head = Packed()
    with refused(other, "Packed", "unquantised"):
        speculate(other, random_prompt(other), drafter=random_head(tiny_llama()), max_new_tokens=3)


# Drafters ----------------------------------------------------------------------------------------------------------


def test_drafter_of_another_target(model: PreTrainedModel) -> None:
    sizes = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    with refused(model, "32", "48"):
        head = EagleHead(EagleConfig(hidden_size=32, vocab_size=101, **sizes))
        speculate(model, random_prompt(model), drafter=head, max_new_tokens=3)
    with refused(model, "113", "101"):
        speculate(model, random_prompt(model), drafter=random_head(tiny_qwen2()), max_new_tokens=3)


def test_drafter_trained_for_a_target_of_another_name() -> None:
    other = tiny_llama()
    other.config._name_or_path = "someone/Model-A"
    head = random_head(other)
    head.config.target = "someone/Model-B"
    with refused(other, "someone/Model-A", "someone/Model-B"):
        speculate(other, random_prompt(other), drafter=head, max_new_tokens=3)


def test_drafter_files_that_are_missing(model: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "nowhere", tmp_path / "empty", str(tmp_path / "empty")):
        with refused(model, str(source)):
            speculate(model, random_prompt(model), drafter=source, max_new_tokens=3)


class _Trap:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (_spring, ("sprung",))


_sprung: list[str] = []


def _spring(word: str) -> None:
    _sprung.append(word)


def test_hostile_pickle_is_not_run(model: PreTrainedModel, tmp_path: Path) -> None:
    random_head(model).config.to_json_file(tmp_path / "config.json", use_diff=False)
    config = (tmp_path / "config.json").read_text().replace("microspec_eagle", "llama")
    (tmp_path / "config.json").write_text(config)
    torch.save({"fc.weight": _Trap()}, tmp_path / "pytorch_model.bin")
    with refused(model, "pytorch_model.bin"):
        speculate(model, random_prompt(model), drafter=tmp_path, max_new_tokens=3)
    assert _sprung == []
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert _sprung == ["sprung"]  # the trap works


# Batches -----------------------------------------------------------------------------------------------------------

BATCHES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, ["output_scores", "one prompt"]),
    "logits": ({"return_dict_in_generate": True, "output_logits": True}, ["output_logits", "one prompt"]),
    "criterion without an end token": (
        {"stopping_criteria": StoppingCriteriaList([Anything()])},
        ["end token", "eos_token_id"],
    ),
    "guidance": ({"guidance_scale": 1.5}, ["UnbatchedClassifierFreeGuidanceLogitsProcessor", "one prompt"]),
    "encoder n-grams": ({"encoder_no_repeat_ngram_size": 2}, ["EncoderNoRepeatNGramLogitsProcessor"]),
}


@pytest.mark.parametrize(("arguments", "words"), BATCHES.values(), ids=BATCHES)
def test_batches(model: PreTrainedModel, arguments: dict[str, Any], words: list[str]) -> None:
    prompts = random_prompt(model).repeat(2, 1)
    with refused(model, *words):
        speculate(model, prompts, max_new_tokens=3, **arguments)


def test_streamer_of_a_batch(model: PreTrainedModel) -> None:
    class Streamer:
        def put(self, value: Tensor) -> None: ...

        def end(self) -> None: ...

    with refused(model, "streamer", "one prompt"):
        speculate(model, random_prompt(model).repeat(2, 1), max_new_tokens=3, streamer=Streamer())


@pytest.mark.parametrize("arguments", [{"guidance_scale": 1.5}, {"encoder_no_repeat_ngram_size": 2}], ids=str)
def test_what_a_batch_may_not_have_one_prompt_may(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    prompt = random_prompt(model)
    got = speculate(model, prompt, max_new_tokens=8, **arguments)
    assert got.tolist() == plain(model, prompt, max_new_tokens=8, **arguments).tolist()


def test_criterion_of_a_batch_with_an_end_token(model: PreTrainedModel) -> None:
    prompts = random_prompt(model).repeat(2, 1)
    criteria = StoppingCriteriaList([Anything(), EosTokenCriteria(eos_token_id=100)])
    got = speculate(model, prompts, max_new_tokens=3, stopping_criteria=criteria, pad_token_id=0)
    assert got.tolist() == plain(model, prompts, max_new_tokens=3).tolist()
