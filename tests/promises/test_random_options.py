"""Random sets of options: ids, scores, streams and what stateful arguments see are those of plain `generate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from tests.promises.questions import NAMES, batch_questions, compare, compare_batch, questions


def ask_many(
    number: int,
    part: int = 0,
    kind: st.SearchStrategy[Any] | None = None,
    compared: Callable[[Any], set[str]] = compare,
) -> Counter[str]:
    """Compare so many random questions, the same ones for a part in each run: how often each thing happened."""
    happened: Counter[str] = Counter()

    @seed(part)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(kind or questions())
    def ask(question: Any) -> None:
        note(repr(question))
        happened.update(compared(question) | {"asked"})

    ask()
    return happened


def everything_happened(happened: Counter[str], number: int) -> None:
    """The questions were not void: every option was used, drafts were accepted, texts stopped early."""
    assert happened["asked"] >= number
    assert [name for name in NAMES if not happened[name]] == []
    assert happened["accepted"] > number / 4
    assert happened["stopped"] > number / 20


@pytest.mark.filterwarnings("ignore")
def test_random_options() -> None:
    everything_happened(ask_many(200), 200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
def test_many_random_options() -> None:
    everything_happened(sum((ask_many(200, part) for part in range(1, 11)), Counter()), 2000)


def ragged_batches(number: int, part: int = 0) -> None:
    happened = ask_many(number, part, batch_questions(), compare_batch)
    assert happened["asked"] >= number
    assert happened["accepted"] > number / 4
    assert happened["ragged"] > number / 4


@pytest.mark.filterwarnings("ignore")
def test_random_batches() -> None:
    ragged_batches(25)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(1, 6))
def test_many_random_batches(part: int) -> None:
    ragged_batches(100, part)
