"""Kernels of MicroSpec: the draft vocabulary and the draft tree of a speculative decoding round.

Each function has the meaning and the arguments of its namesake in `microspec_hf.ops`, whose PyTorch reference
it reproduces: selections, orders, slots and copies bit for bit, log-probabilities to float rounding.

Calls that a kernel does not take (another dtype, more columns than a block holds) are refused with a sentence;
`supports(name, *arguments)` tells beforehand, without looking at any value.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops

__all__ = [
    "build_tree",
    "compact_kv",
    "draft_topk",
    "gather_rows",
    "ops",
    "supports",
    "topk_candidates",
    "window_update",
]

# Limits of the CUDA kernels (microspec_cuda/*.cuh); the CPU kernels have none, but one answer serves both.
MAX_DRAFT_COLUMNS = 4096
MAX_K = 64
MAX_TREE_CANDIDATES = 4096
MAX_WINDOW_CANDIDATES = 1024
MAX_WINDOW_SLOTS = 8192
WINDOW_SCRATCH, WINDOW_SLOT = 64 * 1024, 9  # bytes of shared memory: at most, and of each slot
MAX_PATH = 16

_LOGITS = (torch.float16, torch.bfloat16, torch.float32)


def draft_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return ops.draft_topk.default(logits, k)


def topk_candidates(logits: Tensor, k: int) -> Tensor:
    return ops.topk_candidates.default(logits, k)


def build_tree(
    scores: Tensor, tokens: Tensor, parents: Tensor, root: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return ops.build_tree.default(scores, tokens, parents, root, num_nodes)


def gather_rows(out: Tensor, weight: Tensor, rows: Tensor, slots: Tensor, count: Tensor) -> None:
    ops.gather_rows.default(out, weight, rows, slots, count)


def window_update(
    slot_of: Tensor,
    token_of: Tensor,
    usage: Tensor,
    ring: Tensor,
    clock: Tensor,
    candidates: Tensor,
    pinned: Tensor,
    stream: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return ops.window_update.default(slot_of, token_of, usage, ring, clock, candidates, pinned, stream)


def compact_kv(buffers: list[Tensor], path: Tensor, start: Tensor) -> None:
    ops.compact_kv.default(buffers, path, start)


def _supports_draft_topk(logits: Tensor, k: int) -> bool:
    columns = logits.shape[1]
    return logits.dtype in _LOGITS and logits.is_contiguous() and columns <= MAX_DRAFT_COLUMNS and k <= MAX_K


def _supports_topk_candidates(logits: Tensor, k: int) -> bool:
    return logits.dtype in _LOGITS and logits.is_contiguous() and logits.shape[0] <= 65535 and k <= MAX_K


def _supports_build_tree(scores: Tensor, tokens: Tensor, parents: Tensor, root: Tensor, num_nodes: int) -> bool:
    return (
        scores.dtype == torch.float32
        and scores.shape[0] <= MAX_TREE_CANDIDATES
        and scores.is_contiguous()
        and tokens.is_contiguous()
        and parents.is_contiguous()
    )


def _supports_gather_rows(out: Tensor, weight: Tensor, rows: Tensor, slots: Tensor, count: Tensor) -> bool:
    return rows.dtype == slots.dtype and all(t.is_contiguous() for t in (out, weight, rows, slots))


def _supports_window_update(
    slot_of: Tensor,
    token_of: Tensor,
    usage: Tensor,
    ring: Tensor,
    clock: Tensor,
    candidates: Tensor,
    pinned: Tensor,
    stream: bool,
) -> bool:
    return (
        candidates.shape[0] <= MAX_WINDOW_CANDIDATES
        and token_of.shape[0] <= MAX_WINDOW_SLOTS
        and WINDOW_SCRATCH + WINDOW_SLOT * token_of.shape[0] <= _shared_memory(token_of.device)
        and candidates.is_contiguous()
    )


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a block may have."""
    if device.type != "cuda":
        return 1 << 30
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def _supports_compact_kv(buffers: list[Tensor], path: Tensor, start: Tensor) -> bool:
    return path.shape[0] <= MAX_PATH and all(buffer.is_contiguous() for buffer in buffers)


_SUPPORTS = {
    "build_tree": _supports_build_tree,
    "compact_kv": _supports_compact_kv,
    "draft_topk": _supports_draft_topk,
    "gather_rows": _supports_gather_rows,
    "topk_candidates": _supports_topk_candidates,
    "window_update": _supports_window_update,
}


def supports(name: str, *arguments: Any) -> bool:
    """Whether the op takes these arguments: dtypes, sizes and layout only, never a value."""
    return _SUPPORTS[name](*arguments)


# Results without data, for torch.compile and meta tensors.


@torch.library.register_fake(add_op_namespace_prefix("draft_topk"))
def _(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


@torch.library.register_fake(add_op_namespace_prefix("topk_candidates"))
def _(logits: Tensor, k: int) -> Tensor:
    return logits.new_empty((logits.shape[0], k), dtype=torch.int64)


@torch.library.register_fake(add_op_namespace_prefix("build_tree"))
def _(
    scores: Tensor, tokens: Tensor, parents: Tensor, root: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nodes = tuple(tokens.new_empty((num_nodes,)) for _ in range(4))
    return nodes[0], nodes[1], nodes[2], nodes[3]


@torch.library.register_fake(add_op_namespace_prefix("gather_rows"))
def _(out: Tensor, weight: Tensor, rows: Tensor, slots: Tensor, count: Tensor) -> None:
    return None


@torch.library.register_fake(add_op_namespace_prefix("window_update"))
def _(
    slot_of: Tensor,
    token_of: Tensor,
    usage: Tensor,
    ring: Tensor,
    clock: Tensor,
    candidates: Tensor,
    pinned: Tensor,
    stream: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, slots = torch.empty_like(candidates), torch.empty_like(candidates)
    return rows, slots, candidates.new_empty((2,), dtype=torch.int32)


@torch.library.register_fake(add_op_namespace_prefix("compact_kv"))
def _(buffers: list[Tensor], path: Tensor, start: Tensor) -> None:
    return None
