"""Random questions to `generate`: option sets, prompts, stops, trees and drafters, and what both strategies answer.

Targets are float64: their texts do not depend on the shapes of the passes, so that a difference is always a fault.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

import microspec_hf
from microspec_hf import MicroSpecConfig, TreeConfig, VocabularyConfig
from tests.doubles import SCRIPTS, Script, proposing, random_prompt, random_tree
from tests.promises.support import (
    Setting,
    call,
    drafts_along,
    ids_of,
    repeatable_draws,
    same_output,
    speculate,
    tokenizer,
    unheard,
)
from tests.tiny import TINY_MODELS

SMALLEST_VOCABULARY = 97
TOKENS = st.integers(0, SMALLEST_VOCABULARY - 1)
Ask = dict[str, Any]


class OnceForEachToken(LogitsProcessor):
    """A processor with a memory: it forbids by how often it was called, and keeps what it saw."""

    def __init__(self, period: int):
        self.period, self.prefixes = period, list[list[int]]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.append(input_ids[0].tolist())
        count = len(self.prefixes)
        forbidden = torch.arange(scores.shape[1]) % self.period == count % self.period
        return scores.masked_fill(forbidden, -torch.inf)


class CountingStop(StoppingCriteria):
    """Stops at ids of one residue class, and keeps what it saw."""

    def __init__(self, period: int):
        self.period, self.texts = period, list[list[int]]()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.texts.append(input_ids[0].tolist())
        return input_ids[:, -1] % self.period == 0


class Recorder:
    """A streamer that keeps the values that it is given."""

    def __init__(self) -> None:
        self.values: list[list[int]] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.values.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


def _allowed(period: int) -> Callable[[int, Tensor], list[int]]:
    return lambda batch, ids: [t for t in range(SMALLEST_VOCABULARY) if (t + int(ids[-1])) % period]


def _some(tokens: st.SearchStrategy[int], at_most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(tokens, min_size=1, max_size=at_most, unique=True)


GREEDY: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([0.7, 1.05, 1.3, 2.5]),
    "encoder_repetition_penalty": st.sampled_from([0.8, 1.5]),
    "no_repeat_ngram_size": st.integers(1, 3),
    "encoder_no_repeat_ngram_size": st.integers(1, 2),
    "bad_words_ids": st.lists(st.lists(TOKENS, min_size=1, max_size=2), min_size=1, max_size=12),
    "suppress_tokens": _some(TOKENS, 60),
    "begin_suppress_tokens": _some(TOKENS, 60),
    "sequence_bias": st.lists(  # older releases refuse id 0 here
        st.tuples(st.lists(TOKENS.filter(bool), min_size=1, max_size=2), st.sampled_from([-8.0, 3.0, 8.0])).map(list),
        min_size=1,
        max_size=12,
        unique_by=lambda entry: tuple(entry[0]),
    ),
    "forced_bos_token_id": TOKENS,
    "forced_eos_token_id": TOKENS,
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 6), st.sampled_from([1.01, 1.3])),
    "renormalize_logits": st.just(True),
    "remove_invalid_values": st.just(True),
    "guidance_scale": st.sampled_from([0.5, 1.4, 3.0]),
    "watermarking_config": st.sampled_from(
        [WatermarkingConfig(bias=3.0), SynthIDTextWatermarkingConfig(ngram_len=3, keys=[7, 11, 13, 17])]
    ),
    "prefill_chunk_size": st.integers(1, 5),
    "cache_implementation": st.just("static"),
}
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.3, 1.4, 3.0]),
    "top_k": st.integers(1, 20),
    "top_p": st.sampled_from([0.4, 0.9]),
    "min_p": st.sampled_from([0.05, 0.4]),
    "top_h": st.sampled_from([0.3, 0.7]),
    "typical_p": st.sampled_from([0.3, 0.9]),
    "epsilon_cutoff": st.sampled_from([0.01, 0.1]),
    "eta_cutoff": st.sampled_from([0.01, 0.1]),
}
STOPS: dict[str, st.SearchStrategy[Any]] = {
    "eos_token_id": st.one_of(TOKENS, st.lists(TOKENS, min_size=10, max_size=25, unique=True)),
    "min_length": st.integers(1, 30),
    "min_new_tokens": st.integers(1, 12),
    "stop_strings": st.lists(st.text("abcdefgh019", min_size=1, max_size=2), min_size=1, max_size=4),
}
"""`remove_invalid_values` and the others of which nothing shows here are shown in `table.py`."""
OBJECTS: dict[str, st.SearchStrategy[Any]] = {
    "logits_processor": st.integers(2, 9),
    "stopping_criteria": st.integers(4, 30),
    "prefix_allowed_tokens_fn": st.integers(2, 9),
    "streamer": st.just(True),
    "ids only": st.just(True),
    "callable": st.just(True),
}
NAMES = [*GREEDY, *SAMPLING, *STOPS, *OBJECTS]


@dataclass(frozen=True)
class Question:
    """One random call. `flags` go to `generate` as they are; `objects` say how its stateful arguments are made."""

    family: str
    prompt_length: int
    prompt_seed: int
    max_new_tokens: int
    script: str | int
    tree: TreeConfig
    vocabulary: VocabularyConfig
    prefill_chunk: int
    flags: Ask = field(default_factory=dict)
    objects: Ask = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What a call gave, and what its stateful arguments saw."""

    output: Any
    prefixes: list[list[int]]
    texts: list[list[int]]
    streamed: list[list[int]]
    ends: int


