"""The field's figures over several texts, with the definitions that the results are published under.

A *round* is one drafted tree and the one target pass that checks it. The prefill, which decides the first
token, is no round. *Emitted* counts the accepted drafts and the bonus token, also past a stop.
No figure here is a speed, so that processes may share a device while they are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from microspec_hf.stats import SpeculationStats


def acceptance_length(stats: Sequence[SpeculationStats]) -> float:
    """Tokens emitted by all rounds over the number of rounds: *tau* as FR-Spec and MicroSpec report it."""
    return _ratio(sum(sum(s.emitted) for s in stats), _rounds(stats))


def mean_acceptance_length(stats: Sequence[SpeculationStats]) -> float:
    """Mean over the texts of each text's own acceptance length; a text without rounds does not count."""
    lengths = [s.acceptance_length for s in stats if s.rounds]
    return _ratio(sum(lengths), len(lengths))


def trimmed_acceptance_length(stats: Sequence[SpeculationStats]) -> float:
    """As `acceptance_length`, but tokens behind the stop in a text's last round are not counted."""
    return _ratio(sum(max(0, s.new_tokens - 1) for s in stats if s.rounds), _rounds(stats))


def acceptance_by_depth(stats: Sequence[SpeculationStats]) -> list[float]:
    """Share of all rounds that accepted at least d drafts, for d = 1 up to the levels of the deepest tree."""
    emitted = [count for s in stats for count in s.emitted]
    levels = max((s.num_levels for s in stats), default=0)
    return [_ratio(sum(count > depth for count in emitted), len(emitted)) for depth in range(1, levels + 1)]


def coverage(stats: Sequence[SpeculationStats]) -> float:
    """Share of all emitted tokens that were in the active vocabulary when their tree was drafted."""
    emitted = sum(sum(s.emitted) for s in stats)
    return sum(s.coverage * sum(s.emitted) for s in stats) / emitted if emitted else 1.0


def mean_active_vocabulary(stats: Sequence[SpeculationStats]) -> float:
    """Rows of the LM head that the drafter could propose, mean over all rounds."""
    return _ratio(sum(s.mean_active_vocabulary * s.rounds for s in stats), _rounds(stats))


def summarize(stats: Sequence[SpeculationStats]) -> dict[str, Any]:
    """Every figure of this module over the texts, JSON-ready, with the counts behind it.

    Raises:
        ValueError: there is no text.
    """
    if not stats:
        raise ValueError("There are no texts to summarize; generate at least one first.")
    return {
        "acceptance_length": acceptance_length(stats),
        "mean_acceptance_length": mean_acceptance_length(stats),
        "trimmed_acceptance_length": trimmed_acceptance_length(stats),
        "acceptance_by_depth": acceptance_by_depth(stats),
        "coverage": coverage(stats),
        "mean_active_vocabulary": mean_active_vocabulary(stats),
        "prompts": len(stats),
        "rounds": _rounds(stats),
        "emitted_tokens": sum(sum(s.emitted) for s in stats),
        "new_tokens": sum(s.new_tokens for s in stats),
        "rows_gathered": sum(s.rows_gathered for s in stats),
        "evicted": sum(s.evicted for s in stats),
    }


def _rounds(stats: Sequence[SpeculationStats]) -> int:
    return sum(s.rounds for s in stats)


def _ratio(total: float, count: float) -> float:
    return total / count if count else 0.0
