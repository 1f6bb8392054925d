"""Write `docs/options.md` from the tests themselves: every option of `generate`, and what speculation makes of it.

    python examples/option_table.py           # rewrites it
    python examples/option_table.py --check   # says whether it is up to date (exit code 1: it is not)

The rows are those of `tests/promises/table.py`, each of which is a test; a refusal is quoted by asking for it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests are no installed package

from tests.promises.support import Setting, setting, speculate  # noqa: E402
from tests.promises.table import SECTIONS, Row  # noqa: E402

OPTIONS = ROOT / "docs" / "options.md"
TESTS = {"supported": "test_supported", "no effect": "test_without_effect", "refused": "test_refused"}
HEAD = """# Every option of `generate()` under speculation

This file is written by `examples/option_table.py` from `tests/promises/table.py`; each row is a test in
`tests/promises/test_options.py`, named in its last column.

- **supported**: the output is that of plain `generate`, and the test's call gives another output without the option.
- **no effect**: plain `generate` gives the same output with and without it here, and so does speculation.
- **refused**: a `ValueError` with the sentence in the third column, before the model has run.

An option that a release of transformers adds fails a test until it has a row. What "the output is that of plain
`generate`" means for sampling and in half precision is said in [lossless.md](lossless.md).
"""


def render() -> str:
    """The whole file."""
    transformers.logging.set_verbosity_error()
    where = setting()
    return "\n".join([HEAD, *(_section(title, rows, where) for title, rows in SECTIONS.items())])


def _section(title: str, rows: list[Row], where: Setting) -> str:
    lines = [f"## {title}", "", "| option | in the test | under speculation | test |", "|---|---|---|---|"]
    lines += [f"| `{row.name}` | {_example(row, where)} | {_verdict(row, where)} | {_test(row)} |" for row in rows]
    return "\n".join([*lines, ""])


def _test(row: Row) -> str:
    return f"`::{TESTS[row.kind]}[{row.id}]`"


def _example(row: Row, where: Setting) -> str:
    """The option's value where it can be read, else what the row calls its case."""
    value = row.ask(where).get(row.name)
    if _is_short(value):
        return f"`{value!r}`"
    return row.case or type(value).__name__


def _is_short(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | list | tuple | dict) and len(repr(value)) <= 40


def _verdict(row: Row, where: Setting) -> str:
    if row.open:
        return f"to be {row.kind}; today: {row.open}"
    if row.kind != "refused":
        return row.kind
    try:
        speculate(where, **row.ask(where))
    except ValueError as refusal:
        return "refused: " + str(refusal).replace("|", "\\|").replace("\n", " ")
    raise AssertionError(f"{row.id} is not refused")


def main() -> None:
    made = render()
    if "--check" in sys.argv[1:]:
        if not OPTIONS.exists() or OPTIONS.read_text(encoding="utf-8") != made:
            sys.exit(f"{OPTIONS} is out of date: run python examples/option_table.py")
        return
    OPTIONS.parent.mkdir(exist_ok=True)
    OPTIONS.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
