"""Plain `generate` and MicroSpec over the same prompts in one process: what `microspec demo` measures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.generation import BaseStreamer

from microspec_hf import EagleHead, MicroSpecConfig, SpeculationStats
from microspec_hf.evaluation import summarize
from microspec_hf.evaluation.decoding import GREEDY


@dataclass(frozen=True)
class Answer:
    """One call of `generate`: new ids, wall time of the call (prefill included), what speculation did."""

    ids: list[int]
    seconds: float
    stats: SpeculationStats | None = None


@dataclass
class Comparison:
    """Repeated answers to one prompt, both ways."""

    plain: list[Answer] = field(default_factory=list)
    microspec: list[Answer] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether every answer, of either way, has the same ids."""
        return all(answer.ids == self.plain[0].ids for answer in self.plain + self.microspec)

    @property
    def plain_seconds(self) -> float:
        """Median over the repeats."""
        return statistics.median(answer.seconds for answer in self.plain)

    @property
    def seconds(self) -> float:
        """Median over the repeats, with MicroSpec."""
        return statistics.median(answer.seconds for answer in self.microspec)

    @property
    def stats(self) -> SpeculationStats:
        """Of the last answer; greedy answers to one prompt all take the same rounds."""
        stats = self.microspec[-1].stats
        assert stats is not None
        return stats


def answer_plainly(
    model: Any,
    inputs: Mapping[str, Tensor],
    max_new_tokens: int,
    streamer: BaseStreamer | None = None,
) -> Answer:
    """The model's own `generate`, greedy."""
    started = time.perf_counter()
    sequences = model.generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **GREEDY)
    ids = sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return Answer(ids, time.perf_counter() - started)


def answer_with_microspec(
    model: Any,
    drafter: EagleHead,
    config: MicroSpecConfig,
    inputs: Mapping[str, Tensor],
    max_new_tokens: int,
    streamer: BaseStreamer | None = None,
    **arguments: Any,
) -> Answer:
    """`generate` with speculation; greedy unless the arguments say otherwise."""
    started = time.perf_counter()
    output = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        custom_generate="microspec",
        drafter=drafter,
        microspec=config,
        return_dict_in_generate=True,
        **(arguments or GREEDY),
    )
    ids = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return Answer(ids, time.perf_counter() - started, output.stats[0])


def compare(
    model: Any,
    drafter: EagleHead,
    config: MicroSpecConfig,
    prompts: Sequence[Mapping[str, Tensor]],
    max_new_tokens: int,
    repeats: int,
    on_progress: Callable[[], None] = lambda: None,
) -> list[Comparison]:
    """Answer every prompt `repeats` times both ways, in turn, so that a machine that slows down slows both.

    The caller warms up by answering each prompt once both ways before. Which way goes first alternates.
    """
    comparisons = [Comparison() for _ in prompts]
    for repeat in range(repeats):
        for inputs, comparison in zip(prompts, comparisons, strict=True):
            for way in ("plain", "microspec") if repeat % 2 == 0 else ("microspec", "plain"):
                if way == "plain":
                    comparison.plain.append(answer_plainly(model, inputs, max_new_tokens))
                else:
                    comparison.microspec.append(answer_with_microspec(model, drafter, config, inputs, max_new_tokens))
                on_progress()
    return comparisons


def summary(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Figures over all prompts, JSON-ready.

    Tokens a second are all new tokens over the sum of the prompts' median wall times, prefill included;
    `speedup` is the ratio of the two, `median_speedup` the median of the prompts' own ratios. The figures of
    speculation are `evaluation.summarize`'s.
    """
    new_tokens = sum(len(c.microspec[0].ids) for c in comparisons)
    plain = sum(len(c.plain[0].ids) for c in comparisons) / sum(c.plain_seconds for c in comparisons)
    ours = new_tokens / sum(c.seconds for c in comparisons)
    return summarize([comparison.stats for comparison in comparisons]) | {
        "tokens_per_second": ours,
        "plain_tokens_per_second": plain,
        "speedup": ours / plain,
        "median_speedup": statistics.median(c.plain_seconds / c.seconds for c in comparisons),
        "identical": all(comparison.identical for comparison in comparisons),
        "tree": comparisons[0].stats.tree,
    }


def record(comparison: Comparison) -> dict[str, Any]:
    """Figures of one prompt, JSON-ready, with every repeat's time."""
    return {
        "new_tokens": len(comparison.microspec[0].ids),
        "identical": comparison.identical,
        "acceptance_length": comparison.stats.acceptance_length,
        "speedup": comparison.plain_seconds / comparison.seconds,
        "plain_tokens_per_second": len(comparison.plain[0].ids) / comparison.plain_seconds,
        "tokens_per_second": len(comparison.microspec[0].ids) / comparison.seconds,
        "plain_seconds": [answer.seconds for answer in comparison.plain],
        "seconds": [answer.seconds for answer in comparison.microspec],
        "stats": comparison.stats.to_dict(),
    }
