"""`microspec report`: tables and figures of an evaluation. `microspec compare`: two evaluations against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from microspec_hf.cli import options
from microspec_hf.cli.console import check_json_file, open_console, write_json
from microspec_hf.evaluation import provenance
from microspec_hf.vocabulary import load_token_ids

Folder = Annotated[Path, typer.Argument(help="Results that examples/evaluate.py wrote.")]


def report(
    folder: Folder,
    static_list: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Frequent ids: adds the figure of coverage against rows."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where page and figures go; default: the results folder.")
    ] = None,
) -> None:
    """Write the results page of an evaluation: tables, figures (PNG and CSV), and what of the papers was reproduced."""
    from microspec_hf.evaluation.report import write_report

    ids = None if static_list is None else load_token_ids(static_list)
    page = write_report(folder, ids, output)
    open_console().print(f"Wrote {page}", soft_wrap=True)


def compare(
    one: Folder,
    other: Folder,
    arms: Annotated[
        list[str] | None,
        typer.Option(metavar="ARM|ARM,ARM", help="An arm of both, or one of each; default: all that both have."),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    json: options.JsonFile = None,
) -> None:
    """Compare two evaluations prompt by prompt, with bootstrap confidence intervals (ratios: OTHER over ONE)."""
    from microspec_hf.evaluation.comparison import compare_results
    from microspec_hf.evaluation.results import read_results

    check_json_file(json)
    console = open_console(json)
    pairs = [_pair(text) for text in arms] if arms else None
    rows = compare_results(read_results(one), read_results(other), pairs, confidence)
    table = Table(title=f"{other.name} over {one.name}, {confidence:.0%} intervals", title_justify="left")
    for name in ("arm", "prompts", "same text", "acceptance length", "ratio", "tok/s", "ratio"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for row in rows:
        arm = row["one"] if row["one"] == row["other"] else f"{row['other']} over {row['one']}"
        table.add_row(
            arm,
            str(row["prompts"]),
            str(row["identical"]),
            *_cells(row["acceptance"], ".3f"),
            *_cells(row["speed"], ".1f"),
        )
    console.print(table)
    console.print("Bold: 1 lies outside the interval.", style="dim")
    settings = {"one": one, "other": other, "arms": arms, "confidence": confidence}
    write_json(json, {"rows": rows, "provenance": provenance(command="compare", **settings)})


def _pair(text: str) -> tuple[str, str]:
    """`ARM`, or two with a comma between them."""
    one, comma, other = text.partition(",")
    return one, other if comma else one


def _cells(figure: Any, form: str) -> tuple[str, str]:
    if figure is None:
        return "", ""
    text = f"{figure['ratio']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]".replace("[", "\\[")
    return f"{figure['one']:{form}} → {figure['other']:{form}}", f"[bold]{text}[/]" if figure["is_clear"] else text
