"""Pictures of analyses, readable in black and white: arms differ by line style and marker, never by colour alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from microspec_hf.evaluation.acceptance import OVERALL

LINES = ("-", "--", ":")  # three, and eight markers: 24 pairs
MARKERS = "os^vD*hP"
SHADES = ("0.0", "0.35", "0.55")
POINT: dict[str, Any] = {"facecolor": "1.0", "edgecolor": "0.0", "s": 110, "zorder": 3}
"""Large and hollow, so that a point is not taken for one of a line."""


def draw_coverage(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """`analyses.coverage_by_size`: a line for the list in each task, and points for the arms over all tasks."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
    tasks = list(dict.fromkeys(row["task"] for row in rows if row["vocabulary"] == "list"))
    for task, style in zip(tasks, _styles(), strict=False):
        line = [row for row in rows if row["vocabulary"] == "list" and row["task"] == task]
        width = 2.0 if task == OVERALL else 1.0
        axes.plot(*_columns(line, "rows", "coverage"), label=f"list, {task}", linewidth=width, **style)
    arms = list(dict.fromkeys(row["vocabulary"] for row in rows if row["vocabulary"] != "list"))
    for arm, marker in zip(arms, cycle(MARKERS), strict=False):
        points = [row for row in rows if row["vocabulary"] == arm and row["task"] == OVERALL]
        axes.scatter(*_columns(points, "rows", "coverage"), label=arm, marker=marker, **POINT)
    sizes = sorted({row["rows"] for row in rows if row["vocabulary"] == "list"})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    _finish(figure, axes, path, "active rows of the LM head", "coverage of the target's tokens")


def draw_oracle(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """`analyses.oracle_speed`: lines over the static sizes, actual and oracle, and points for every other arm."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
    static = sorted((row for row in rows if row["kind"] in ("static", "full")), key=lambda row: row["rows"])
    for name, label, style in zip(
        ("tokens_per_second", "oracle_tokens_per_second"), ("lists, actual", "lists, oracle"), _styles(), strict=False
    ):
        axes.plot(*_columns(static, "rows", name), label=label, **style)
    others = [row for row in rows if row["kind"] not in ("static", "full")]
    for row, marker in zip(others, cycle(MARKERS), strict=False):
        axes.scatter([row["rows"]], [row["tokens_per_second"]], label=row["arm"], marker=marker, **POINT)
    sizes = [row["rows"] for row in static]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
    _finish(figure, axes, path, "active rows of the LM head", "tokens a second")


def draw_depths(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """`analyses.acceptance_by_depth`: a line for each arm, over all tasks."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
    arms = dict.fromkeys(row["arm"] for row in rows)
    for arm, style in zip(arms, _styles(), strict=False):
        line = [row for row in rows if row["arm"] == arm and row["task"] == OVERALL]
        axes.plot(*_columns(line, "depth", "share"), label=arm, **style)
    axes.set_ylim(bottom=0)
    _finish(figure, axes, path, "depth in the draft tree", "rounds that accept at least so deep")


def draw_draft_time(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """`analyses.draft_time`: milliseconds by task, a line for each arm."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2))
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for arm, style in zip(dict.fromkeys(row["arm"] for row in rows), _styles(), strict=False):
        line = [row for row in rows if row["arm"] == arm]
        axes.plot([tasks.index(row["task"]) for row in line], [row["draft_ms"] for row in line], label=arm, **style)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylim(bottom=0)
    _finish(figure, axes, path, "task", "drafting in a round, ms")


def draw_sensitivity(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Rows of `analyses.sensitivity` for one option: acceptance length and coverage by its value, a line a base."""
    pyplot = _pyplot()
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(6.4, 5.6), sharex=True)
    values = sorted({row["value"] for row in rows}, key=lambda value: (isinstance(value, str), value))
    bases = dict.fromkeys(row["base"] for row in rows)
    for base, style in zip(bases, _styles(), strict=False):
        line = [row for row in rows if row["base"] == base]
        places = [values.index(row["value"]) for row in line]
        upper.plot(places, [row["acceptance_length"] for row in line], label=base, **style)
        lower.plot(places, [row["coverage"] for row in line], label=base, **style)
    lower.set_xticks(range(len(values)), [str(value) for value in values])
    upper.set_ylabel("acceptance length")
    upper.grid(color="0.9")
    _finish(figure, lower, path, str(rows[0]["option"]), "coverage")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'microspec_hf[evaluation]'.") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _styles() -> Iterator[dict[str, Any]]:
    """Line style, marker and shade; the first 24 differ from one another in style or marker."""
    for line, marker, shade in zip(cycle(LINES), cycle(MARKERS), cycle(SHADES), strict=False):
        yield {"linestyle": line, "marker": marker, "color": shade, "markersize": 5}


def _columns(rows: Sequence[dict[str, Any]], x: str, y: str) -> tuple[list[Any], list[Any]]:
    return [row[x] for row in rows], [row[y] for row in rows]


def _finish(figure: Any, axes: Any, path: Path, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="0.9")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))  # beside the lines, hiding none
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date and no version of the drawing program: the same results give the same bytes.
    figure.savefig(path, dpi=150, bbox_inches="tight", metadata={"Software": None})
    _pyplot().close(figure)
