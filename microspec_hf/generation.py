"""The strategy as `generate` sees it: entry points, argument checks, stopping, streaming, output objects."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode, StopStringCriteria
from transformers.utils import logging

from microspec_hf.autotune import choose_tree
from microspec_hf.config import MicroSpecConfig, TreeConfig
from microspec_hf.drafters import find_drafter
from microspec_hf.eagle import EagleHead, check_pair, load_drafter
from microspec_hf.hf import (
    WORD,
    Target,
    cache_field,
    caller_cache,
    check_tree_pass,
    export_cache,
    import_cache,
    processors_of_row,
    refuse_processors_of_batch,
    refuse_request,
)
from microspec_hf.loop import Record, read
from microspec_hf.pace import Pace
from microspec_hf.sessions import AHEAD_ROWS, Plan, open_sessions
from microspec_hf.stats import SpeculationStats
from microspec_hf.stopping import Stops, without_stop_strings
from microspec_hf.verification import TokenRule
from microspec_hf.vocabulary import make_vocabulary
from microspec_hf.writing import Progress, write

logger = logging.get_logger(__name__)

NAME = "microspec"

Drafter = EagleHead | str | Path


@dataclass
class MicroSpecOutput(GenerateDecoderOnlyOutput):
    """`generate`'s output with `stats`: one `SpeculationStats` for each sequence."""

    stats: list[SpeculationStats] | None = None


