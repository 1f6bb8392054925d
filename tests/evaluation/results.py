"""Result folders that no model made, with figures known by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from microspec_hf.evaluation import provenance
from microspec_hf.evaluation.arms import Resources, parse_arm


def answer(
    name: str,
    task: str,
    arm: str,
    emitted: Sequence[int] | None,
    seconds: float,
    *,
    ids: Sequence[int] | None = None,
    coverage: float = 1.0,
    active: float = 100.0,
    draft_ms: float = 0.0,
) -> dict[str, Any]:
    """A record of one turn; `emitted` None is a plain arm's, which then writes 11 tokens."""
    count = 11 if emitted is None else sum(emitted) + 1
    lengths = [1] * 10 if emitted is None else list(emitted)
    stats = None
    if emitted is not None:
        stats = {
            "new_tokens": count,
            "emitted": list(emitted),
            "num_levels": 3,
            "coverage": coverage,
            "mean_active_vocabulary": active,
            "prefill_seconds": seconds / 4,
            "decode_seconds": seconds * 3 / 4,
            "draft_seconds": draft_ms / 1000 * len(lengths),
            "a_field_of_a_later_version": 1,
        }
    choice = {
        "index": 0,
        "turns": ["text"],
        "decoding_steps": [len(lengths)],
        "new_tokens": [count],
        "wall_time": [seconds],
        "accept_lengths": lengths,
        "ids": [list(ids) if ids is not None else list(range(count))],
        "prompt_tokens": [5],
        "stats": [stats],
    }
    return {"question_id": name, "category": task, "arm": arm, "choices": [choice], "turns_left_out": 0}


def write_results(folder: Path, records: Mapping[str, Sequence[dict[str, Any]]], resources: Resources) -> Path:
    """A folder as `evaluate` leaves it."""
    folder.mkdir(parents=True)
    arms = {name: parse_arm(name, resources) for name in records}
    for name, rows in records.items():
        (folder / arms[name].file_name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    origin = provenance(command="evaluate", target="tiny", drafter="head", dtype="float32") | {
        "prompts": len(next(iter(records.values()))),
        "skipped": {"longer than the context": 2, "prompts": {"x": 900, "y": 901}},
        "turns_left_out": 3,
        "processes": 1,
        "seconds": 1.0,
        "decoding": {"max_new_tokens": 64, "temperature": 0.0, "seed": 0},
        "arms": {name: arm.describe() for name, arm in arms.items()},
    }
    (folder / "provenance.json").write_text(json.dumps(origin))
    return folder
