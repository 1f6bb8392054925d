from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from microspec_hf.cli import app
from microspec_hf.cli import train as module
from microspec_hf.training import TrainConfig
from tests.cli.conftest import PairFolders


def run(*arguments: str) -> object:
    return CliRunner().invoke(app, ["train", *arguments], env={"COLUMNS": "300", "NO_COLOR": "1"})


def test_every_field_is_an_option_with_a_help_text() -> None:
    shown = run("--help").output
    helps = module._field_helps(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')}" in shown
        assert helps[field.name]


def test_help_of_a_line_that_speaks_of_several_fields() -> None:
    @dataclasses.dataclass
    class Config:
        """A configuration.

        Args:
            first: one line
                and its end.
            second, third: of both: `x`.
        """

    assert module._field_helps(Config) == {
        "first": "One line and its end.",
        "second": "Of both: x.",
        "third": "Of both: x.",
    }


def test_options_reach_the_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[TrainConfig] = []

    def record(config: TrainConfig) -> dict[str, object]:
        seen.append(config)
        return {"epochs": []}

    monkeypatch.setattr(module, "run_training", record)
    required = ["--target", "t", "--prompts", "p", "--output", "o"]
    file = tmp_path / "record.json"
    result = run(*required, "--epochs", "3", "--languages", "en", "--languages", "de", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert run(*required).exit_code == 0
    assert seen == [
        TrainConfig(target="t", prompts="p", output="o", epochs=3, languages=["en", "de"]),
        TrainConfig(target="t", prompts="p", output="o"),
    ]
    written = json.loads(file.read_text())
    assert written["epochs"] == []
    assert written["provenance"]["arguments"]["epochs"] == 3


def test_a_bad_value_is_one_sentence() -> None:
    result = run("--target", "t", "--prompts", "p", "--output", "o", "--optimizer", "sgd")
    assert result.exit_code == 2
    assert "optimizer must be" in result.output
    assert "Traceback" not in result.output


def test_trains_a_head(pair_folders: PairFolders, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1} w{2 * i}"}) + "\n" for i in range(20)))
    output = tmp_path / "head"
    short = [
        "--max-new-tokens",
        "8",
        "--epochs",
        "1",
        "--batch-tokens",
        "256",
        "--sampled",
        "0",
        "--heldout",
        "0.2",
    ]
    pair = ["--target", str(pair_folders.target), "--prompts", str(prompts), "--output", str(output)]
    result = run(*pair, *short)
    assert result.exit_code == 0, result.output
    assert (output / "model.safetensors").exists()
