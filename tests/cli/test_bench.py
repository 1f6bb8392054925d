"""`microspec bench` on a tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from microspec_hf import TreeConfig
from microspec_hf.cli import app
from microspec_hf.cli.bench import same_text_lines
from microspec_hf.evaluation import bench
from tests.cli.conftest import PairFolders

ARMS = "plain-stock,plain-engine,eagle-2,microspec"


@pytest.fixture
def arguments(pair_folders: PairFolders, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(bench, "TREE", TreeConfig(depth=2, top_k=3, num_nodes=6))
    pair = ["--model", str(pair_folders.target), "--drafter", str(pair_folders.drafter), "--device", "cpu"]
    return ["bench", *pair, "--dtype", "float32", "--repeats", "1", "-n", "6", "--arms"]


def test_bench(arguments: list[str], tmp_path: Path) -> None:
    files = tmp_path / "bench.json", tmp_path / "profile.json"
    result = CliRunner().invoke(
        app, [*arguments, ARMS, "--json", str(files[0]), "--profile", str(files[1])], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 0, result.output
    record = json.loads(files[0].read_text())
    assert [arm["arm"] for arm in record["arms"]] == ARMS.split(",")
    for arm in record["arms"]:
        wanted = {"round_ms", "draft_ms", "verify_ms", "rest_ms", "tokens_per_second", "acceptance_length"}
        assert wanted <= set(arm)
        assert arm["same_text_as"]["plain-stock"]["equal"] == arm["same_text_as"]["plain-stock"]["of"] > 0
        assert arm["arm"] in result.output
        assert arm["floor_ms"] > 0
    assert record["provenance"]["arguments"]["max_new_tokens"] == 6
    assert set(record["left_out"]) == {"fr-spec-32k", "fr-spec-16k", "plain-static-compiled"}
    assert str(tmp_path) not in json.dumps(record)
    assert json.loads(files[1].read_text())["kernels"] == []  # there is no GPU whose kernels could be listed


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        (["microspec,warp"], "no arm warp"),
        (["microspec,fr-spec-32k"], "a static list of 32,768 ids, got 0"),
        (["microspec,plain-static-compiled"], "on accelerators only"),
        (["plain-stock", "--profile", "round.json"], "add it to --arms"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], rest: list[str], said: str) -> None:
    result = CliRunner().invoke(app, [*arguments, *rest])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_same_texts_are_told() -> None:
    parted = [{"logit_gap": 0.125}, {"logit_gap": None}, {"logit_gap": 0.5}]
    records = [
        {"arm": "plain-stock", "same_text_as": {}},
        {"arm": "plain-engine", "same_text_as": {"plain-engine": {"equal": 7, "of": 7}}},
        {"arm": "eagle-2", "same_text_as": {"plain-engine": {"equal": 7, "of": 7, "differences": []}}},
        {
            "arm": "ours",
            "same_text_as": {"plain-engine": {"equal": 4, "of": 7, "near_ties": 2, "differences": parted}},
        },
    ]
    assert same_text_lines(records) == [
        "eagle-2: 7 of 7 texts are those of plain-engine.",
        "ours: 4 of 7 texts are those of plain-engine; where others part, scores differ by at most 0.5 (2 near ties).",
    ]
