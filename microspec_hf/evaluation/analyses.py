"""Analyses of results: rows of figures, which `write_csv` writes and `figures` draws. None needs a model."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from microspec_hf.evaluation.acceptance import OVERALL
from microspec_hf.evaluation.arms import sized_method
from microspec_hf.evaluation.results import FULL, Results, arm_figures, main_table

STATIC_SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the keys of all of them as columns; what a row lacks is left empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def coverage_by_size(
    results: Results, token_ids: Sequence[int], sizes: Sequence[int] = STATIC_SIZES
) -> list[dict[str, Any]]:
    """Coverage of the target's tokens against the number of active rows, by task.

    Of a list: the share of the tokens that its first ids hold, among those behind each answer's first (which no draft
    precedes) of the first arm. Of each arm that changes its vocabulary: its measured coverage at its mean active rows.

    Args:
        token_ids: most frequent first.
        sizes: of the list; larger ones than it has are left out.

    Returns:
        `vocabulary` (`"list"` or the arm), `task`, `rows`, `coverage`.
    """
    first = next(iter(results.records))
    rank = {token: place for place, token in enumerate(token_ids)}
    rows: list[dict[str, Any]] = []
    for task in results.tasks:
        answers = [ids[1:] for record in results.of_task(first, task) for ids in record["choices"][0].get("ids", [])]
        places = torch.tensor([rank.get(token, len(token_ids)) for ids in answers for token in ids])
        for size in sorted(size for size in sizes if size <= len(token_ids)):
            share = float((places < size).double().mean()) if len(places) else 1.0
            rows.append({"vocabulary": "list", "task": task, "rows": size, "coverage": share})
    for arm, described in results.origin["arms"].items():
        if described.get("vocabulary", {}).get("kind") in ("dynamic", "coral", "dynaspec"):
            for task in results.tasks:
                figures = arm_figures(results.of_task(arm, task))
                active, coverage = figures["mean_active_vocabulary"], figures["coverage"]
                rows.append({"vocabulary": arm, "task": task, "rows": active, "coverage": coverage})
    return rows


def oracle_speed(results: Results) -> list[dict[str, Any]]:
    """What a small vocabulary costs in acceptance: actual speed, and speed if no token had been missing.

    The oracle's rounds cost what the arm's own cost and emit as many tokens as those with the whole head; the prefill
    stays. Over all tasks.

    Returns:
        For each speculative arm `arm`, `kind`, `rows` (active, mean), `tokens_per_second` (all tokens over all time)
        and `oracle_tokens_per_second`; nothing without the arm `FULL`.
    """
    if FULL not in results.records:
        return []
    full = arm_figures(results.records[FULL])["acceptance_length"]
    rows = []
    for arm, described in results.origin["arms"].items():
        figures = arm_figures(results.records[arm])
        if described.get("plain") or not full:
            continue
        prefill = figures["prefill_share"] or 0.0
        time = prefill + (1 - prefill) * figures["acceptance_length"] / full
        rows.append(
            {
                "arm": arm,
                "kind": described["vocabulary"]["kind"],
                "rows": figures["mean_active_vocabulary"],
                "tokens_per_second": figures["tokens_per_second"],
                "oracle_tokens_per_second": figures["tokens_per_second"] / time if time else 0.0,
            }
        )
    return rows


def acceptance_by_depth(results: Results) -> list[dict[str, Any]]:
    """For each speculative arm the share of rounds that accepted at least d drafts: `arm`, `task`, `depth`, `share`."""
    return [
        {"arm": arm, "task": task, "depth": depth, "share": share}
        for arm, described in results.origin["arms"].items()
        if not described.get("plain")
        for task in results.tasks
        for depth, share in enumerate(arm_figures(results.of_task(arm, task))["acceptance_by_depth"], start=1)
    ]


def draft_time(results: Results) -> list[dict[str, Any]]:
    """How long drafting takes in a round, by arm and task: `arm`, `task`, `draft_ms`, `change` against `FULL`.

    Nothing unless it was measured; `change` is None without that arm.
    """
    rows = [row for row in main_table(results) if row["draft_ms"] is not None]
    full = {row["task"]: row["draft_ms"] for row in rows if row["arm"] == FULL}
    return [
        {"arm": row["arm"], "task": row["task"], "draft_ms": row["draft_ms"]}
        | {"change": row["draft_ms"] / full[row["task"]] - 1 if row["task"] in full else None}
        for row in rows
    ]


def sensitivity(results: Results) -> list[dict[str, Any]]:
    """How figures over all tasks change with one option: rows for every option that was varied.

    Varied was the option of `BASE:OPTION=VALUE` where BASE is an arm too, whose own value counts; and the size of
    `METHOD-SIZE` where there are several.

    Returns:
        `base`, `option`, `value` and figures; in the order of option and value.
    """
    overall = {row["arm"]: row for row in main_table(results) if row["task"] == OVERALL}
    shown = (
        "acceptance_length",
        "relative_acceptance",
        "coverage",
        "mean_active_vocabulary",
        "mean_tokens_per_second",
        "prefill_seconds",
    )
    varied: dict[tuple[str, str], dict[Any, str]] = {}
    for arm in overall:
        base, *options = arm.split(":")
        if len(options) == 1 and base in overall:
            option, _, value = options[0].partition("=")
            values = varied.setdefault((base, option), {_own_value(results.origin["arms"][base], option): base})
            values[int(value) if value.isdigit() else value] = arm
        elif not options and (sized := sized_method(base)):
            method, size = sized
            varied.setdefault((method, "size"), {})[size] = arm
    return [
        {"base": base, "option": option, "value": value, "arm": arm} | {name: overall[arm][name] for name in shown}
        for (base, option), values in varied.items()
        if len(values) > 1
        for value, arm in sorted(values.items(), key=lambda item: (isinstance(item[0], str), item[0]))
    ]


def _own_value(described: Mapping[str, Any], option: str) -> Any:
    tree = described["tree"]
    names = {"nodes": "num_nodes"}
    return tree[names.get(option, option)] if names.get(option, option) in tree else described["vocabulary"][option]
