"""How much of what is drafted the target accepts, by draft vocabulary, task and tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from microspec_hf.config import MicroSpecConfig, VocabularyConfig
from microspec_hf.eagle import EagleHead
from microspec_hf.evaluation.decoding import decode
from microspec_hf.evaluation.metrics import acceptance_length, summarize
from microspec_hf.evaluation.prompts import Prompt, Tokenizer, prompt_ids
from microspec_hf.stats import SpeculationStats
from microspec_hf.vocabulary import load_token_ids

OVERALL = "all"
"""The `task` of the record over all tasks."""


def measure_acceptance(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    drafter: EagleHead | str | Path,
    prompts: Sequence[Prompt],
    config: MicroSpecConfig,
    max_new_tokens: int,
    on_progress: Callable[[], None] = lambda: None,
) -> list[SpeculationStats]:
    """Answer the first turn of every prompt greedily under one configuration: the counters of each answer.

    Every pass drafts (`fallback` is off), so that no counter depends on measured times.

    Args:
        tokenizer: the target's, or a function that gives a prompt's ids int64 `[1, L]`.
        on_progress: called after each answer.
    """
    config = replace(config, fallback=False)
    stats = []
    for prompt in prompts:
        stats.append(decode(model, drafter, prompt_ids(tokenizer, prompt), config, max_new_tokens)[1])
        on_progress()
    return stats


def task_records(vocabulary: str, prompts: Sequence[Prompt], stats: Sequence[SpeculationStats]) -> list[dict[str, Any]]:
    """One record for each task, in order of appearance, and one over all of them; see `metrics.summarize`.

    Args:
        vocabulary: name of the draft vocabulary.
        prompts, stats: the prompts, and the counters of the answer to each.
    """
    by_task: dict[str, list[SpeculationStats]] = {}
    for prompt, answer in zip(prompts, stats, strict=True):
        by_task.setdefault(prompt.task, []).append(answer)
    return [
        {"vocabulary": vocabulary, "task": task} | summarize(answers)
        for task, answers in [*by_task.items(), (OVERALL, list(stats))]
    ]


def expected_acceptance(
    measured: Mapping[tuple[int, int], Sequence[SpeculationStats]],
) -> dict[str, dict[str, float]]:
    """The table that `tree="auto"` reads from a drafter's `config.json`: acceptance length by depth and
    nodes.

    Args:
        measured: the counters of the answers under each tree, by (depth, num_nodes).

    Returns:
        `{"depth": {"nodes": tau}}`, with JSON's text keys in ascending order.
    """
    table: dict[str, dict[str, float]] = {}
    for (depth, nodes), stats in sorted(measured.items()):
        table.setdefault(str(depth), {})[str(nodes)] = round(acceptance_length(stats), 3)
    return table


def parse_vocabulary(text: str, static_list: str | Path | None = None) -> VocabularyConfig:
    """The vocabulary that `full`, `dynamic`, `static` or `static:SIZE` names.

    Args:
        text: its name.
        static_list: file with the ids of a static vocabulary, see `vocabulary.load_token_ids`.

    Raises:
        ValueError: an unknown name, or a static vocabulary without a list or longer than its list.
    """
    kind, _, size = text.partition(":")
    if kind in ("full", "dynamic") and not size:
        return VocabularyConfig(kind="full" if kind == "full" else "dynamic")
    if kind != "static" or not (size.isdigit() or text == "static"):
        raise ValueError(f"A vocabulary is full, dynamic, static or static:SIZE such as static:8192, got {text!r}.")
    if static_list is None:
        raise ValueError(
            f"The vocabulary {text} needs a file with its ids: FR-Spec's freq_*.pt, or a JSON list that "
            "microspec_hf.vocabulary.save_token_ids wrote."
        )
    return VocabularyConfig(kind="static", token_ids=load_token_ids(static_list), size=int(size) if size else None)
