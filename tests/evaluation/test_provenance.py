from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path

import pytest
import torch
import transformers

import microspec_hf
from microspec_hf.evaluation import provenance
from microspec_hf.evaluation.provenance import _git_state


def test_names_versions_hardware_and_time() -> None:
    record = provenance(device="cpu", dtype=torch.bfloat16)
    assert record["versions"]["torch"] == torch.__version__
    assert record["versions"]["transformers"] == transformers.__version__
    assert record["versions"]["microspec_hf"] == microspec_hf.__version__
    assert record["dtype"] == "bfloat16"
    assert record["threads"] == torch.get_num_threads()
    assert record["device"] not in ("", "cpu")
    age = datetime.datetime.now(datetime.timezone.utc) - datetime.datetime.fromisoformat(record["utc"])
    assert abs(age) < datetime.timedelta(minutes=1)


def test_writes_no_folder_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    record = provenance(
        path=tmp_path / "a" / "result.json",
        text=str(tmp_path / "b"),
        relative="../shared/data",
        nested={"list": [tmp_path / "c"]},
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        ratio="1/2",
        number=3,
        nothing=None,
    )
    assert record["arguments"] == {
        "path": "result.json",
        "text": "b",
        "relative": "data",
        "nested": {"list": ["c"]},
        "hub": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "ratio": "1/2",
        "number": 3,
        "nothing": None,
    }
    assert str(tmp_path) not in json.dumps(record)


def test_revision_is_that_of_the_checkout_and_of_no_other(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert _git_state(tmp_path) == (None, None)
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    root = tmp_path.resolve()
    assert _git_state(root) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "file").write_text("2")
    assert _git_state(root) == (git("rev-parse", "HEAD"), True)
    inside = root / "site-packages"
    inside.mkdir()
    assert _git_state(inside) == (None, None)


def test_works_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    record = provenance()
    assert record["git_revision"] is None
    assert record["git_dirty"] is None
