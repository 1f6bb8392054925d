"""Counters with the field's definitions."""

from __future__ import annotations

import json

import pytest

from microspec_hf import SpeculationStats


def test_acceptance_length_counts_the_bonus_token() -> None:
    """Emitted tokens per target pass: rounds of 0, 2 and 6 accepted drafts emit 1, 3 and 7."""
    stats = SpeculationStats(emitted=[1, 3, 7], num_levels=6)
    assert stats.rounds == 3
    assert stats.acceptance_length == pytest.approx(11 / 3)


def test_acceptance_by_depth() -> None:
    """Share of rounds with at least 1, 2, ... accepted drafts."""
    stats = SpeculationStats(emitted=[1, 3, 7, 3], num_levels=6)
    assert stats.acceptance_by_depth == [0.75, 0.75, 0.25, 0.25, 0.25, 0.25]
    assert 1 + sum(stats.acceptance_by_depth) == pytest.approx(stats.acceptance_length)


def test_text_of_one_token_has_no_rounds() -> None:
    stats = SpeculationStats(new_tokens=1, num_levels=2)
    assert (stats.rounds, stats.acceptance_length, stats.acceptance_by_depth) == (0, 0.0, [0.0, 0.0])


def test_all_figures_go_to_json() -> None:
    stats = SpeculationStats(new_tokens=11, emitted=[3, 7], num_levels=6, coverage=0.5, tree={"depth": 5})
    figures = json.loads(json.dumps(stats.to_dict()))
    assert figures["acceptance_length"] == 5.0
    assert figures["rounds"] == 2
    assert len(figures["acceptance_by_depth"]) == 6
    assert {"new_tokens", "emitted", "coverage", "mean_active_vocabulary", "rows_gathered", "evicted"} <= figures.keys()
    assert figures["tree"] == {"depth": 5}
