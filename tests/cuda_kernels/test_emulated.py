"""The CUDA device code itself, without a GPU: every kernel on an emulator equals the reference.

What the emulator cannot show: races, timing, clusters of blocks. The same comparisons run on a GPU in test_parity.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from microspec_hf.ops import loading
from tests.cuda_kernels import emulated
from tests.cuda_kernels import test_parity as parity

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cuda_include(builder: ModuleType) -> Path:
    folder = builder.cuda_include()
    if folder is None:
        pytest.skip("the CUDA toolkit's headers are not here")
    return folder


@pytest.fixture(scope="module")
def functions(
    builder: ModuleType, cuda_include: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Callable[..., Any]]:
    sources, folder = builder.SOURCES / "microspec_cuda", tmp_path_factory.mktemp("emulated")
    return emulated.functions(emulated.build(sources, cuda_include, folder, builder.require_gxx()))


@pytest.fixture(autouse=True)
def served(functions: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated kernels serve the CPU."""

    def supports(name: str, *arguments: Any) -> bool:
        return True

    services = {
        name: loading.Service(name, "path", "the emulator", (), function, supports)
        for name, function in functions.items()
    }
    monkeypatch.setitem(loading._services, "cpu", services)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("columns", "k"), [(1, 1), (131, 10), (3072, 10), (4093, 20), (4096, 64)])
def test_draft_topk(dtype: torch.dtype, columns: int, k: int) -> None:
    parity.TestSelection().test_draft_topk(CPU, dtype, columns, k)


@pytest.mark.parametrize(
    ("dtype", "columns", "k"),
    [
        (torch.bfloat16, 131, 3),
        (torch.float32, 16384, 1),
        (torch.float16, 50257, 3),
        (torch.bfloat16, 65544, 20),
    ],
)
def test_topk_candidates(dtype: torch.dtype, columns: int, k: int) -> None:
    parity.TestSelection().test_topk_candidates(CPU, dtype, columns, k)


@pytest.mark.parametrize("peaked", [False, True])
@pytest.mark.parametrize(
    ("top_k", "depth", "num_nodes"), [(2, 2, 6), (10, 5, 60), (10, 5, 1), (12, 6, 64), (16, 6, 60)]
)
def test_build_tree(top_k: int, depth: int, num_nodes: int, peaked: bool) -> None:
    parity.TestBuildTree().test_random_rounds(CPU, top_k, depth, num_nodes, peaked)


def test_build_tree_of_few_candidates() -> None:
    parity.TestBuildTree().test_missing_candidates(CPU)
    parity.TestBuildTree().test_all_alike(CPU)


@pytest.mark.parametrize("stream", [False, True], ids=["lru", "stream"])
@pytest.mark.parametrize(
    ("vocab_size", "num_slots", "num_pinned", "num_candidates"),
    [(14, 5, 2, 9), (300, 33, 1, 64), (4000, 1025, 0, 240), (9000, 3072, 5, 1024), (70, 1, 1, 33)],
)
def test_window_update(vocab_size: int, num_slots: int, num_pinned: int, num_candidates: int, stream: bool) -> None:
    parity.TestWindowUpdate().test_long_runs(CPU, vocab_size, num_slots, num_pinned, num_candidates, stream)


@pytest.mark.parametrize("num_old", [1, 100, 300])
def test_window_update_of_ids_that_were_last_seen_long_ago(num_old: int) -> None:
    parity.TestWindowUpdate().test_ids_that_were_last_seen_long_ago(CPU, num_old)


@pytest.mark.parametrize("width", [(), (3,), (64,), (1000,)], ids=str)
def test_gather_rows(width: tuple[int, ...]) -> None:
    parity.TestGatherRows().test_rows(CPU, torch.float32, width, torch.int64)


def test_compact_kv() -> None:
    kv = parity.TestCompactKV()
    kv.test_paths(CPU, torch.float32, 3, 80)
    kv.test_near_the_end(CPU)


def test_the_emulator_finds_a_barrier_that_some_threads_miss(
    tmp_path: Path, builder: ModuleType, cuda_include: Path
) -> None:
    """The reports that the tests rely on do come."""
    source = tmp_path / "missed.cpp"
    source.write_text("""
#include "emulator.h"
void kernel() { if (threadIdx.x % 2 == 0) __syncthreads(); else __ballot_sync(~0u, true); }
int main() { emulator::launch(dim3(1), dim3(64), kernel); }
""")
    program = tmp_path / "missed"
    flags = ["-std=c++17", f"-I{emulated.EMULATOR}", f"-I{cuda_include}"]
    subprocess.run([builder.require_gxx(), *flags, str(source), "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode != 0
    assert "deadlock" in result.stderr
