"""Who serves the programs that exist in Triton and in PyTorch."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from microspec_hf.ops import serving


class OnGpu:
    """Stands for a tensor on a GPU."""

    device = torch.device("cuda")


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Tensor", (torch.Tensor, OnGpu))
    serving._load.cache_clear()


def made(module: str = "fast") -> Any:
    @serving.in_triton(module)
    def double(value: Any, times: int = 2) -> Any:
        """Twice as much."""
        return "plain", times

    return double


def test_triton_serves_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = ModuleType("microspec_hf.ops.fast")
    fast.double = lambda value, times=2: ("fast", times) if times < 5 else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fast.__name__, fast)
    double = made()
    assert double(OnGpu()) == ("fast", 2)
    assert double((OnGpu(), None), times=3) == ("fast", 3)
    assert double(OnGpu(), times=7) == ("plain", 7)  # it does not take these arguments
    assert double(torch.ones(1)) == ("plain", 2)
    assert double.__doc__ == "Twice as much."


def test_without_triton_pytorch_serves_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    double = made("no_such_module")
    with caplog.at_level(logging.WARNING):
        assert [double(OnGpu()), double(OnGpu())] == [("plain", 2)] * 2
    assert sum("double runs in PyTorch" in record.message for record in caplog.records) == 1
