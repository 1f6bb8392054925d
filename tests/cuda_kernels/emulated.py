"""The CUDA kernels on the CPU: the project's device code, compiled by g++ over an emulator of blocks and warps."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EMULATOR = Path(__file__).parent / "emulator"
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def build(sources: Path, cuda_include: Path, folder: Path, compiler: str) -> ctypes.CDLL:
    """Compile the device code against the emulator.

    Args:
        sources: `cuda_kernels/microspec_cuda`.
        cuda_include: the toolkit's headers, for its vector and half types.
        folder: where to build.
    """
    for file in sources.glob("*.cuh"):
        # Dynamic shared memory has no spelling that C++ shares.
        text = re.sub(
            r"extern __shared__ (?:__align__\(\d+\) )?(.+) memory\[\];",
            r"\1* memory = reinterpret_cast<\1*>(emulator::dynamic_shared);",
            file.read_text(),
        )
        (folder / file.name).write_text(text)
    (folder / "ptx.cuh").write_text("#pragma once\n")  # the emulator has its own
    library = folder / "emulated.so"
    flags = ["-O1", "-std=c++17", "-fPIC", "-shared", f"-I{folder}", f"-I{EMULATOR}", f"-I{cuda_include}"]
    subprocess.run([compiler, *flags, str(EMULATOR / "kernels.cpp"), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def functions(library: ctypes.CDLL) -> dict[str, Callable[..., Any]]:
    """The ops, each with the arguments of its schema; results start as garbage."""

    def garbage(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, -77, dtype=dtype)

    def is_vectorised(logits: Tensor) -> bool:
        return logits.shape[1] * logits.element_size() % 16 == 0 and logits.data_ptr() % 16 == 0

    def draft_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        rows, columns = logits.shape
        scores, slots = garbage(rows, k, dtype=torch.float32), garbage(rows, k)
        library.emulate_draft_topk(
            pointer(logits),
            DTYPES[logits.dtype],
            rows,
            columns,
            k,
            is_vectorised(logits),
            pointer(scores),
            pointer(slots),
        )
        return scores, slots

    def topk_candidates(logits: Tensor, k: int) -> Tensor:
        rows, columns = logits.shape
        ids = garbage(rows, k)
        library.emulate_topk_candidates(
            pointer(logits), DTYPES[logits.dtype], rows, columns, k, is_vectorised(logits), pointer(ids)
        )
        return ids

    def build_tree(scores: Tensor, tokens: Tensor, parents: Tensor, root: Tensor, num_nodes: int) -> tuple[Tensor, ...]:
        nodes = tuple(garbage(num_nodes) for _ in range(4))
        inputs = map(pointer, (scores, tokens, parents, root))
        library.emulate_build_tree(*inputs, len(scores), num_nodes, *map(pointer, nodes))
        return nodes

    def window_update(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        slot_of, token_of, usage, ring, clock, candidates, pinned, stream = arguments
        rows, slots = garbage(len(candidates)), garbage(len(candidates))
        counts = garbage(2, dtype=torch.int32)
        library.emulate_window_update(
            *map(pointer, (slot_of, token_of, usage, ring, clock, candidates, pinned)),
            len(slot_of),
            len(token_of),
            len(ring),
            len(candidates),
            stream,
            *map(pointer, (rows, slots, counts)),
        )
        return rows, slots, counts

    def gather_rows(out: Tensor, weight: Tensor, rows: Tensor, slots: Tensor, count: Tensor) -> None:
        library.emulate_gather_rows(
            *map(pointer, (out, weight, rows, slots, count)),
            len(rows),
            weight[0].numel(),
            ctypes.c_int64(len(weight)),
            ctypes.c_int64(len(out)),
        )

    def compact_kv(buffers: list[Tensor], path: Tensor, start: Tensor) -> None:
        addresses = (ctypes.c_void_p * len(buffers))(*[buffer.data_ptr() for buffer in buffers])
        _, heads, capacity, units = buffers[0].shape
        library.emulate_compact_kv(
            addresses,
            len(buffers),
            pointer(path),
            pointer(start),
            len(path),
            heads,
            ctypes.c_int64(capacity),
            units,
        )

    ops = (draft_topk, topk_candidates, build_tree, window_update, gather_rows, compact_kv)
    return {op.__name__: op for op in ops}
