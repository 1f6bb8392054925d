"""`microspec kernels`: the report, its exit code, and a build for the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from microspec_hf import ops
from microspec_hf.cli.kernels import app

run = CliRunner().invoke


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for variable in ("MICROSPEC_KERNELS", "MICROSPEC_KERNELS_REPO", "MICROSPEC_KERNELS_LOCK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MICROSPEC_CACHE", str(tmp_path))
    ops.forget()
    yield
    ops.forget()


def test_report() -> None:
    result = run(app, ["--device", "cpu"])
    assert result.exit_code == 0, result.output
    for name in ops.SCHEMAS:
        assert name in result.output
    assert "not hub: On a CPU the reference is the fast implementation." in result.output


def test_json_and_a_choice_that_is_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICROSPEC_KERNELS", "local")
    result = run(app, ["--device", "cpu", "--json"])
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert [op["op"] for op in record["ops"]] == list(ops.SCHEMAS)
    assert {op["served_by"] for op in record["ops"]} == {"reference"}
    assert "microspec kernels build" in json.dumps(record)


def test_build_then_report(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(app, ["build", "--backend", "cpu"])
    assert result.exit_code == 0, result.output
    monkeypatch.setenv("MICROSPEC_KERNELS", "local")
    result = run(app, ["--device", "cpu", "--json"])
    assert result.exit_code == 0
    assert {op["served_by"] for op in json.loads(result.stdout)["ops"]} == {"local"}


def test_wrong_device() -> None:
    result = run(app, ["--device", "abacus"])
    assert "--device must be a device type" in str(result.exception)
