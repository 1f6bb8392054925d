"""A file that remembers what a long run has finished, so that a rerun goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class Journal:
    """Finished rows of a run, one JSON object a line, behind a line with the run's settings.

    The file is only ever appended to, a line at once, so that several processes may share it. A line that an
    interruption cut off is passed over.

    Args:
        path: the file; made if it does not exist. None: nothing is kept.
        settings: what the rows depend on, JSON-ready.

    Raises:
        ValueError: the file belongs to a run with other settings.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]):
        self.path = path
        self.rows: list[dict[str, Any]] = []
        wanted = json.loads(json.dumps(settings))
        lines = list(_read(path)) if path is not None and path.exists() else []
        for line in lines:
            if "settings" not in line:
                self.rows.append(line)
            elif line["settings"] != wanted:
                raise ValueError(_other_settings(str(path), line["settings"], wanted))
        if not lines:
            self.append({"settings": wanted})

    def append(self, row: Mapping[str, Any]) -> None:
        """Keep one more row."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _read(path: Path) -> Iterator[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")  # what was cut off stays a line of its own
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _other_settings(path: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    changed = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    return (
        f"{Path(path).name} holds the unfinished run of other settings; these differ: {', '.join(changed)}. "
        "Delete it to start anew, or name another file."
    )
