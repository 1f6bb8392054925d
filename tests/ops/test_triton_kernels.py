"""The Triton kernels equal the reference: on a GPU, or with TRITON_INTERPRET=1 on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from microspec_hf.ops import loading, triton_kernels
from tests.cuda_kernels import test_parity as parity

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")

pytestmark = [] if IS_INTERPRETED else [pytest.mark.gpu]


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    services = {
        name: loading.Service(name, "triton", "Triton", (), function, triton_kernels.supports)
        for name, function in triton_kernels.FUNCTIONS.items()
    }
    monkeypatch.setitem(loading._services, DEVICE.type, services)


@pytest.mark.parametrize("stream", [False, True], ids=["lru", "stream"])
@pytest.mark.parametrize(
    ("vocab_size", "num_slots", "num_pinned", "num_candidates"),
    [(14, 5, 2, 9), (50, 50, 3, 40), (300, 33, 1, 64), (4000, 1025, 0, 240), (70, 1, 1, 33), (70, 1, 0, 1)],
)
def test_window_update(vocab_size: int, num_slots: int, num_pinned: int, num_candidates: int, stream: bool) -> None:
    parity.TestWindowUpdate().test_long_runs(DEVICE, vocab_size, num_slots, num_pinned, num_candidates, stream)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("width", [(), (3,), (896,), (1000,)], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_gather_rows(dtype: torch.dtype, width: tuple[int, ...], index_dtype: torch.dtype) -> None:
    parity.TestGatherRows().test_rows(DEVICE, dtype, width, index_dtype)


def test_tier() -> None:
    """Chosen by name, it serves the two ops that it has."""
    services = loading._choose(DEVICE, "triton")
    assert {name for name, service in services.items() if service.tier == "triton"} == set(triton_kernels.FUNCTIONS)
