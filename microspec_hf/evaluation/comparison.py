"""Two results set against each other, prompt by prompt, with bootstrap confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from microspec_hf.evaluation.answers import turn_stats
from microspec_hf.evaluation.results import Results

FEWEST_PROMPTS = 2


def compare_results(
    one: Results,
    other: Results,
    pairs: Sequence[tuple[str, str]] | None = None,
    confidence: float = 0.95,
    resamples: int = 9999,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """How arms differ on the prompts that both results have, with intervals from resampling the prompts.

    Two figures are compared, both as ratios, other over one: the pooled acceptance length, and tokens a second (all new
    tokens over all wall time). The prompts are drawn together for both (`scipy.stats.bootstrap`, paired, percentiles).

    Args:
        pairs: an arm of `one` and an arm of `other` each (default: every arm that both have).
        confidence: of the intervals.

    Returns:
        For each pair `one`, `other` (arms), `prompts`, and for `acceptance` and `speed` the two figures, their ratio,
        its interval, and whether 1 lies outside; `identical` texts out of the prompts.

    Raises:
        ValueError: no arm or too few prompts in common, an unknown arm, or an impossible confidence.
        ImportError: scipy is missing.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}.")
    chosen = [(arm, arm) for arm in one.records if arm in other.records] if pairs is None else list(pairs)
    for name, results in (([a for a, _ in chosen], one), ([b for _, b in chosen], other)):
        if unknown := [arm for arm in name if arm not in results.records]:
            raise ValueError(f"{results.name} has no arm {', '.join(unknown)}. Its arms: {', '.join(results.records)}.")
    if not chosen:
        raise ValueError(
            f"{one.name} and {other.name} have no arm in common. Name pairs of arms, such as eagle2,microspec."
        )
    return [_compare(one, other, *pair, confidence, resamples, seed) for pair in chosen]


def _compare(
    one: Results, other: Results, arm: str, other_arm: str, confidence: float, resamples: int, seed: int
) -> dict[str, Any]:
    first = {record["question_id"]: record for record in one.records[arm]}
    second = {record["question_id"]: record for record in other.records[other_arm]}
    common = [name for name in first if name in second]
    if len(common) < FEWEST_PROMPTS:
        raise ValueError(
            f"{one.name} ({arm}) and {other.name} ({other_arm}) have {len(common)} prompts in common; an interval "
            f"needs at least {FEWEST_PROMPTS}."
        )
    left, right = [first[name] for name in common], [second[name] for name in common]
    row: dict[str, Any] = {"one": arm, "other": other_arm, "prompts": len(common)}
    row["identical"] = sum(_ids(a) == _ids(b) for a, b in zip(left, right, strict=True))
    for figure, parts in (("acceptance", _emitted_and_rounds), ("speed", _tokens_and_seconds)):
        row |= _ratio(figure, left, right, parts, confidence, resamples, seed)
    return row


def _ratio(
    figure: str,
    left: Sequence[dict[str, Any]],
    right: Sequence[dict[str, Any]],
    parts: Callable[[dict[str, Any]], tuple[float, float]],
    confidence: float,
    resamples: int,
    seed: int,
) -> dict[str, Any]:
    try:
        import numpy as np
        from scipy.stats import bootstrap
    except ImportError as error:
        raise ImportError("Intervals need scipy: pip install 'microspec_hf[evaluation]'.") from error
    columns = np.array([[*parts(a), *parts(b)] for a, b in zip(left, right, strict=True)], dtype=float).T

    def ratio(a: Any, a_per: Any, b: Any, b_per: Any, axis: int = -1) -> Any:
        return (b.sum(axis) / b_per.sum(axis)) / (a.sum(axis) / a_per.sum(axis))

    if not columns[1::2].sum(axis=1).all() or not columns[0].sum():
        return {figure: None}  # nothing was drafted, or no time has passed
    interval = bootstrap(
        tuple(columns),
        ratio,
        paired=True,
        vectorized=True,
        n_resamples=resamples,
        batch=1000,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    low, high = float(interval.low), float(interval.high)
    sums = columns.sum(axis=1)
    return {
        figure: {
            "one": sums[0] / sums[1],
            "other": sums[2] / sums[3],
            "ratio": float(ratio(*columns)),
            "low": low,
            "high": high,
            "is_clear": not low <= 1 <= high,
        }
    }


def _emitted_and_rounds(record: dict[str, Any]) -> tuple[float, float]:
    stats = turn_stats(record)
    return float(sum(sum(turn.emitted) for turn in stats)), float(sum(turn.rounds for turn in stats))


def _tokens_and_seconds(record: dict[str, Any]) -> tuple[float, float]:
    choice = record["choices"][0]
    return float(sum(choice.get("new_tokens", []))), float(sum(choice.get("wall_time", [])))


def _ids(record: dict[str, Any]) -> Any:
    choice = record["choices"][0]
    return choice.get("ids", choice.get("turns"))
