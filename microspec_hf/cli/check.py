"""`microspec check`: does a pair fit, and is its text the target's own?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from microspec_hf.cli import options
from microspec_hf.cli.console import check_json_file, open_console, write_json
from microspec_hf.cli.demo import PROMPTS
from microspec_hf.cli.pair import Pair, load_pair
from microspec_hf.evaluation import LosslessReport, check_lossless, provenance, read_prompts


def check(
    model: options.Model = None,
    drafter: options.Drafter = "auto",
    vocabulary: Annotated[
        list[str],
        typer.Option(
            metavar="KIND",
            help="full, dynamic, static or static:SIZE; give it several times to check several.",
        ),
    ] = ["dynamic"],  # noqa: B006 (typer copies it)
    static_list: options.StaticList = None,
    tree: options.Tree = "5,10,60",
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines with id, task and turns; default: the demo's prompts."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Check the first so many prompts only.")] = None,
    max_new_tokens: options.MaxNewTokens = 64,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    json: options.JsonFile = None,
) -> None:
    """Check a pair: do drafter and target fit, and is greedy text equal to plain generate()?

    Where texts differ it shows the first difference, and the gap between the two tokens' logits there: a gap
    within rounding is a near tie, which half precision allows; anything else is a fault, and the exit code is
    then 1. With --json FILE an interrupted check goes on where it stopped.
    """
    check_json_file(json)
    console = open_console(json)
    where = options.default_device(device)
    configurations = {name: options.speculation(name, static_list, tree, where) for name in vocabulary}
    chosen = read_prompts(prompts or PROMPTS)[:limit]
    pair = load_pair(model, drafter, dtype, where, console)
    _print_fit(console, pair)
    journal = None if json in (None, "-") else Path(str(json)).with_suffix(".unfinished.jsonl")
    report = check_lossless(
        pair.model,
        pair.tokenizer,
        pair.drafter,
        chosen,
        configurations,
        max_new_tokens,
        journal=journal,
        progress=console.is_terminal,
    )
    _print_report(console, pair, report)
    settings = {
        "model": pair.name,
        "drafter": drafter,
        "vocabulary": vocabulary,
        "tree": tree,
        "prompts": prompts or PROMPTS,
        "limit": limit,
        "max_new_tokens": max_new_tokens,
        "dtype": str(pair.model.dtype).removeprefix("torch."),
        "device": where,
    }
    write_json(json, report.to_dict() | {"provenance": provenance(command="check", **settings)})
    if journal is not None:
        journal.unlink(missing_ok=True)
    if report.num_faults:
        raise typer.Exit(1)


def _print_fit(console: Console, pair: Pair) -> None:
    head = pair.drafter.config
    named = f", made for {head.target}" if head.target else ""
    console.print(f"The drafter fits {pair.name}: hidden size {head.hidden_size}, {head.vocab_size} tokens{named}.")


def _print_report(console: Console, pair: Pair, report: LosslessReport) -> None:
    table = Table(title=f"{report.dtype}, {report.max_new_tokens} new tokens", title_justify="left")
    for name in ("vocabulary", "prompts", "same text", "near ties", "faults", "tokens a pass"):
        table.add_column(name, justify="left" if name == "vocabulary" else "right")
    for row in report.to_dict()["records"]:
        counts = (row["prompts"], row["identical"], row["near_ties"], row["faults"])
        table.add_row(row["vocabulary"], *map(str, counts), f"{row['acceptance_length']:.2f}")
    console.print(table)
    for check in report.checks:
        if (difference := check.difference) is not None:
            console.print(
                f"{check.id}, {check.vocabulary}: {check.verdict} after {difference.position} equal tokens: "
                f"plain {_token(pair, difference.plain)}, MicroSpec {_token(pair, difference.microspec)}"
                + (f", logit gap {difference.logit_gap:.3g}" if difference.logit_gap is not None else ""),
                style="yellow" if difference.is_near_tie else "red",
                markup=False,
            )
    if report.identical:
        console.print("Every text is identical.", style="green")


def _token(pair: Pair, token: int | None) -> str:
    return "has ended" if token is None else f"says {pair.tokenizer.decode([token])!r}"
