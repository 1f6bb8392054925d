"""The command line: `microspec demo | generate | chat | check | bench | train | report | compare | kernels`.

Commands use the public API only; each has a module of its own. `console` decides where words and figures go,
`options` holds what several commands share.
"""

from __future__ import annotations

from typing import Annotated

import typer

import microspec_hf
from microspec_hf.cli import bench, chat, check, demo, generate, kernels, report, train
from microspec_hf.cli.console import SentenceErrors

__all__ = ["app"]

app = typer.Typer(
    name="microspec",
    cls=SentenceErrors,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    demo.demo,
    generate.generate,
    chat.chat,
    check.check,
    bench.bench,
    train.train,
    report.report,
    report.compare,
)
for command in COMMANDS:
    app.command()(command)
app.add_typer(kernels.app, name="kernels")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"microspec_hf {microspec_hf.__version__}")
        raise typer.Exit


@app.callback()
def microspec(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="On an error print Python's traceback, for a bug report.")
    ] = False,
) -> None:
    """Lossless speculative decoding for Hugging Face models, with a draft vocabulary of a few hundred tokens.

    Start with: microspec demo
    """