def _tree(depth: int, top_k: int, share: float) -> TreeConfig:
    return TreeConfig(depth, top_k, 1 + int(share * min(20, top_k + depth * top_k**2)))


TREES = st.builds(_tree, st.integers(0, 4), st.integers(1, 4), st.sampled_from([0.0, 0.3, 1.0]))
VOCABULARIES = st.one_of(
    st.just(VocabularyConfig(kind="full")),
    st.builds(VocabularyConfig, kind=st.just("static"), token_ids=_some(TOKENS, 40).map(tuple)),
    st.builds(
        VocabularyConfig,
        kind=st.just("dynamic"),
        max_rows=st.integers(1, 60),
        prompt_candidates=st.integers(0, 3),
        verify_candidates=st.integers(0, 3),
        verify_nodes=st.sampled_from(["all", "path"]),
        window=st.sampled_from(["lru", "stream"]),
    ),
)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    chosen = draw(st.sets(st.sampled_from([*GREEDY, *OBJECTS]), max_size=5))
    chosen |= draw(st.sets(st.sampled_from([*STOPS]), max_size=2))
    do_sample = draw(st.booleans())
    if do_sample:
        chosen |= draw(st.sets(st.sampled_from([*SAMPLING]), min_size=1, max_size=3))
    flags = {n: draw(strategy) for n, strategy in (GREEDY | SAMPLING | STOPS).items() if n in chosen}
    if isinstance(flags.get("watermarking_config"), SynthIDTextWatermarkingConfig) and not do_sample:
        del flags["watermarking_config"]  # its scores are a law to sample from
    if "eos_token_id" in flags or "exponential_decay_length_penalty" in flags:
        flags.setdefault("eos_token_id", 7)
        flags["pad_token_id"] = 0
    if "forced_eos_token_id" in flags and flags["forced_eos_token_id"] in flags.get("suppress_tokens", []):
        del flags["suppress_tokens"]  # refused by transformers
    if "forced_bos_token_id" in flags and flags["forced_bos_token_id"] in flags.get("suppress_tokens", []):
        del flags["suppress_tokens"]
    if "top_k" not in flags and do_sample:
        flags["top_k"] = 0
    return Question(
        family=draw(st.sampled_from([*TINY_MODELS])),
        prompt_length=draw(st.integers(1, 20)),
        prompt_seed=draw(st.integers(0, 9)),
        max_new_tokens=draw(st.sampled_from([12, 18, 24, 1, 2, 7])),
        script=draw(st.one_of(st.sampled_from([*SCRIPTS, "proposing", "head"]), st.integers(0, 99))),
        tree=draw(TREES),
        vocabulary=draw(VOCABULARIES),
        prefill_chunk=draw(st.sampled_from([1, 3, 8, 512])),
        flags=flags | {"do_sample": do_sample},
        objects={n: draw(strategy) for n, strategy in OBJECTS.items() if n in chosen},
    )


@functools.cache
def _target(family: str, dtype: torch.dtype = torch.float64) -> Any:
    return TINY_MODELS[family](dtype=dtype)


def where(question: Question) -> Setting:
    model = _target(question.family)
    return Setting(model, random_prompt(model, question.prompt_length, question.prompt_seed), ())


def answer(question: Question, decode: Callable[..., Any], **more: Any) -> Answer:
    """Put the question to one strategy, `call` or `speculate`."""
    processor = OnceForEachToken(question.objects.get("logits_processor", 2))
    criterion = CountingStop(question.objects.get("stopping_criteria", 2))
    streamer = Recorder()
    setting = where(question)
    ask = {"max_new_tokens": question.max_new_tokens} | question.flags | more
    if "logits_processor" in question.objects:
        ask["logits_processor"] = LogitsProcessorList([processor])
    if "stopping_criteria" in question.objects:
        ask["stopping_criteria"] = StoppingCriteriaList([criterion])
    if "prefix_allowed_tokens_fn" in question.objects:
        ask["prefix_allowed_tokens_fn"] = _allowed(question.objects["prefix_allowed_tokens_fn"])
    if "streamer" in question.objects:
        ask["streamer"] = streamer
    if "ids only" in question.objects:
        ask["return_dict_in_generate"] = False
    if "stop_strings" in question.flags:
        ask["tokenizer"] = tokenizer(SMALLEST_VOCABULARY)
    with repeatable_draws(seed=question.prompt_seed):
        output = decode(setting, **ask)
    return Answer(output, processor.prefixes, criterion.texts, streamer.values, streamer.ends)


