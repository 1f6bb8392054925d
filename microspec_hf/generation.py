"""The strategy as `generate` sees it: entry points, argument checks, stopping, streaming, output objects."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationMode,
    MaxLengthCriteria,
    StopStringCriteria,
)

from microspec_hf.autotune import choose_tree
from microspec_hf.candidate_generator import MicroSpecCandidateGenerator
from microspec_hf.config import MicroSpecConfig, TreeConfig
from microspec_hf.drafters import find_drafter
from microspec_hf.eagle import EagleHead, check_pair, load_drafter
from microspec_hf.hf import (
    Target,
    TreeCache,
    caller_cache,
    check_tree_pass,
    export_cache,
    processors_of_row,
    refuse_processors_of_batch,
    refuse_request,
)
from microspec_hf.loop import Emission, prefill, step
from microspec_hf.stats import SpeculationStats
from microspec_hf.verification import TokenRule
from microspec_hf.vocabulary import make_vocabulary

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
            the model's generation config names as `drafter`.
        microspec: options, see `MicroSpecConfig`.
        streamer, tokenizer, stop_strings, stopping_criteria, generate_arguments: as for `generate`. A streamer that has
            a method `begin_round(num_emitted)` is told before it gets the tokens of one target pass; the last of them
            is the target's own, the others are accepted drafts.

    Raises:
        ValueError: the request cannot be served exactly. Nothing has been computed then.
    """
    decode = functools.partial(generate, drafter=drafter, microspec=microspec, streamer=streamer)
    functools.update_wrapper(decode, generate)
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
        generate_arguments = _without_stop_strings(**generate_arguments)
    try:
        original = getattr(GenerationMixin.generate, "_microspec_original", GenerationMixin.generate)
        return original(  # type: ignore[no-any-return]
            model, custom_generate=decode, streamer=streamer, stopping_criteria=criteria, **generate_arguments
        )
    finally:
        if streamer is not None:
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
    caller_cache(model_kwargs)
    prompts = _prompts(input_ids, model_kwargs)
    head = _resolve_drafter(model, target, drafter, generation_config)
    stops = _Stops(stopping_criteria)
    if len(prompts) > 1:
        _refuse_batch(generation_config, stops, streamer)
        refuse_processors_of_batch(logits_processor)
    make_vocabulary(config.vocabulary, target.head, sorted(stops.ids), top_k=1)  # refuses lists that do not fit
    check_tree_pass(target)
    tree = choose_tree(target, head) if config.tree == "auto" else config.tree
    assert isinstance(tree, TreeConfig)
    record = bool(
        generation_config.return_dict_in_generate
        and (generation_config.output_scores or generation_config.output_logits)
    )
    texts = []
    for row, (padding, prompt) in enumerate(prompts):
        rule = TokenRule(processors_of_row(logits_processor, row), bool(generation_config.do_sample), padding)
        vocabulary = make_vocabulary(config.vocabulary, target.head, sorted(stops.ids), tree.top_k)
        generator = MicroSpecCandidateGenerator(target, head, vocabulary, tree)
        texts.append(_decode(target, generator, prompt, rule, stops, config.prefill_chunk, streamer, record))
    return _output(target, texts, input_ids, generation_config)


@dataclass
class _Text:
    """One finished sequence and what was recorded on the way."""

    ids: Tensor
    prompt_length: int
    stats: SpeculationStats
    cache: TreeCache
    scores: tuple[Tensor, ...]
    logits: tuple[Tensor, ...]


def _decode(
    target: Target,
    drafter: MicroSpecCandidateGenerator,
    prompt: Tensor,
    rule: TokenRule,
    stops: _Stops,
    chunk: int,
    streamer: Any,
    record: bool,
) -> _Text:
    stats = SpeculationStats(num_levels=drafter.tree.num_levels, tree=vars(drafter.tree).copy())
    scores: list[Tensor] = []
    logits: list[Tensor] = []
    started = time.perf_counter()
    state, emission = prefill(target, drafter, prompt, rule, chunk, record)
    stats.prefill_seconds = time.perf_counter() - started
    length = prompt.shape[0]
    while True:
        text = state.ids if rule.padding is None else torch.cat([rule.padding, state.ids])
        count, stopped = _take(text, text.shape[0] - len(emission.tokens), emission, stops, streamer)
        if record:
            assert emission.logits is not None
            assert emission.scores is not None
            logits += emission.logits[:count].split(1)
            scores += emission.scores[:count].split(1)
        length += count
        if stopped:
            break
        emission = step(target, drafter, state, rule, record)
        stats.emitted.append(len(emission.tokens))
    stats.decode_seconds = time.perf_counter() - started - stats.prefill_seconds
    stats.new_tokens = length - state.prompt_length
    seen = drafter.vocabulary.statistics()
    stats.coverage, stats.mean_active_vocabulary = seen.coverage, seen.mean_active
    stats.rows_gathered, stats.evicted = seen.rows_gathered, seen.evicted
    return _Text(state.ids[:length], state.prompt_length, stats, state.cache, tuple(scores), tuple(logits))


def _take(ids: Tensor, length: int, emission: Emission, stops: _Stops, streamer: Any) -> tuple[int, bool]:
    """Offer the new tokens to the stopping criteria one by one: how many are kept, and whether the text ends."""
    if hasattr(streamer, "begin_round"):  # beyond transformers' interface: tells accepted drafts from the bonus token
        streamer.begin_round(len(emission.tokens))
    for count, token in enumerate(emission.tokens, start=1):
        if streamer is not None:
            streamer.put(torch.tensor([token]))
        scores = None if emission.scores is None else (emission.scores[count - 1 : count],)
        if stops(ids[: length + count], token, scores):
            return count, True
    return len(emission.tokens), False