def register() -> None:
    """Make `custom_generate="microspec"` known to every model's `generate`. Idempotent; done by importing the package.

    The name is resolved before transformers looks for a Hub repository or a folder, so that no network is touched and
    no `trust_remote_code` is needed.
    """
    original = GenerationMixin.generate
    if hasattr(original, "_microspec_original"):
        return

    @functools.wraps(original)
    def generate_with_strategies(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        custom = kwargs.get("custom_generate")
        if custom is generate or (isinstance(custom, str) and custom == NAME):
            bound = inspect.signature(original).bind(self, *args, **kwargs).arguments
            named = {k: v for k, v in bound.items() if k not in ("self", "kwargs", "custom_generate")}
            named.pop("trust_remote_code", None)
            return run(self, **named, **bound.get("kwargs", {}))
        return original(self, *args, **kwargs)

    generate_with_strategies._microspec_original = original  # type: ignore[attr-defined]
    GenerationMixin.generate = generate_with_strategies  # type: ignore[method-assign]


def unregister() -> None:
    """Undo `register`."""
    GenerationMixin.generate = getattr(  # type: ignore[method-assign]
        GenerationMixin.generate, "_microspec_original", GenerationMixin.generate
    )


def run(
    model: PreTrainedModel,
    drafter: Drafter | None = None,
    microspec: MicroSpecConfig | Mapping[str, Any] | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    **generate_arguments: Any,
) -> MicroSpecOutput | GenerateDecoderOnlyOutput | Tensor:
    """`model.generate(...)` with speculation: the same arguments, the same result.

    Args:
        model: the target.
        drafter: an `EagleHead`, a folder, a Hub id, or `"auto"` to look the target up in the drafter table. None: what
            the model's generation config names as `drafter`; nothing there: plain decoding on the same engine.
        microspec: options, see `MicroSpecConfig`.
        streamer, tokenizer, stop_strings, stopping_criteria, generate_arguments: as for `generate`. A streamer that has
            a method `begin_round(num_emitted)` is told before it gets the tokens of one target pass; the last of them
            is the target's own, the others are accepted drafts.

    Raises:
        ValueError: the request cannot be served exactly. Nothing has been computed then.
    """
    decode = functools.partial(generate, drafter=drafter, microspec=microspec, streamer=streamer)
    functools.update_wrapper(decode, generate)
    try:
        refuse_request(model, generate_arguments)
        criteria = StoppingCriteriaList(stopping_criteria or [])
        for configured in (generate_arguments.get("generation_config"), model.generation_config):
            if stop_strings is None and configured is not None:
                stop_strings = configured.stop_strings
        if stop_strings is not None:
            if tokenizer is None:
                raise ValueError(
                    "stop_strings needs the tokenizer: call generate(..., stop_strings=..., tokenizer=tokenizer)."
                )
            criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
            generate_arguments = without_stop_strings(**generate_arguments)
        original = getattr(GenerationMixin.generate, "_microspec_original", GenerationMixin.generate)
        return original(  # type: ignore[no-any-return]
            model, custom_generate=decode, streamer=streamer, stopping_criteria=criteria, **generate_arguments
        )
    finally:
        if streamer is not None:  # also after a refusal: whoever reads the stream is told that nothing comes
            streamer.end()


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter | None = None,
    microspec: MicroSpecConfig | Mapping[str, Any] | None = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> MicroSpecOutput | Tensor:
    """The decoding method, for `model.generate(..., custom_generate=microspec_hf.generate)`; see `run`.

    Args:
        model: the target.
        input_ids: int64 `[B, L]`, left-padded where the rows differ in length.
        logits_processor, stopping_criteria, generation_config: as `generate` prepared them.
        drafter, microspec: see `run`.
        streamer: receives single tokens, `[1]` each.
        model_kwargs: what `generate` prepared for the forward; anything that is not understood is refused.
    """
    config = MicroSpecConfig.coerce(microspec)
    target = Target(model)
    _refuse_generation(model, generation_config)
    prompts = _prompts(input_ids, model_kwargs)
    cache = caller_cache(model_kwargs, [prompt for _, prompt in prompts], input_ids.shape[1])
    head = _resolve_drafter(model, target, drafter, generation_config)
    wants_scores, wants_logits, wants_hidden_states = (
        bool(generation_config.return_dict_in_generate and asked)
        for asked in (
            generation_config.output_scores,
            generation_config.output_logits,
            generation_config.output_hidden_states,
        )
    )
    record = Record(wants_scores or wants_logits, wants_hidden_states)
    stops = Stops(stopping_criteria, shows_scores=wants_scores)
    for _, prompt in prompts:
        target.refuse_length(prompt.shape[0], stops.max_length - input_ids.shape[1] + prompt.shape[0])
    if len(prompts) > 1:
        _refuse_batch(generation_config, stops, streamer)
        refuse_processors_of_batch(logits_processor)
    make_vocabulary(config.vocabulary, target.head, sorted(stops.ids), top_k=1)  # refuses lists that do not fit
    check_tree_pass(target)
    if head is None or isinstance(config.tree, TreeConfig):
        tree, pace = config.tree if isinstance(config.tree, TreeConfig) else TreeConfig(), Pace()
    else:
        choice = choose_tree(target, head)
        # The cost was measured for one text; a batch of several finds its own.
        target = target.with_few_rows() if choice.few_rows else target
        tree, pace = choice.tree, Pace(surely_pays=choice.cost) if len(prompts) == 1 else Pace()
    rows = [
        (TokenRule(processors_of_row(logits_processor, row), bool(generation_config.do_sample), padding), prompt)
        for row, (padding, prompt) in enumerate(prompts)
    ]
    longest = max(prompt.shape[0] for _, prompt in rows)
    plan = Plan(
        head,
        config,
        tree,
        sorted(stops.ids),
        num_rows=len(rows),
        length=longest + int(min(stops.max_length - input_ids.shape[1], AHEAD_ROWS)) + 2 * WORD,
        is_capturable=not wants_hidden_states and all(rule.is_history_free for rule, _ in rows),
    )
    with open_sessions(target, plan) as sessions:
        import_cache(cache, sessions[0].cache)
        texts = write(sessions, rows, config, stops, streamer, record, pace)
        sequences = _sequences(texts, input_ids, generation_config)
        _fill(cache, target, texts, sequences, input_ids.shape[1])
    return _output(texts, sequences, generation_config, cache)


def _prompts(input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[tuple[Tensor | None, Tensor]]:
    """Padding and prompt of each row of a left-padded batch; refuses other padding and the caller's own positions."""
    if input_ids.shape[1] == 0:
        raise ValueError("The prompt is empty; speculation starts from at least one token of input_ids.")
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(input_ids)
    if mask.ndim != 2 or mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must be two-dimensional, {tuple(input_ids.shape)} like input_ids, got {tuple(mask.shape)}."
        )
    lengths = mask.bool().sum(dim=1).tolist()
    rows = []
    for row, keep, length in zip(input_ids, mask.bool(), lengths, strict=True):
        if length == 0 or not bool(keep[-length:].all()):
            raise ValueError(
                "attention_mask hides tokens that are not padding on the left. "
                'Speculation needs unbroken prompts; set tokenizer.padding_side = "left".'
            )
        rows.append((row[:-length] if length < row.shape[0] else None, row[-length:]))
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.shape[-1] == input_ids.shape[1]:
        expected = mask.long().cumsum(-1) - 1
        given = positions.expand(*positions.shape[:-2], *expected.shape)  # some models count in several ways at once
        if not torch.equal(given[..., mask.bool()], expected.expand_as(given)[..., mask.bool()]):
            raise ValueError("position_ids of the caller's own are not supported; leave them out.")
    return rows


def _refuse_generation(model: PreTrainedModel, config: GenerationConfig) -> None:
    """What cannot be exact, refused before any work with the way out."""
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={config.num_beams}: beam search keeps several texts alive and cannot be speculated on. "
            "Use num_beams=1, or call generate without custom_generate."
        )
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"The generation config asks for {mode.value.replace('_', ' ')}; speculation serves greedy decoding and "
            "sampling. Remove its options, or call generate without custom_generate."
        )
    if not config.use_cache:
        raise ValueError("use_cache=False: speculation keeps the target's KV cache. Leave use_cache at its default.")
    if config.return_dict_in_generate and config.output_attentions:
        raise ValueError(
            "output_attentions is not available with speculation: the rows of a tree attend to rejected drafts' rows "
            "too. Run model(sequences, output_attentions=True) on the result instead."
        )


