"""Every flag and argument of `generate` is supported, without effect, or refused: the rows of `table.py`."""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import GenerationConfig, GenerationMixin
from transformers.utils import TransformersKwargs

from tests.doubles import SCRIPTS, random_tree
from tests.promises.support import (
    Setting,
    accepted_drafts,
    call,
    differs,
    drafts_along,
    ids_of,
    no_work,
    repeatable_draws,
    same_cache,
    same_output,
    setting,
    speculate,
    unheard,
)
from tests.promises.table import ROWS, Row

ROOT = Path(__file__).resolve().parents[2]

DRAFTS = {"alternately_right": SCRIPTS["alternately_right"], "random_tree": random_tree(seed=1, num_nodes=30)}


def rows(*kinds: str) -> list[Any]:
    """Test parameters; a known fault of ours is expected to fail, and its mark to be removed when it does not."""
    return [
        pytest.param(row, id=row.id, marks=[pytest.mark.xfail(strict=True, reason=row.open)] if row.open else [])
        for row in ROWS
        if row.kind in kinds
    ]


@pytest.fixture(autouse=True)
def same_draws() -> Iterator[None]:
    with repeatable_draws():
        yield


@pytest.fixture(scope="module")
def where() -> Setting:
    return setting()


@pytest.mark.filterwarnings("ignore")  # many options make transformers say that they are unusual
@pytest.mark.parametrize("row", rows("supported"))
def test_supported(row: Row, where: Setting) -> None:
    expected = call(where, **row.ask(where))
    for script in DRAFTS.values():
        ask = row.ask(where)
        with drafts_along(script, expected, unheard(where, ask)):
            got = speculate(where, **ask)
        same_output(expected, got)
        assert accepted_drafts(got)
    without = row.without(where) if row.without else {}
    assert differs(call(where, **without), expected), "the question does not show the option"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", rows("no effect"))
def test_without_effect(row: Row, where: Setting) -> None:
    without = row.without(where) if row.without else {}
    expected = call(where, **without)
    if "custom_generate" not in row.ask(where):
        same_output(expected, call(where, **row.ask(where)))
    for script in DRAFTS.values():
        with drafts_along(script, expected):
            got = speculate(where, **without | row.ask(where))
        same_output(expected, got)
        assert accepted_drafts(got)


def rows_that_are_served() -> list[Any]:
    """Test parameters of the calls that return something."""
    return [pytest.param(row, id=row.id) for row in ROWS if row.kind != "refused"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", rows_that_are_served())
def test_returned_cache(row: Row, where: Setting) -> None:
    """It holds the same tokens, keys and values as plain `generate`'s, also where the text ends inside a block."""
    theirs, ours = row.ask(where), row.ask(where)
    for ask in (theirs, ours):
        ask |= {"return_dict_in_generate": True}
    expected = call(where, **{name: value for name, value in theirs.items() if name != "custom_generate"})
    with drafts_along(DRAFTS["random_tree"], expected, unheard(where, ours)):
        got = speculate(where, **ours)
    assert ids_of(got).tolist() == ids_of(expected).tolist()
    mask = theirs.get("attention_mask")
    padding = [0] * len(ids_of(expected)) if mask is None else (mask == 0).sum(1).tolist()
    same_cache(expected, got, padding)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", rows("refused"))
def test_refused(row: Row, where: Setting) -> None:
    assert row.words
    ask = row.ask(where)
    with no_work(where.model), pytest.raises(ValueError, match=r"\w+.*\.$") as caught:
        speculate(where, **ask)
    assert all(word in str(caught.value) for word in row.words), str(caught.value)


# The table is complete ----------------------------------------------------------------------------------------------


def options(where: Setting) -> set[str]:
    """Everything that this release of transformers lets a caller of `generate` say."""
    logging.disable(logging.WARNING)
    try:
        flags = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    finally:
        logging.disable(logging.NOTSET)
    generate = inspect.unwrap(GenerationMixin.generate)
    named = {name for name, p in inspect.signature(generate).parameters.items() if p.kind is not p.VAR_KEYWORD}
    forward = {
        "cache" if name == where.cache_name else name
        for name, p in inspect.signature(where.model.forward).parameters.items()
        if p.kind is not p.VAR_KEYWORD
    }
    popped = {"tokenizer", "assistant_tokenizer", "trust_remote_code"}  # by `generate` from its keywords
    return (flags | named | forward | popped | set(TransformersKwargs.__optional_keys__)) - {"self"}


def test_every_option_has_a_row(where: Setting) -> None:
    assert options(where) - {row.name for row in ROWS} == set()


def test_no_row_without_an_option(where: Setting) -> None:
    assert {row.name for row in ROWS} - options(where) == set()


def test_options_of_transformers_are_found(where: Setting) -> None:
    assert {"min_p", "streamer", "attention_mask", "cache", "tokenizer", "seq_idx"} <= options(where)


def test_rows_can_be_told_apart() -> None:
    assert [name for name, count in Counter(row.id for row in ROWS).items() if count > 1] == []


# The documentation is made from the table -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def option_table() -> ModuleType:
    spec = spec_from_file_location("option_table", ROOT / "examples" / "option_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")
def test_documentation_is_up_to_date(option_table: ModuleType) -> None:
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == option_table.render(), (
        "docs/options.md is out of date: run python examples/option_table.py"
    )


def test_documentation_has_every_row_and_no_empty_cell() -> None:
    lines = [line for line in (ROOT / "docs" / "options.md").read_text(encoding="utf-8").splitlines() if "`::" in line]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert len(cells) == len(ROWS)
    assert all(len(row) == 4 and all(row) for row in cells)


def test_documented_tests_exist() -> None:
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    named = re.findall(r"`::(\w+)\[(.+?)\]`", text)
    assert {name for name, _ in named} == {"test_supported", "test_without_effect", "test_refused"}
    assert sorted(case for _, case in named) == sorted(row.id for row in ROWS)
    assert all(callable(globals()[name]) for name, _ in named)