class _Stops:
    """`generate`'s stopping criteria; the two that every call has are answered without touching the device."""

    def __init__(self, criteria: StoppingCriteriaList):
        self.max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=math.inf)
        eos = [c for c in criteria if type(c) is EosTokenCriteria]
        self.ids = frozenset(i for c in eos for i in c.eos_token_id.flatten().tolist())
        self.others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]

    def __call__(self, ids: Tensor, token: int, scores: Any) -> bool:
        # Every custom criterion is asked, also after another has said stop: plain generate does so, and some count.
        answers = [bool(torch.as_tensor(criterion(ids[None], scores)).all()) for criterion in self.others]
        return ids.shape[0] >= self.max_length or token in self.ids or any(answers)


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
        given = positions.expand_as(expected)
        if not torch.equal(given[mask.bool()], expected[mask.bool()]):
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
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise ValueError(
            "output_attentions and output_hidden_states are not available with speculation: a tree pass computes them "
            "for rejected tokens too. Run model(sequences, output_hidden_states=True) on the result instead."
        )


def _refuse_batch(config: GenerationConfig, stops: _Stops, streamer: Any) -> None:
    """What several rows cannot have, since they are written one after the other."""
    if streamer is not None:
        raise ValueError("A streamer follows one text at a time, and there are several; pass one prompt.")
    if config.return_dict_in_generate and (config.output_scores or config.output_logits):
        raise ValueError("output_scores and output_logits are given for one sequence at a time; pass one prompt.")
    if stops.others and not stops.ids:
        raise ValueError(
            "Without an end token, plain generate writes on behind the stop of one row until all rows have stopped. "
            "Set eos_token_id and pad_token_id, or pass one prompt at a time."
        )


def _resolve_drafter(
    model: PreTrainedModel, target: Target, drafter: Drafter | None, config: GenerationConfig
) -> EagleHead:
    chosen = drafter if drafter is not None else getattr(config, "drafter", None)
    chosen = chosen if chosen is not None else getattr(model.generation_config, "drafter", None)
    if chosen is None:
        raise ValueError(
            "No drafter was named. Pass drafter=<Hub id, folder or EagleHead>, set model.generation_config.drafter, "
            'or pass drafter="auto" for a target of the drafter table (microspec_hf.drafters.KNOWN).'
        )
    if chosen == "auto":
        chosen = find_drafter(model)
    head = _load_once(model, chosen, target)
    check_pair(head, target.config, str(getattr(model.config, "_name_or_path", "")))
    return head


_heads: WeakKeyDictionary[PreTrainedModel, dict[Any, EagleHead]] = WeakKeyDictionary()


def _load_once(model: PreTrainedModel, source: Drafter, target: Target) -> EagleHead:
    """Load a drafter, or find it as an earlier call with this target left it; a head of the caller's is never kept."""
    where: dict[str, Any] = {"dtype": target.dtype, "device": target.head.weight.device}
    if isinstance(source, EagleHead):
        return load_drafter(source, **where)
    loaded = _heads.setdefault(model, {})
    key = (str(source), *where.values())
    if key not in loaded:
        loaded[key] = load_drafter(source, **where)
    return loaded[key]


def _output(
    target: Target, texts: list[_Text], input_ids: Tensor, config: GenerationConfig
) -> MicroSpecOutput | Tensor:
    pad = config._pad_token_tensor
    longest = max(text.ids.shape[0] - text.prompt_length for text in texts)
    fill = 0 if pad is None else int(pad)
    rows = []
    for prompt, text in zip(input_ids, texts, strict=True):
        new = text.ids[text.prompt_length :]
        rows.append(torch.cat([prompt, new, new.new_full((longest - new.shape[0],), fill)]))
    sequences = torch.stack(rows)
    if not config.return_dict_in_generate:
        return sequences
    text = texts[0]
    return MicroSpecOutput(
        sequences=cast(torch.LongTensor, sequences),
        scores=cast(Any, text.scores) if config.output_scores else None,
        logits=cast(Any, text.logits) if config.output_logits else None,
        stats=[t.stats for t in texts],
        **cast(
            dict[str, Any], export_cache(target.config, text.cache, text.ids.shape[0] - 1) if len(texts) == 1 else {}
        ),
    )


class _WithoutStopStrings(GenerationConfig):
    """Does not take over the stop strings of the model's own generation config, as `generate` has every other do.

    `generate` would make their criterion itself, for which it needs the tokenizer that it does not hand to a callable.
    """

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs: Any) -> dict[str, Any]:
        kwargs.pop("stop_strings", None)
        return super().update(defaults_only, allow_custom_entries, **kwargs)  # type: ignore[no-any-return, no-untyped-call]


def _without_stop_strings(generation_config: GenerationConfig | None = None, **arguments: Any) -> dict[str, Any]:
    """The arguments of a `generate` call that leaves stop strings alone."""
    config = _WithoutStopStrings()  # type: ignore[no-untyped-call]
    if generation_config is None:
        named = {name: value for name, value in arguments.items() if value is not None}
        left = config.update(**named)
        arguments = {name: value for name, value in arguments.items() if name not in named or name in left}
    else:
        vars(config).update(copy.deepcopy(vars(generation_config)), stop_strings=None)
    return arguments | {"generation_config": config}