def script_of(question: Question, expected: Answer) -> Script:
    if isinstance(question.script, int):
        return random_tree(question.script, num_nodes=30)
    if question.script == "proposing":
        return proposing(int(ids_of(expected.output)[0, -1]))
    return SCRIPTS[question.script]


def compare(question: Question) -> set[str]:
    """Both strategies answer alike, in all that can be seen from outside.

    Returns:
        what the question made happen, to be counted: the names of its options, `accepted`, `stopped`.
    """
    expected = answer(question, call)
    tree = question.tree if question.script == "head" else TreeConfig(question.tree.depth, top_k=60, num_nodes=60)
    ours: Ask = {"microspec": MicroSpecConfig(tree, question.vocabulary, question.prefill_chunk)}
    if "callable" in question.objects:
        ours["custom_generate"] = microspec_hf.generate
    with nullcontext() if question.script == "head" else drafts_along(script_of(question, expected), expected.output):
        got = answer(question, speculate, **ours)
    same_output(expected.output, got.output)
    assert got.texts == expected.texts, "a criterion is asked for each token, in order, and not behind the stop"
    assert got.streamed == expected.streamed, "single tokens, in order, the prompt first"
    assert got.ends == expected.ends
    assert got.prefixes == expected.prefixes, "true prefixes, in order, each once"
    new = ids_of(expected.output).shape[1] - question.prompt_length
    happened = {*question.flags, *question.objects}
    if not isinstance(got.output, Tensor) and any(n > 1 for n in got.output.stats[0].emitted):
        happened.add("accepted")
    if new < question.max_new_tokens:
        happened.add("stopped")
    return happened


# Batches ------------------------------------------------------------------------------------------------------------

OF_ONE_PROMPT = ("guidance_scale", "encoder_no_repeat_ngram_size", "watermarking_config", "prefill_chunk_size")
"""Refused for several prompts, or not of batches: they are shown by `questions`."""


@dataclass(frozen=True)
class BatchQuestion:
    """One random call with a left-padded batch."""

    family: str
    prompt_lengths: tuple[int, ...]
    max_new_tokens: int
    script: str | int
    flags: Ask


@st.composite
def batch_questions(draw: st.DrawFn) -> BatchQuestion:
    chosen = draw(st.sets(st.sampled_from([n for n in GREEDY if n not in OF_ONE_PROMPT]), max_size=3))
    do_sample = draw(st.booleans())
    if do_sample:
        chosen |= draw(st.sets(st.sampled_from([*SAMPLING]), min_size=1, max_size=2))
    flags = {n: draw(strategy) for n, strategy in (GREEDY | SAMPLING).items() if n in chosen}
    flags["eos_token_id"] = draw(st.lists(TOKENS, min_size=3, max_size=25, unique=True))
    for forced in ("forced_eos_token_id", "forced_bos_token_id"):
        if flags.get(forced) in flags.get("suppress_tokens", []):
            del flags["suppress_tokens"]
    if do_sample:
        flags.setdefault("top_k", 0)
    return BatchQuestion(
        family=draw(st.sampled_from([*TINY_MODELS])),
        prompt_lengths=tuple(draw(st.lists(st.integers(1, 12), min_size=2, max_size=4))),
        max_new_tokens=draw(st.sampled_from([10, 16, 1, 3])),
        script=draw(st.one_of(st.sampled_from([*SCRIPTS, "head"]), st.integers(0, 99))),
        flags=flags | {"do_sample": do_sample, "pad_token_id": 0},
    )


def compare_batch(question: BatchQuestion) -> set[str]:
    """Both strategies write the same rows. Returns what happened, as `compare` does."""
    # In float64 plain Gemma-2 answers NaN behind padding: its masks overflow where softmax computes in float32.
    model = _target(question.family, torch.float32 if question.family == "gemma2" else torch.float64)
    width = max(question.prompt_lengths)
    prompts = [random_prompt(model, length, seed) for seed, length in enumerate(question.prompt_lengths)]
    masks = [torch.ones_like(prompt) for prompt in prompts]
    padded, mask = (
        torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
        for rows in (prompts, masks)
    )
    setting = Setting(model, padded, ())
    usual = {"output_scores": False, "output_logits": False, "max_new_tokens": question.max_new_tokens}
    ask = usual | question.flags | {"attention_mask": mask}
    tree = TreeConfig(2, 3, 8) if question.script == "head" else TreeConfig(4, top_k=60, num_nodes=60)
    if question.script == "head":
        drafts: Any = nullcontext()
    with repeatable_draws():
        expected = call(setting, **ask)
        if question.script != "head":
            script = SCRIPTS[question.script] if isinstance(question.script, str) else random_tree(question.script, 30)
            drafts = drafts_along(script, expected, unheard(setting, ask))
        with drafts:
            got = speculate(setting, **ask, microspec={"tree": tree})
    same_output(expected, got)
    lengths = {stats.new_tokens for stats in got.stats}
    happened = {*question.flags}
    if any(n > 1 for stats in got.stats for n in stats.emitted):
        happened.add("accepted")
    if len(lengths) > 1:
        happened.add("ragged")
    return happened
