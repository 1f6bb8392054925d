"""The results page: tables, the papers' figures beside ours, and what was reproduced, all from the result files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from microspec_hf.evaluation.acceptance import OVERALL
from microspec_hf.evaluation.analyses import (
    acceptance_by_depth,
    coverage_by_size,
    draft_time,
    oracle_speed,
    sensitivity,
    write_csv,
)
from microspec_hf.evaluation.figures import draw_coverage, draw_depths, draw_draft_time, draw_oracle, draw_sensitivity
from microspec_hf.evaluation.published import DRAFT_TIME, NOTES, PUBLISHED, TABLE_1
from microspec_hf.evaluation.results import FULL, Results, main_table, read_results

PAGE = "report.md"


@dataclass(frozen=True)
class Claim:
    """Something that a paper says of two arms, and how to tell whether it holds here.

    Args:
        text: the claim.
        arms: that it speaks of, the first two compared.
        figure: of the arms' rows over all tasks.
        holds: of the two arms' figures.
    """

    text: str
    arms: tuple[str, str]
    figure: str
    holds: Callable[[float, float], bool]


def _is_below(share: float, ours: float, theirs: float) -> bool:
    return ours <= share * theirs


def _published(*arms: str) -> str:
    return " and ".join(f"{TABLE_1[arm].acceptance_length:.2f}" for arm in arms)


CLAIMS = (
    Claim(
        "MicroSpec keeps at least the paper's share of the whole head's acceptance length "
        f"({TABLE_1['microspec'].relative_acceptance:.1%})",
        ("microspec", FULL),
        "acceptance_length",
        lambda ours, full: ours >= full * TABLE_1["microspec"].relative_acceptance,
    ),
    Claim(
        "MicroSpec's active vocabulary stays below 3,072 rows on average, and below the whole head",
        ("microspec", FULL),
        "mean_active_vocabulary",
        lambda ours, full: ours < min(3072, full),
    ),
    *(
        Claim(
            f"MicroSpec accepts more than {other}",
            ("microspec", other),
            "acceptance_length",
            lambda ours, theirs: ours > theirs,
        )
        for other in (
            *("fr-spec-8k", "fr-spec-16k", "vocabtrim-8k", "vocabtrim-16k"),
            *("microspec:verify_candidates=0", "microspec:prompt=off"),
        )
    ),
    Claim(
        f"FR-Spec at 32k rows accepts more than MicroSpec ({_published('fr-spec-32k', 'microspec')})",
        ("fr-spec-32k", "microspec"),
        "acceptance_length",
        lambda theirs, ours: theirs > ours,
    ),
    Claim(
        f"DynaSpec accepts more than FR-Spec at 32k rows ({_published('dynaspec-27k', 'fr-spec-32k')})",
        ("dynaspec-27k", "fr-spec-32k"),
        "acceptance_length",
        lambda one, other: one > other,
    ),
    *(
        Claim(
            f"MicroSpec is faster than {other}",
            ("microspec", other),
            "mean_tokens_per_second",
            lambda ours, theirs: ours > theirs,
        )
        for other in ("plain", FULL, "fr-spec-32k", "coral-32k", "dynaspec-27k")
    ),
    *(
        Claim(
            f"MicroSpec's drafting takes {-change:.1%} less time than that of {other}, or less still",
            ("microspec", other),
            "draft_ms",
            partial(_is_below, 1 + change),
        )
        for other, change in DRAFT_TIME.items()
    ),
)


def write_report(folder: str | Path, token_ids: Sequence[int] | None = None, output: str | Path | None = None) -> Path:
    """Write the page of a results folder, every figure as PNG, and the data of every table and figure as CSV.

    Args:
        folder: written by `evaluate`.
        token_ids: most frequent first, for the figure of coverage against rows; None: without it.
        output: folder of the page (default: the results folder).

    Returns:
        The page.
    """
    results = read_results(folder)
    target = Path(output) if output is not None else Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    table = main_table(results)
    write_csv(target / "table.csv", table)
    pictures = _draw(results, token_ids, target / "figures")
    sections = [
        f"# Results: {results.name}\n",
        _setting(results),
        "## Acceptance length by task\n",
        _acceptance(results, table),
        "## Speed\n",
        _speed(table),
        *(["## Drafting\n", _drafting(results)] if draft_time(results) else []),
        "## Beside the papers\n",
        _beside(table),
        "## What was reproduced\n",
        _verdicts(table),
        *(["## Sensitivity\n", _sensitivity_table(results)] if sensitivity(results) else []),
        "## Figures\n",
        "".join(
            f"![{caption}](figures/{name}.png)\n\n{caption} ([data](figures/{name}.csv))\n\n"
            for name, caption in pictures
        ),
    ]
    page = target / PAGE
    page.write_text("\n".join(section.rstrip("\n") + "\n" for section in sections), encoding="utf-8")
    return page


def _draw(results: Results, token_ids: Sequence[int] | None, folder: Path) -> list[tuple[str, str]]:
    """Every figure that the results have data for: its name and caption."""
    drawn: list[tuple[str, str]] = []
    if depths := acceptance_by_depth(results):
        write_csv(folder / "acceptance_by_depth.csv", depths)
        draw_depths(folder / "acceptance_by_depth.png", depths)
        drawn.append(("acceptance_by_depth", "Share of rounds that accept at least d drafts, over all tasks."))
    if token_ids:
        coverage = coverage_by_size(results, token_ids)
        write_csv(folder / "coverage_by_size.csv", coverage)
        draw_coverage(folder / "coverage_by_size.png", coverage)
        drawn.append(("coverage_by_size", "Coverage of the target's tokens against the rows of the LM head."))
    if times := draft_time(results):
        write_csv(folder / "draft_time.csv", times)
        draw_draft_time(folder / "draft_time.png", times)
        drawn.append(("draft_time", "Time that drafting takes in a round, by task."))
    speeds = oracle_speed(results)
    if sum(row["kind"] in ("static", "full") for row in speeds) > 1:
        write_csv(folder / "oracle_speed.csv", speeds)
        draw_oracle(folder / "oracle_speed.png", speeds)
        drawn.append(("oracle_speed", "Speed by active rows, and the speed if no token had been missing from them."))
    rows = sensitivity(results)
    for option in dict.fromkeys(row["option"] for row in rows):
        chosen = [row for row in rows if row["option"] == option]
        write_csv(folder / f"sensitivity_{option}.csv", chosen)
        draw_sensitivity(folder / f"sensitivity_{option}.png", chosen)
        drawn.append((f"sensitivity_{option}", f"Acceptance length and coverage by `{option}`, over all tasks."))
    return drawn


def _setting(results: Results) -> str:
    origin = results.origin
    arguments, versions = origin["arguments"], origin["versions"]
    skipped = origin["skipped"]["longer than the context"]
    decoding = origin["decoding"]
    how = "greedy" if not decoding["temperature"] else f"temperature {decoding['temperature']:g}"
    revision = str(origin["git_revision"])[:12] + (" with changes" if origin["git_dirty"] else "")
    processes = f"{origin['processes']} process" + ("es" if origin["processes"] > 1 else "")
    return (
        f"Target {arguments.get('target')}, drafter {arguments.get('drafter')}, {origin['dtype']}, on "
        f"{origin['device']} ({processes}, {origin['threads']} threads). {origin['prompts']} prompts with all their "
        f"turns, {how}, {decoding['max_new_tokens']} new tokens a turn; {skipped} prompts longer than the context were "
        f"skipped, and {origin['turns_left_out']} later turns had no room. torch {versions['torch']}, transformers "
        f"{versions['transformers']}, revision {revision}, {origin['utc']}.\n\n"
        "An acceptance length is the tokens that all rounds emitted over the number of rounds, the bonus token "
        "included. Speeds are means over prompts of new tokens over wall time, prefill included. All arms ran on one "
        "engine, with one drafter, prompt by prompt in turn.\n"
    )


def _acceptance(results: Results, table: Sequence[dict[str, Any]]) -> str:
    columns = [*results.tasks[:-1], OVERALL]
    rows = []
    for arm in results.records:
        by_task = {row["task"]: row for row in table if row["arm"] == arm}
        overall = by_task[OVERALL]
        rows.append(
            [
                f"`{arm}`",
                *(f"{by_task[task]['acceptance_length']:.2f}" if task in by_task else "" for task in columns),
                _percent(overall["relative_acceptance"]),
                f"{overall['mean_active_vocabulary']:,.0f}" if overall["mean_active_vocabulary"] else "",
                _percent(overall["coverage"]) if overall["mean_active_vocabulary"] else "",
            ]
        )
    return _table(["arm", *columns, "of the whole head", "active rows", "coverage"], rows)


def _speed(table: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            f"`{row['arm']}`",
            f"{row['mean_tokens_per_second']:.1f}",
            "" if row["speedup"] is None else f"{row['speedup']:.2f}x",
            _percent(row["prefill_share"]),
        ]
        for row in table
        if row["task"] == OVERALL
    ]
    baseline = table[0]["baseline"]
    against = f"against `{baseline}`, the fastest plain arm" if baseline else "there is no plain arm to compare with"
    return _table(["arm", "tok/s", "speed-up", "prefill"], rows) + f"\nSpeed-up: {against}.\n"


def _drafting(results: Results) -> str:
    rows = draft_time(results)
    times = {(row["arm"], row["task"]): row for row in rows}
    tasks = [*results.tasks[:-1], OVERALL]
    lines = [
        [
            f"`{arm}`",
            *(f"{times[arm, task]['draft_ms']:.2f}" for task in tasks),
            "" if (change := times[arm, OVERALL]["change"]) is None else f"{change:+.1%}",
        ]
        for arm in dict.fromkeys(row["arm"] for row in rows)
    ]
    return _table(["arm, ms in a round", *tasks, f"against `{FULL}`"], lines)


def _beside(table: Sequence[dict[str, Any]]) -> str:
    ours = {row["arm"]: row for row in table if row["task"] == OVERALL}
    fast = ours.get(table[0]["baseline"] or "")
    parts = []
    for source in dict.fromkeys(row.source for row in PUBLISHED):
        published = [row for row in PUBLISHED if row.source == source]
        plain = next(row for row in published if row.arm == "plain")
        rows = []
        for row in published:
            found = ours.get(row.arm)
            speed_up = found and fast and _speed_of(found) / _speed_of(fast)
            rows.append(
                [
                    f"`{row.arm}`",
                    f"{row.acceptance_length:.2f}",
                    _percent(row.relative_acceptance),
                    f"{row.tokens_per_second / plain.tokens_per_second:.2f}x",
                    f"{found['acceptance_length']:.2f}" if found else "not measured",
                    _percent(found["relative_acceptance"]) if found else "",
                    f"{speed_up:.2f}x" if speed_up else "",
                ]
            )
        header = ["arm", "paper", "of whole head", "speed-up", "ours", "of whole head", "speed-up"]
        parts.append(f"{source}:\n\n" + _table(header, rows))
    return "\n".join([*parts, *(f"- {note}\n" for note in NOTES)])


def _verdicts(table: Sequence[dict[str, Any]]) -> str:
    ours = {row["arm"]: row for row in table if row["task"] == OVERALL}
    rows = []
    for claim in CLAIMS:
        missing = [arm for arm in claim.arms if arm not in ours]
        if missing:
            rows.append([claim.text, "not measured", f"no arm {', '.join(f'`{arm}`' for arm in missing)}"])
            continue
        figures = [ours[arm][claim.figure] for arm in claim.arms]
        if None in figures:
            rows.append([claim.text, "not measured", f"no {claim.figure}"])
            continue
        verdict = "reproduced" if claim.holds(*figures) else "**not reproduced**"
        shown = ", ".join(f"`{arm}` {figure:,.2f}" for arm, figure in zip(claim.arms, figures, strict=True))
        rows.append([claim.text, verdict, shown])
    return _table(["claim", "here", "figures"], rows)


def _sensitivity_table(results: Results) -> str:
    rows = [
        [
            f"`{row['base']}`",
            row["option"],
            str(row["value"]),
            f"{row['acceptance_length']:.3f}",
            _percent(row["relative_acceptance"]),
            _percent(row["coverage"]),
            f"{row['mean_active_vocabulary']:,.0f}",
            f"{row['mean_tokens_per_second']:.1f}",
            "" if row["prefill_seconds"] is None else f"{1000 * row['prefill_seconds']:.1f}",
        ]
        for row in sensitivity(results)
    ]
    names = ["arm", "option", "value", "acceptance length", "of the whole head", "coverage", "active rows", "tok/s"]
    return _table([*names, "prefill, ms"], rows)


def _speed_of(row: dict[str, Any]) -> float:
    return float(row["mean_tokens_per_second"])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)