def _refuse_batch(config: GenerationConfig, stops: Stops, streamer: Any) -> None:
    """What several rows cannot have, since they do not grow by the same number of tokens."""
    if streamer is not None:
        raise ValueError("A streamer follows one text at a time, and there are several; pass one prompt.")
    if config.return_dict_in_generate and (config.output_scores or config.output_logits or config.output_hidden_states):
        raise ValueError(
            "output_scores, output_logits and output_hidden_states are given for one sequence at a time; pass one "
            "prompt."
        )
    if stops.others and not stops.ids:
        raise ValueError(
            "Without an end token, plain generate writes on behind the stop of one row until all rows have stopped. "
            "Set eos_token_id and pad_token_id, or pass one prompt at a time."
        )


def _resolve_drafter(
    model: PreTrainedModel, target: Target, drafter: Drafter | None, config: GenerationConfig
) -> EagleHead | None:
    chosen = drafter if drafter is not None else getattr(config, "drafter", None)
    chosen = chosen if chosen is not None else getattr(model.generation_config, "drafter", None)
    if chosen is None:
        logger.warning_once(
            "No drafter was named, so that decoding is plain. Pass drafter=<Hub id, folder or EagleHead>, set "
            'model.generation_config.drafter, or pass drafter="auto" for a target of the drafter table '
            "(microspec_hf.drafters.KNOWN)."
        )
        return None
    if chosen == "auto":
        chosen = find_drafter(model)
    head = _load_once(model, chosen, target)
    check_pair(head, target.config, str(getattr(model.config, "_name_or_path", "")))
    return head


_heads: WeakKeyDictionary[PreTrainedModel, dict[Any, EagleHead]] = WeakKeyDictionary()


def _load_once(model: PreTrainedModel, source: Drafter, target: Target) -> EagleHead:
    """Load a drafter, or find it as an earlier call with this target left it; a head of the caller's is never kept."""
    where: dict[str, Any] = {"dtype": target.dtype, "device": target.head.device}
    if isinstance(source, EagleHead):
        return load_drafter(source, **where)
    loaded = _heads.setdefault(model, {})
    key = (str(source), *where.values())
    if key not in loaded:
        loaded[key] = load_drafter(source, **where)
    return loaded[key]


def _sequences(texts: Sequence[Progress], input_ids: Tensor, config: GenerationConfig) -> Tensor:
    pad = config._pad_token_tensor
    longest = max(len(text.new_ids) for text in texts)
    fill = 0 if pad is None else int(pad)
    rows = []
    for prompt, text in zip(input_ids, texts, strict=True):
        new = text.new_ids
        rows.append(torch.cat([prompt, new, new.new_full((longest - new.shape[0],), fill)]))
    return torch.stack(rows)


def _fill(cache: Cache, target: Target, texts: Sequence[Progress], sequences: Tensor, prompt_width: int) -> None:
    """Leave in the call's cache what plain `generate` does: rows of all tokens but the last of the longest text.

    Where a text ended before it, plain `generate` goes on to read padding, and so does the target here.
    """
    length = sequences.shape[1] - 1
    caches, padding = [], []
    for text, ids in zip(texts, sequences, strict=True):
        assert text.cache is not None
        text.cache.length = text.length - 1
        left = prompt_width - text.text.state.prompt_length
        if unread := length - left - text.cache.length:
            read(target, ids[length - unread : length], text.cache)
        caches.append(text.cache)
        padding.append(left)
    export_cache(caches, padding, length, cache)


def _output(
    texts: Sequence[Progress], sequences: Tensor, config: GenerationConfig, cache: Cache
) -> MicroSpecOutput | Tensor:
    if not config.return_dict_in_generate:
        return sequences
    text = texts[0]
    return MicroSpecOutput(
        sequences=cast(torch.LongTensor, sequences),
        scores=cast(Any, tuple(text.scores)) if config.output_scores else None,
        logits=cast(Any, tuple(text.logits)) if config.output_logits else None,
        hidden_states=cast(Any, tuple(text.hidden_states)) if config.output_hidden_states else None,
        stats=[t.stats for t in texts],
        **cast(dict[str, Any], {cache_field(): cache}),
    )
