from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microspec_hf import SpeculationStats
from microspec_hf.evaluation import metrics, summarize

TWO_TEXTS = [
    # 9 emitted tokens in 3 rounds; the text was cut one token before the end of its last round.
    SpeculationStats(
        new_tokens=9, emitted=[4, 1, 4], num_levels=3, coverage=1.0, mean_active_vocabulary=100.0,
        rows_gathered=7, evicted=1,
    ),
    SpeculationStats(
        new_tokens=2, emitted=[1], num_levels=3, coverage=0.0, mean_active_vocabulary=300.0,
        rows_gathered=3,
    ),
]  # fmt: skip


def test_definitions_on_an_example_worked_by_hand() -> None:
    figures = summarize(TWO_TEXTS)
    assert figures["acceptance_length"] == 10 / 4
    assert figures["mean_acceptance_length"] == (3 + 1) / 2
    assert figures["trimmed_acceptance_length"] == (8 + 1) / 4
    assert figures["acceptance_by_depth"] == [2 / 4, 2 / 4, 2 / 4]
    assert figures["coverage"] == 9 / 10
    assert figures["mean_active_vocabulary"] == (3 * 100 + 300) / 4
    assert (figures["prompts"], figures["rounds"], figures["emitted_tokens"]) == (2, 4, 10)
    assert (figures["new_tokens"], figures["rows_gathered"], figures["evicted"]) == (11, 10, 1)
    json.dumps(figures, allow_nan=False)


def test_a_text_that_the_prefill_ended_counts_as_a_prompt_only() -> None:
    ended = SpeculationStats(new_tokens=1, num_levels=3)
    figures = summarize([*TWO_TEXTS, ended])
    without = summarize(TWO_TEXTS)
    assert figures["prompts"] == 3
    for name in ("acceptance_length", "mean_acceptance_length", "trimmed_acceptance_length", "coverage"):
        assert figures[name] == without[name]
    assert summarize([ended])["acceptance_length"] == 0.0


def test_no_texts_are_refused() -> None:
    with pytest.raises(ValueError, match="no texts"):
        summarize([])


@given(st.lists(st.lists(st.integers(1, 7), max_size=8), min_size=1, max_size=5))
def test_acceptance_length_is_one_plus_the_acceptance_by_depth(emitted: list[list[int]]) -> None:
    stats = [SpeculationStats(emitted=counts, num_levels=6) for counts in emitted]
    by_depth = metrics.acceptance_by_depth(stats)
    assert by_depth == sorted(by_depth, reverse=True)
    if any(emitted):
        assert metrics.acceptance_length(stats) == pytest.approx(1 + sum(by_depth))


@given(st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=8), min_size=1, max_size=4))
def test_pooling_texts_equals_one_long_text(emitted: list[list[int]]) -> None:
    apart = [SpeculationStats(emitted=counts, num_levels=6) for counts in emitted]
    together = SpeculationStats(emitted=list(itertools.chain(*emitted)), num_levels=6)
    assert metrics.acceptance_length(apart) == pytest.approx(together.acceptance_length)
    assert metrics.acceptance_by_depth(apart) == pytest.approx(together.acceptance_by_depth)
