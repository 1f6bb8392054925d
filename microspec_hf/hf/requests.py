"""What `generate` was asked for: refused where it cannot be served exactly, or made ready for one row of a batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache, LogitsProcessorList, PreTrainedModel
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from microspec_hf.hf.cache import refuse_cache
from microspec_hf.hf.target import Target


def refuse_request(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Refuse what `generate` would start to work on before our decoding method could say no."""
    Target(model)
    if arguments.get("assistant_model") is not None:
        raise ValueError(
            'assistant_model and custom_generate="microspec" are two ways to speculate; the drafter of this one is '
            "named by drafter=. Pass one of them."
        )
    for source in (arguments, vars(arguments.get("generation_config") or model.generation_config)):
        kind = source.get("cache_implementation") or ""
        if kind in ("quantized", "paged") or "offloaded" in kind:  # transformers would begin to make such a cache
            raise ValueError(
                f"cache_implementation={kind!r}: its rows cannot be moved or rolled back after a rejected draft. "
                "Leave cache_implementation out; speculation brings its own cache."
            )
        if source.get("token_healing"):
            raise ValueError(
                "token_healing rewrites the end of the prompt before a custom decoding method has a say. Heal the "
                "prompt with model.heal_tokens(input_ids, tokenizer) first, and leave token_healing out."
            )
    if arguments.get("synced_gpus"):
        raise ValueError(
            "synced_gpus=True: ranks whose texts accept different numbers of drafts would wait for each other. "
            "Leave synced_gpus out, or call generate without custom_generate."
        )
    if seen := [name for name in ("pixel_values", "pixel_values_videos", "image_patches") if name in arguments]:
        raise ValueError(
            f"{', '.join(seen)}: speculation drafts from text alone. Call generate without custom_generate for prompts "
            "with pictures."
        )
    if arguments.get("inputs_embeds") is not None:
        raise ValueError(
            "inputs_embeds is not supported with speculation: the drafter reads token ids. Pass input_ids."
        )


def caller_cache(model_kwargs: dict[str, Any], prompts: Sequence[Tensor], width: int) -> Cache:
    """The cache that the call fills: the caller's, or the new one that `generate` made.

    Args:
        model_kwargs: what `generate` prepared for the forward.
        prompts: the prompts without their padding.
        width: columns of input_ids.

    Raises:
        ValueError: the cache cannot be served, or there are forward arguments that the loop would not pass on.
    """
    understood = {"attention_mask", "position_ids", "cache_position", "use_cache", "cache", "past_key_values"}
    harmless = {"logits_to_keep", "num_logits_to_keep", "synced_gpus", "tokenizer", "assistant_tokenizer"}
    harmless |= {"output_attentions", "output_hidden_states"}  # `generation` answers them
    # Without pictures, a model that could see some gets an empty dict of them.
    passed = {k for k, v in model_kwargs.items() if v is not None and not (isinstance(v, dict) and not v)}
    unknown = sorted(passed - understood - harmless)
    if unknown:
        raise ValueError(
            f"Speculation does not pass {', '.join(unknown)} on to the model, so that the text would differ. "
            "Leave it out, or call generate without custom_generate."
        )
    given = [model_kwargs[name] for name in ("cache", "past_key_values") if model_kwargs.get(name) is not None]
    if not given:
        return DynamicCache()
    cache = given[0]
    if not isinstance(cache, Cache):
        raise ValueError(f"The cache must be a transformers.Cache, got a {type(cache).__name__}.")
    refuse_cache(cache, width)
    if int(cache.get_seq_length()) > 0 and (len(prompts) > 1 or prompts[0].shape[0] < width):
        raise ValueError(
            f"A cache that already holds {int(cache.get_seq_length())} tokens can be continued for one prompt without "
            "padding only. Pass the texts one at a time, or leave the cache out."
        )
    return cache


def processors_of_row(processors: LogitsProcessorList, row: int) -> LogitsProcessorList:
    """The processors of a batch, ready to be called with one of its rows alone."""
    return LogitsProcessorList([_processor_of_row(processor, row) for processor in processors])


def refuse_processors_of_batch(processors: LogitsProcessorList) -> None:
    """Refuse those of transformers' processors that keep a state for all rows of a batch together."""
    together = (
        EncoderNoRepeatNGramLogitsProcessor,
        SynthIDTextWatermarkLogitsProcessor,
        UnbatchedClassifierFreeGuidanceLogitsProcessor,
    )
    if names := [type(processor).__name__ for processor in processors if isinstance(processor, together)]:
        raise ValueError(
            f"{', '.join(names)} must see all rows of a batch at once, but with speculation they do not grow by "
            "the same number of tokens. Pass one prompt at a time."
        )


def _processor_of_row(processor: Any, row: int) -> Any:
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), num_beams=1)
    for kind, field in (
        (EncoderRepetitionPenaltyLogitsProcessor, "encoder_input_ids"),
        (RepetitionPenaltyLogitsProcessor, "prompt_ignore_length"),  # since 5.2x the padding of each row
    ):
        if isinstance(processor, kind) and isinstance(of_rows := getattr(processor, field), Tensor):
            processor = copy.copy(processor)
            setattr(processor, field, of_rows[row : row + 1])
    return processor
