"""A folder of results, read back, and the figures of its arms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microspec_hf.evaluation.acceptance import OVERALL
from microspec_hf.evaluation.answers import turn_stats
from microspec_hf.evaluation.arms import Arm
from microspec_hf.evaluation.metrics import summarize
from microspec_hf.evaluation.runner import PROVENANCE

FULL = "eagle2"
"""The arm whose acceptance length the others are measured against."""


@dataclass(frozen=True)
class Results:
    """What `evaluate` wrote.

    Args:
        name: of the folder.
        origin: its `provenance.json`.
        records: of each arm, in the order of the prompts; see `answers`.
    """

    name: str
    origin: dict[str, Any]
    records: dict[str, list[dict[str, Any]]]

    @property
    def tasks(self) -> list[str]:
        """In the order of their first prompts, then `OVERALL`."""
        tasks = dict.fromkeys(record["category"] for records in self.records.values() for record in records)
        return [*tasks, OVERALL]

    def of_task(self, arm: str, task: str) -> list[dict[str, Any]]:
        """The records of an arm and a task, or of all tasks."""
        return [record for record in self.records[arm] if task in (OVERALL, record["category"])]


def read_results(folder: str | Path) -> Results:
    """Read a folder that `evaluate` wrote.

    Raises:
        FileNotFoundError: it holds no finished evaluation.
        ValueError: a file holds something else; the message names it, and the line.
    """
    folder = Path(folder)
    file = folder / PROVENANCE
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} holds no finished evaluation (no {PROVENANCE}). Make one with examples/evaluate.py; run the "
            "same command again if it was interrupted."
        )
    origin = json.loads(file.read_text(encoding="utf-8"))
    if "arms" not in origin:
        raise ValueError(f"{file} was not written by examples/evaluate.py: it names no arms.")
    records = {}
    for arm in origin["arms"]:
        path = folder / Arm(arm).file_name
        if not path.is_file():
            raise FileNotFoundError(f"{folder} lacks {path.name}, the answers of the arm {arm}.")
        records[arm] = [
            _read_record(path, n, line) for n, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        ]
    return Results(folder.name, origin, records)


def arm_figures(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`metrics.summarize` over the turns of some records, and their speed.

    Returns:
        Beside the figures of `summarize`: `prompts`, `turns`, `seconds`, `tokens_per_second` (all new tokens over all
        wall time, prefill included), `mean_tokens_per_second` (mean over the prompts of each one's own),
        `prefill_seconds` (mean of a turn), `prefill_share` of the wall time, and `draft_ms`, the drafting of a round
        where it was measured (`MicroSpecConfig.time_drafts`); each None where there is nothing of the kind.

    Raises:
        ValueError: there is no record.
    """
    stats = [turn for record in records for turn in turn_stats(record)]
    figures = summarize(stats)
    choices = [record["choices"][0] for record in records]
    seconds = [sum(choice.get("wall_time", [])) for choice in choices]
    tokens = [sum(choice.get("new_tokens", [])) for choice in choices]
    speeds = [count / time for count, time in zip(tokens, seconds, strict=True) if time]
    prefills = [turn["prefill_seconds"] for choice in choices for turn in choice.get("stats", []) if turn]
    drafting = sum(turn.draft_seconds for turn in stats)
    return figures | {
        "prompts": len(records),
        "turns": len(stats),
        "seconds": sum(seconds),
        "tokens_per_second": sum(tokens) / sum(seconds) if sum(seconds) else 0.0,
        "mean_tokens_per_second": sum(speeds) / len(speeds) if speeds else 0.0,
        "prefill_seconds": sum(prefills) / len(prefills) if prefills else None,
        "prefill_share": sum(prefills) / sum(seconds) if prefills and sum(seconds) else None,
        "draft_ms": 1000 * drafting / figures["rounds"] if drafting and figures["rounds"] else None,
    }


def main_table(results: Results) -> list[dict[str, Any]]:
    """One row for each arm and task, and over all tasks.

    `relative_acceptance` is the acceptance length over that of `FULL`, `speedup` the mean tokens a second over those
    of the fastest plain arm, named in `baseline`; both on the same prompts, and None without such an arm.
    """
    figures = {
        (arm, task): arm_figures(results.of_task(arm, task)) for arm in results.records for task in results.tasks
    }
    baseline = fastest_plain(results)
    rows = []
    for (arm, task), found in figures.items():
        full = figures.get((FULL, task))
        plain = figures.get((baseline, task)) if baseline else None
        rows.append(
            {"arm": arm, "task": task, **{k: v for k, v in found.items() if k != "acceptance_by_depth"}}
            | {
                "relative_acceptance": found["acceptance_length"] / full["acceptance_length"]
                if full and full["acceptance_length"]
                else None,
                "speedup": found["mean_tokens_per_second"] / plain["mean_tokens_per_second"] if plain else None,
                "baseline": baseline,
            }
        )
    return rows


def fastest_plain(results: Results) -> str | None:
    """The plain arm with the most tokens a second over all tasks."""
    plain = [arm for arm, described in results.origin["arms"].items() if described.get("plain")]
    return max(plain, key=lambda arm: arm_figures(results.records[arm])["mean_tokens_per_second"], default=None)


def _read_record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        choice = record["choices"][0]
        _ = record["question_id"], record["category"], record["arm"], choice["accept_lengths"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path.name}, line {number}: no record of an answer ({error!r}).") from error
    return record  # type: ignore[no-any-return]
