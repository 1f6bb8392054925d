"""The whole run on a tiny target: it learns, goes on where it stopped, and refuses what does not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from microspec_hf import load_drafter
from microspec_hf.training import TrainConfig, train, trainer
from microspec_hf.training.trainer import held_out

ROOT = Path(__file__).parents[2]


def make_config(target: Path, prompts: Path, output: Path, **changes: Any) -> TrainConfig:
    options: dict[str, Any] = {
        "max_new_tokens": 16,
        "epochs": 2,
        "batch_tokens": 256,
        "answer_tokens": 2000,
        "heldout": 0.2,
        "sampled": 0,
        "learning_rate": 0.01,
    }
    return TrainConfig(target=str(target), prompts=str(prompts), output=str(output), **(options | changes))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_learns(target_folder: Path, prompts_file: Path, tmp_path: Path, optimizer: str) -> None:
    output = tmp_path / "head"
    config = make_config(target_folder, prompts_file, output, epochs=12, optimizer=optimizer, target_name="org/tiny")
    record = train(config)
    losses = [epoch["loss"] for epoch in record["epochs"]]
    for step in range(3):
        assert losses[-1][step] < losses[0][step] - 0.3
    assert record == json.loads((output / "training.json").read_text())
    assert 0 < record["epochs"][0]["heldout_rows"] < 16 * 20
    assert str(tmp_path) not in json.dumps(record)
    head = load_drafter(output, torch.float32, "cpu")
    assert head.config.target == "org/tiny"
    assert head.fc.weight.shape == (48, 96)


def test_a_head_that_may_look_learns_the_target(
    target_folder: Path, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained and tested on the same few answers, the head comes to predict them: the rows are aligned."""
    monkeypatch.setattr(trainer, "held_out", lambda index, share: index >= 0)
    monkeypatch.setattr(
        trainer._Run, "_groups", lambda self, epoch: (self.sequences.groups(256, self.testing, epoch), 5)
    )
    config = make_config(
        target_folder,
        prompts_file,
        tmp_path / "head",
        max_prompts=12,
        epochs=150,
        noise=0.0,
        optimizer="adamw",
    )
    agreement = train(config)["epochs"][-1]["heldout_agreement"]
    assert agreement[0] > 0.9


def test_a_rerun_goes_on(
    target_folder: Path, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(make_config(target_folder, prompts_file, tmp_path / "whole", epochs=3))
    config = make_config(target_folder, prompts_file, tmp_path / "parts", epochs=3)
    real, calls = trainer._Run._save_state, 0

    def stop_after_first_epoch(self: Any) -> None:
        nonlocal calls
        real(self)
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(trainer._Run, "_save_state", stop_after_first_epoch)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    parts = train(config)
    assert calls == 3
    for a, b in zip(whole["epochs"], parts["epochs"], strict=True):
        assert a["loss"] == b["loss"]
        assert a["heldout_loss"] == b["heldout_loss"]
    with pytest.raises(ValueError, match=r"learning_rate=0\.01 \(now 0\.02\)"):
        train(make_config(target_folder, prompts_file, tmp_path / "parts", epochs=3, learning_rate=0.02))


def test_features_need_not_be_kept(target_folder: Path, prompts_file: Path, tmp_path: Path) -> None:
    records = [
        train(make_config(target_folder, prompts_file, tmp_path / kind, cache_features=kind))
        for kind in ("always", "never")
    ]
    for a, b in zip(records[0]["epochs"], records[1]["epochs"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)


def test_a_time_limit_ends_the_training(
    target_folder: Path, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "LOOK_EVERY", 1)
    config = make_config(target_folder, prompts_file, tmp_path / "head", epochs=50, train_seconds=1e-6)
    record = train(config)
    assert [epoch["steps"] for epoch in record["epochs"]] == [1]
    assert (tmp_path / "head" / "model.safetensors").exists()


def test_learning_rate_rises_and_falls() -> None:
    run = object.__new__(trainer._Run)
    run.config = TrainConfig(target="t", prompts="p", output="o", warmup=0.1)
    rates = []
    for step in range(101):
        run.progress = step / 100
        rates.append(run._rate())
    assert rates[0] < 0.02
    assert max(rates) == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_too_few_answers_for_the_processes(target_folder: Path, prompts_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 answers make 0 batches"):
        train(make_config(target_folder, prompts_file, tmp_path / "head", max_prompts=1, heldout=0.999999))


def test_all_answers_of_a_prompt_are_held_out_together() -> None:
    index = torch.arange(20_000)
    held = held_out(index, 0.05)
    assert 0.04 < float(held.float().mean()) < 0.06
    shuffled = torch.randperm(20_000)
    assert torch.equal(held_out(index[shuffled], 0.05), held[shuffled])
    assert not held_out(index, 0.0).any()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer", "sgd"),
        ("stage", "nothing"),
        ("cache_features", "yes"),
        ("unroll", 0),
        ("batch_tokens", 0),
        ("train_seconds", 0.0),
        ("max_prompts", -1),
        ("temperature", 0.0),
        ("sampled", -1),
        ("heldout", 1.0),
        ("warmup", -0.1),
    ],
)
def test_bad_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        TrainConfig(**({"target": "t", "prompts": "p", "output": "o"} | {name: value}))


def launch(command: list[str], config: TrainConfig) -> subprocess.CompletedProcess[str]:
    names = ("target", "prompts", "output", "max_new_tokens", "epochs", "batch_tokens", "sampled", "heldout")
    options = [part for name in names for part in (f"--{name}", str(getattr(config, name)))]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.run(
        [sys.executable, *command, str(ROOT / "examples" / "train_drafter.py"), *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_example(target_folder: Path, prompts_file: Path, tmp_path: Path) -> None:
    config = make_config(target_folder, prompts_file, tmp_path / "head", epochs=1, max_new_tokens=8)
    done = launch([], config)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "head" / "model.safetensors").exists()


@pytest.mark.slow
def test_example_in_two_processes(target_folder: Path, prompts_file: Path, tmp_path: Path) -> None:
    config = make_config(target_folder, prompts_file, tmp_path / "head", epochs=2, max_new_tokens=8)
    done = launch(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], config)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "head" / "training.json").read_text())
    assert record["provenance"]["processes"] == 2
    assert len(record["epochs"]) == 2
    assert (tmp_path / "head" / "model.safetensors").exists()
