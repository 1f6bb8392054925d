from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from microspec_hf import EagleHead, MicroSpecConfig, SpeculationStats, TreeConfig
from microspec_hf.evaluation import (
    Prompt,
    expected_acceptance,
    measure_acceptance,
    parse_vocabulary,
    task_records,
)
from microspec_hf.evaluation.decoding import decode_plainly
from tests.evaluation.conftest import ids_of

TREE = TreeConfig(depth=2, top_k=3, num_nodes=6)


def test_measures_the_text_that_the_target_writes(
    target: PreTrainedModel, head: EagleHead, prompts: list[Prompt]
) -> None:
    answered = []
    stats = measure_acceptance(
        target, ids_of, head, prompts, MicroSpecConfig(TREE, "full"), 9, lambda: answered.append(1)
    )
    assert len(stats) == len(prompts) == len(answered)
    for prompt, answer in zip(prompts, stats, strict=True):
        assert answer.new_tokens == len(decode_plainly(target, ids_of(prompt), 9))
        assert answer.tree == {"depth": 2, "top_k": 3, "num_nodes": 6}
        assert answer.mean_active_vocabulary == 101
        assert answer.coverage == 1.0
        assert 1 <= answer.acceptance_length <= TREE.num_path_slots


def test_records_by_task_and_overall(prompts: list[Prompt]) -> None:
    lengths = [[2, 2], [4], [1, 1, 1]]
    stats = [SpeculationStats(new_tokens=sum(e) + 1, emitted=e, num_levels=3) for e in lengths]
    records = task_records("dynamic", prompts, stats)
    assert [(r["vocabulary"], r["task"], r["acceptance_length"]) for r in records] == [
        ("dynamic", "math", 8 / 3),
        ("dynamic", "code", 1.0),
        ("dynamic", "all", 11 / 6),
    ]
    assert {"coverage", "mean_active_vocabulary", "prompts", "rounds"} <= records[0].keys()
    json.dumps(records, allow_nan=False)
    with pytest.raises(ValueError, match="zip"):
        task_records("dynamic", prompts, stats[:2])


def test_expected_acceptance_has_the_form_that_tree_auto_reads() -> None:
    from microspec_hf.autotune import expected_acceptance as read

    def stats(*emitted: int) -> list[SpeculationStats]:
        return [SpeculationStats(emitted=list(emitted), num_levels=6)]

    table = expected_acceptance({(2, 16): stats(2, 3), (2, 8): stats(1, 3), (1, 8): stats(1, 2)})
    assert table == {"1": {"8": 1.5}, "2": {"8": 2.0, "16": 2.5}}
    assert list(table["2"]) == ["8", "16"]
    assert read(TreeConfig(depth=2, top_k=10, num_nodes=12), table) == 2.25


def test_parse_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text("[5, 3, 9]")
    assert parse_vocabulary("full").kind == "full"
    assert parse_vocabulary("dynamic").kind == "dynamic"
    assert parse_vocabulary("static", file).token_ids == (5, 3, 9)
    assert parse_vocabulary("static:2", file).size == 2
    with pytest.raises(ValueError, match="needs a file with its ids"):
        parse_vocabulary("static:2")
    with pytest.raises(ValueError, match="size must be an integer from 1 to 3, got 4"):
        parse_vocabulary("static:4", file)
    for wrong in ("everything", "full:3", "static:", "static:many", ""):
        with pytest.raises(ValueError, match="A vocabulary is full"):
            parse_vocabulary(wrong, file)
