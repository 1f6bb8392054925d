"""Every option of `generate`, and what speculation makes of it: the one list behind the tests and `docs/options.md`.

A row is a question to `generate`. Supported: the answer is plain `generate`'s, and differs from the answer without the
option, so that ignoring it would be noticed. No effect: both strategies answer as they do without it. Refused: a
sentence, before any work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import microspec_hf
from tests.promises.support import Setting
from tests.tiny import tiny_llama

Kind = Literal["supported", "no effect", "refused"]
Ask = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One use of one option.

    Args:
        name: the flag of `GenerationConfig`, or the argument of `generate` or of the model's forward.
        kind: what is promised.
        ask: the arguments of the call, made anew for each call, since some of them keep a state.
        without: what the call looks like without the option; None: the setting's usual greedy call.
        case: tells several rows of one name apart.
        words: refused: what its sentence says.
        open: a fault of ours that is known: what happens instead of what is promised.
    """

    name: str
    kind: Kind
    ask: Callable[[Setting], Ask]
    without: Callable[[Setting], Ask] | None = None
    case: str = ""
    words: tuple[str, ...] = ()
    open: str | None = None

    @property
    def id(self) -> str:
        return f"{self.name}-{self.case}" if self.case else self.name


class StopOnToken(StoppingCriteria):
    """Looks at the last token and at nothing else."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == self.token


class EvenAfterOdd(LogitsProcessor):
    """Forbids odd ids behind an odd id."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        odd = (input_ids[:, -1:] % 2 == 1) & (torch.arange(scores.shape[1]) % 2 == 1)
        return scores.masked_fill(odd, -torch.inf)


