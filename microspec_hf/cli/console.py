"""What commands print, and where: words to the terminal, figures to a file, errors as one sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from transformers.utils import logging
from typer.core import TyperGroup

ACCEPTED = "bold green"
"""Style of tokens that came as accepted drafts."""


class SentenceErrors(TyperGroup):
    """Commands whose refusals end as one red sentence and exit code 2, not as a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader went away; typer ends quietly
        except (ValueError, OSError, ImportError) as error:
            if ctx.params.get("traceback"):
                raise
            Console(stderr=True, highlight=False).print(Text(str(error), style="red"), soft_wrap=True)
            raise typer.Exit(2) from error


def open_console(json_file: str | None = None) -> Console:
    """The console for words; it is stderr when the JSON itself goes to stdout."""
    return Console(stderr=json_file == "-", highlight=False)


def check_json_file(json_file: str | None) -> None:
    """Refuse a file that could not be written before anything is measured.

    Raises:
        ValueError: its folder does not exist.
    """
    if json_file not in (None, "-") and not Path(str(json_file)).parent.is_dir():
        raise ValueError(
            f"--json {json_file}: the folder {Path(str(json_file)).parent} does not exist. Create it first."
        )


def write_json(json_file: str | None, record: Mapping[str, Any]) -> None:
    """Write a record to a file, to stdout (`-`), or nowhere (None)."""
    if json_file is None:
        return
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    if json_file == "-":
        sys.stdout.write(text)
    else:
        Path(json_file).write_text(text, encoding="utf-8")


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide transformers' own progress bars while a status line is shown."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