class Silent:
    """A streamer that nobody reads."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


def later_than_the_last(batch: int, ids: Tensor) -> list[int]:
    return [*range(int(ids[-1]) % 50, 97)]


def negative_prompt(where: Setting) -> Tensor:
    return where.prompt[:, [4, 0, 2]]


def padded(where: Setting) -> Ask:
    """The prompt behind three tokens of padding."""
    padding = torch.tensor([[1, 1, 1]])
    mask = torch.cat([torch.zeros_like(padding), torch.ones_like(where.prompt)], dim=1)
    return {"inputs": torch.cat([padding, where.prompt], dim=1), "attention_mask": mask, "pad_token_id": 1}


def ends(where: Setting, index: int = 3) -> Ask:
    """An end token that plain greedy decoding writes as its token of this index, counted from 0."""
    return {"eos_token_id": where.text[index], "pad_token_id": 0}


def stop_string(where: Setting, index: int = 4) -> Ask:
    return {"stop_strings": [where.words.decode(where.text[index])], "tokenizer": where.words}


def two_rows(where: Setting, **ask: Any) -> Ask:
    """Two prompts, of which the second writes on when the first has ended."""
    prompts = torch.cat([where.prompt, where.prompt.flip(1)])
    return {"inputs": prompts, "output_scores": False, "output_logits": False, **ask}


def cache_of_the_prompt(where: Setting, ids: Tensor) -> Ask:
    """A cache that the model has filled with the ids `[1, L]`, which need not be those of the prompt."""
    cache = DynamicCache(config=where.model.config)
    with torch.no_grad():
        where.model(ids, use_cache=True, **{where.cache_name: cache})
    return {where.cache_name: cache}


def supported(name: str, ask: Ask | Callable[[Setting], Ask], *, case: str = "", **options: Any) -> Row:
    return Row(name, "supported", _asking(ask), case=case, **options)


def no_effect(name: str, ask: Ask | Callable[[Setting], Ask], *, case: str = "", **options: Any) -> Row:
    return Row(name, "no effect", _asking(ask), case=case, **options)


def refused(
    name: str, ask: Ask | Callable[[Setting], Ask], *words: str, case: str = "", open: str | None = None
) -> Row:
    return Row(name, "refused", _asking(ask), case=case, words=words, open=open)


def sampled(name: str, **ask: Any) -> Row:
    """An option of sampling, against sampling without it."""
    return supported(name, {"do_sample": True, **ask}, without=lambda _: {"do_sample": True, "top_k": 0})


def _asking(ask: Ask | Callable[[Setting], Ask]) -> Callable[[Setting], Ask]:
    return ask if callable(ask) else lambda _: dict(ask)


LENGTHS = [
    supported("max_length", {"max_length": 15, "max_new_tokens": None}),
    supported("max_new_tokens", {"max_new_tokens": 5}),
    supported("min_length", lambda s: ends(s) | {"min_length": 13}, without=ends),
    supported("min_new_tokens", lambda s: ends(s) | {"min_new_tokens": 9}, without=ends),
    supported("max_time", {"max_time": 1e-9}),
    supported("stop_strings", stop_string),
    supported("eos_token_id", ends, case="one"),
    supported("eos_token_id", lambda s: {"eos_token_id": [s.text[9], s.text[4]], "pad_token_id": 0}, case="list"),
    supported(
        "pad_token_id",
        lambda s: two_rows(s, eos_token_id=s.text[3], pad_token_id=5),
        without=lambda s: two_rows(s, eos_token_id=s.text[3], pad_token_id=6),
    ),
    no_effect("early_stopping", {"early_stopping": True}),
]

STRATEGIES = [
    supported("do_sample", {"do_sample": True, "top_k": 0}),
    no_effect("num_beams", {"num_beams": 1}, case="1"),
    refused("num_beams", {"num_beams": 3}, "num_beams=3", "beam search", "num_beams=1", case="3"),
    refused("use_mtp", {"use_mtp": True}, "assisted generation", "without custom_generate"),
    refused("penalty_alpha", {"penalty_alpha": 0.5, "top_k": 4}, "contrastive search", "without custom_generate"),
    refused("dola_layers", {"dola_layers": "low"}, "dola generation", "without custom_generate"),
    refused("constraints", {"constraints": ["anything"]}, "constrained beam search", "without custom_generate"),
    refused("force_words_ids", {"force_words_ids": [[5]]}, "constrained beam search", "without custom_generate"),
    no_effect("num_beam_groups", {"num_beam_groups": 1}),
    no_effect("diversity_penalty", {"diversity_penalty": 0.5}),
    no_effect("length_penalty", {"length_penalty": 2.0}),
    no_effect("low_memory", {"low_memory": True}),
]

CACHES = [
    no_effect("use_cache", {"use_cache": True}, case="True"),
    refused("use_cache", {"use_cache": False}, "use_cache=False", "KV cache", case="False"),
    no_effect("cache_implementation", {"cache_implementation": "dynamic"}, case="dynamic"),
    no_effect("cache_implementation", {"cache_implementation": "static"}, case="static"),
    *(
        refused(
            "cache_implementation", {"cache_implementation": kind}, kind, "Leave cache_implementation out", case=kind
        )
        for kind in ("quantized", "offloaded", "offloaded_static")
    ),
    refused(
        "cache_implementation",
        {"cache_implementation": "paged"},
        "paged",
        "cache_implementation",
        case="paged",
    ),
    no_effect("cache_config", {"cache_config": {"nbits": 4}}),
    no_effect("max_cache_len", {"cache_implementation": "static", "max_cache_len": 64}),
    no_effect("prefill_chunk_size", {"prefill_chunk_size": 3}),
    no_effect("compile_config", {"compile_config": CompileConfig()}),
    no_effect("disable_compile", {"disable_compile": True}),
    no_effect("continuous_batching_config", {"continuous_batching_config": None}),
]

SAMPLING = [
    sampled("temperature", temperature=0.3, top_k=0),
    sampled("top_k", top_k=3),
    sampled("top_p", top_p=0.5, top_k=0),
    sampled("min_p", min_p=0.3, top_k=0),
    sampled("top_h", top_h=0.3, top_k=0),
    sampled("typical_p", typical_p=0.5, top_k=0),
    sampled("epsilon_cutoff", epsilon_cutoff=0.05, top_k=0),
    sampled("eta_cutoff", eta_cutoff=0.05, top_k=0),
    supported(
        "num_return_sequences",
        {"do_sample": True, "num_return_sequences": 2, "output_scores": False, "output_logits": False},
        without=lambda _: {"do_sample": True, "output_scores": False, "output_logits": False},
    ),
]

PROCESSORS = [
    supported("repetition_penalty", {"repetition_penalty": 1.7}),
    supported("encoder_repetition_penalty", {"encoder_repetition_penalty": 1.7}),
    supported("no_repeat_ngram_size", {"no_repeat_ngram_size": 1}),
    supported("encoder_no_repeat_ngram_size", {"encoder_no_repeat_ngram_size": 1}),
    supported("bad_words_ids", lambda s: {"bad_words_ids": [[s.text[1]], list(s.text[3:5])]}),
    supported("renormalize_logits", {"renormalize_logits": True}),
    supported("forced_bos_token_id", {"inputs": torch.tensor([[10]]), "forced_bos_token_id": 3}),
    supported("forced_eos_token_id", {"forced_eos_token_id": 3}),
    supported(
        "remove_invalid_values",
        lambda s: {"sequence_bias": [[[s.text[2]], -torch.inf]], "remove_invalid_values": True},
        without=lambda s: {"sequence_bias": [[[s.text[2]], -torch.inf]]},
    ),
    supported(
        "exponential_decay_length_penalty",
        lambda s: {"eos_token_id": 3, "pad_token_id": 0, "exponential_decay_length_penalty": (3, 1.5)},
        without=lambda _: {"eos_token_id": 3, "pad_token_id": 0},
    ),
    supported("suppress_tokens", {"suppress_tokens": [*range(60)]}),
    supported("begin_suppress_tokens", lambda s: {"begin_suppress_tokens": [s.text[0]]}),
    supported("sequence_bias", lambda s: {"sequence_bias": [[[s.text[1]], -9.0], [list(s.text[4:6]), -9.0]]}),
    supported("guidance_scale", {"guidance_scale": 1.6}),
    supported("watermarking_config", {"watermarking_config": WatermarkingConfig(bias=4.0)}, case="green list"),
    supported(
        "watermarking_config",
        {
            "do_sample": True,
            "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[7, 11, 13, 17]),
        },
        without=lambda _: {"do_sample": True},
        case="SynthID",
    ),
    refused(
        "token_healing",
        lambda s: {"token_healing": True, "tokenizer": s.words},
        "token_healing",
    ),
]

OUTPUTS = [
    supported("return_dict_in_generate", {"return_dict_in_generate": False}),
    supported("output_scores", {"output_scores": True}, without=lambda _: {"output_scores": False}),
    supported("output_logits", {"output_logits": True}, without=lambda _: {"output_logits": False}),
    supported("output_hidden_states", {"output_hidden_states": True}),
    refused("output_attentions", {"output_attentions": True}, "output_attentions", "model(sequences"),
    no_effect(
        "output_hidden_states",
        {"return_dict_in_generate": False, "output_hidden_states": True},
        without=lambda _: {"return_dict_in_generate": False},
        case="ids only",
    ),
]

ASSISTANCE = [
    refused("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 3}, "assisted generation"),
    refused("assistant_early_exit", {"assistant_early_exit": 1}, "assisted generation"),
    refused("assistant_model", lambda _: {"assistant_model": tiny_llama()}, "assistant_model", "drafter="),
    no_effect("assistant_tokenizer", lambda s: {"assistant_tokenizer": s.words}),
    no_effect("num_assistant_tokens", {"num_assistant_tokens": 3}),
    no_effect("num_assistant_tokens_schedule", {"num_assistant_tokens_schedule": "heuristic"}),
    no_effect("assistant_confidence_threshold", {"assistant_confidence_threshold": 0.9}),
    no_effect("max_matching_ngram_size", {"max_matching_ngram_size": 3}),
    no_effect("assistant_lookbehind", {"assistant_lookbehind": 3}),
    no_effect("target_lookbehind", {"target_lookbehind": 3}),
    no_effect("assistant_ensemble_weight", {"assistant_ensemble_weight": 0.5}),
    no_effect("speculation_type", {"speculation_type": "dflash"}),
    supported("is_assistant", {"is_assistant": True, "assistant_confidence_threshold": 0.9}),
]

TOKENS = [
    supported("bos_token_id", {"inputs": None, "bos_token_id": 17}, without=lambda _: {"inputs": torch.tensor([[18]])}),
    no_effect("decoder_start_token_id", {"decoder_start_token_id": 9}),
]

ARGUMENTS = [
    supported("inputs", lambda s: {"inputs": s.prompt[:, :4]}),
    supported("input_ids", lambda s: {"input_ids": s.prompt[:, :4]}),
    refused("inputs_embeds", {"inputs_embeds": torch.zeros(1, 3, 48)}, "inputs_embeds", "Pass input_ids"),
    supported(
        "generation_config",
        lambda _: {"generation_config": GenerationConfig(max_new_tokens=9, repetition_penalty=1.5, do_sample=False)},
        without=lambda _: {"generation_config": GenerationConfig(max_new_tokens=9, do_sample=False)},
    ),
    supported("logits_processor", lambda _: {"logits_processor": LogitsProcessorList([EvenAfterOdd()])}),
    supported("stopping_criteria", lambda s: {"stopping_criteria": StoppingCriteriaList([StopOnToken(s.text[4])])}),
    supported("prefix_allowed_tokens_fn", {"prefix_allowed_tokens_fn": later_than_the_last}),
    supported(
        "negative_prompt_ids",
        lambda s: {"guidance_scale": 1.6, "negative_prompt_ids": negative_prompt(s)},
        without=lambda _: {"guidance_scale": 1.6},
    ),
    supported(
        "negative_prompt_attention_mask",
        lambda s: {
            "guidance_scale": 1.6,
            "negative_prompt_ids": negative_prompt(s),
            "negative_prompt_attention_mask": torch.tensor([[0, 1, 1]]),
        },
        without=lambda s: {"guidance_scale": 1.6, "negative_prompt_ids": negative_prompt(s)},
    ),
    no_effect("streamer", lambda _: {"streamer": Silent()}),
    no_effect("tokenizer", lambda s: {"tokenizer": s.words}),
    no_effect("trust_remote_code", {"trust_remote_code": False}),
    no_effect("synced_gpus", {"synced_gpus": False}, case="False"),
    refused(
        "synced_gpus",
        {"synced_gpus": True},
        "synced_gpus",
        case="True",
    ),
    no_effect("custom_generate", {"custom_generate": microspec_hf.generate}, case="callable"),
    supported(
        "attention_mask",
        padded,
        without=lambda s: padded(s) | {"attention_mask": None, "pad_token_id": None},
    ),
    refused(
        "attention_mask",
        {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]])},
        "attention_mask",
        "padding on the left",
        case="holes",
    ),
    no_effect("position_ids", {"position_ids": torch.arange(7)[None]}, case="usual"),
    refused("position_ids", {"position_ids": torch.arange(3, 10)[None]}, "position_ids", "leave them out", case="own"),
    no_effect("cache", lambda s: {s.cache_name: DynamicCache(config=s.model.config)}, case="empty"),
    supported(
        "cache",
        lambda s: cache_of_the_prompt(s, torch.tensor([[9, 9, 9, 9]])),
        without=lambda s: cache_of_the_prompt(s, s.prompt[:, :4]),
        case="with another prefix",
    ),
    refused(
        "cache",
        lambda s: cache_of_the_prompt(s, s.prompt),
        "already holds 7 tokens",
        "at least one more",
        case="too long",
    ),
    no_effect("logits_to_keep", {"logits_to_keep": 1}),
    refused("labels", {"labels": torch.ones(1, 7, dtype=torch.int64)}, "labels", "without custom_generate"),
    *(
        refused(name, {name: 3}, name, "without custom_generate")
        for name in ("cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "num_items_in_batch", "seq_idx")
    ),
    refused("output_router_logits", {"output_router_logits": True}, "output_router_logits", "without custom_generate"),
    refused("is_causal", {"is_causal": False}, "is_causal", "without custom_generate"),
]


def ragged(where: Setting, **ask: Any) -> Ask:
    """The prompt and its first four tokens, behind padding."""
    short = torch.cat([torch.zeros(1, 3, dtype=torch.int64), where.prompt[:, :4]], dim=1)
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, :3] = 0
    rows = torch.cat([where.prompt, short])
    return two_rows(where, eos_token_id=where.text[5], pad_token_id=0) | {"inputs": rows, "attention_mask": mask, **ask}


def of_a_batch(name: str, ask: Ask | Callable[[Setting], Ask]) -> Row:
    return supported(name, lambda s: ragged(s) | _asking(ask)(s), without=ragged, case="batch")


def not_of_a_batch(name: str, ask: Ask | Callable[[Setting], Ask], *words: str) -> Row:
    return refused(name, lambda s: two_rows(s) | _asking(ask)(s), *words, case="batch")


BATCHES = [
    supported("inputs", two_rows, without=lambda s: two_rows(s, inputs=s.prompt.repeat(2, 1)), case="batch"),
    supported(
        "attention_mask",
        ragged,
        without=lambda s: ragged(s, attention_mask=torch.ones(2, 7, dtype=torch.int64)),
        case="batch",
    ),
    of_a_batch("eos_token_id", lambda s: {"eos_token_id": [s.text[5], s.text[2]]}),
    of_a_batch("max_length", {"max_length": 12, "max_new_tokens": None}),
    of_a_batch("min_new_tokens", {"min_new_tokens": 9}),
    of_a_batch("repetition_penalty", {"repetition_penalty": 1.7}),
    of_a_batch("encoder_repetition_penalty", {"encoder_repetition_penalty": 1.7}),
    of_a_batch("no_repeat_ngram_size", {"no_repeat_ngram_size": 1}),
    of_a_batch("prefix_allowed_tokens_fn", {"prefix_allowed_tokens_fn": later_than_the_last}),
    of_a_batch("sequence_bias", lambda s: {"sequence_bias": [[[s.text[1]], -9.0]]}),
    of_a_batch("do_sample", {"do_sample": True, "top_k": 5}),
    of_a_batch("logits_processor", lambda _: {"logits_processor": LogitsProcessorList([EvenAfterOdd()])}),
    of_a_batch("stopping_criteria", lambda s: {"stopping_criteria": StoppingCriteriaList([StopOnToken(s.text[3])])}),
    of_a_batch("stop_strings", lambda s: stop_string(s, 3)),
    not_of_a_batch("streamer", lambda _: {"streamer": Silent()}, "A streamer follows one text", "one prompt"),
    not_of_a_batch("output_scores", {"output_scores": True}, "output_scores", "one prompt"),
    not_of_a_batch("output_logits", {"output_logits": True}, "output_logits", "one prompt"),
    not_of_a_batch("output_hidden_states", {"output_hidden_states": True}, "output_hidden_states", "one prompt"),
    not_of_a_batch("guidance_scale", {"guidance_scale": 1.5}, "UnbatchedClassifierFree", "one prompt"),
    not_of_a_batch("encoder_no_repeat_ngram_size", {"encoder_no_repeat_ngram_size": 2}, "EncoderNoRepeatNGram"),
    not_of_a_batch(
        "watermarking_config",
        {"do_sample": True, "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[7, 11])},
        "SynthIDText",
        "one prompt",
    ),
    refused(
        "stopping_criteria",
        lambda s: two_rows(s, stopping_criteria=StoppingCriteriaList([StopOnToken(s.text[3])])),
        "end token",
        "eos_token_id",
        case="batch without an end token",
    ),
]
"""Several prompts at once: what is different from one."""

SECTIONS: dict[str, list[Row]] = {
    "Length and stopping": LENGTHS,
    "Strategy": STRATEGIES,
    "Sampling": SAMPLING,
    "Processors": PROCESSORS,
    "Outputs": OUTPUTS,
    "Cache and compilation": CACHES,
    "Special tokens": TOKENS,
    "Assisted decoding": ASSISTANCE,
    "Arguments": ARGUMENTS,
    "Several prompts at once": BATCHES,
}
"""As the documentation shows them."""

ROWS: list[Row] = [row for section in SECTIONS.values() for row in section]
