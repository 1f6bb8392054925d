"""`gather_rows` and `window_update` in Triton: for GPUs without compiled kernels. Importing this needs Triton.

The reference in `ops/reference.py` is the definition; results are equal to it bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

TRITON_VERSION: str = triton.__version__
MAX_CANDIDATES = 1024
MAX_SLOTS = 8192

COLUMNS = 1024
"""Elements of a row that one program copies at a time."""

PAIRS = 32
"""Candidates that all others are compared with at a time, to find duplicates."""


def supports(name: str, *arguments: Any) -> bool:
    """Whether the op takes these arguments: sizes and layout only, never a value."""
    if name == "gather_rows":
        return all(tensor.is_contiguous() for tensor in arguments)
    if name == "window_update":
        _, token_of, _, _, _, candidates, _, _ = arguments
        num_candidates, num_slots = int(candidates.shape[0]), int(token_of.shape[0])
        return 0 < num_candidates <= MAX_CANDIDATES and num_slots <= MAX_SLOTS
    return False


def gather_rows(out: Tensor, weight: Tensor, rows: Tensor, slots: Tensor, count: Tensor) -> None:
    row_size = weight.numel() // max(1, weight.shape[0])
    if rows.shape[0] == 0 or row_size == 0:
        return
    columns = min(COLUMNS, triton.next_power_of_2(row_size))
    grid = (rows.shape[0], triton.cdiv(row_size, columns))
    _gather_rows[grid](
        out, weight.detach(), rows, slots, count, row_size, weight.shape[0], out.shape[0], COLUMNS=columns
    )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gather_rows(out, weight, rows, slots, count, row_size, num_rows, num_slots, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
    entry = tl.program_id(0)
    if entry < tl.load(count):
        row = tl.load(rows + entry).to(tl.int64)
        slot = tl.load(slots + entry).to(tl.int64)
        if (row >= 0) & (row < num_rows) & (slot >= 0) & (slot < num_slots):
            column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            values = tl.load(weight + row * row_size + column, mask=column < row_size)
            tl.store(out + slot * row_size + column, values, mask=column < row_size)


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
    num_candidates, num_slots = candidates.shape[0], token_of.shape[0]
    rows, slots = torch.empty_like(candidates), torch.empty_like(candidates)
    counts = candidates.new_empty(2, dtype=torch.int32)
    _window_update[(1,)](
        slot_of,
        token_of,
        usage,
        ring,
        clock,
        candidates.contiguous(),
        pinned.view(torch.uint8),
        rows,
        slots,
        counts,
        slot_of.shape[0],
        num_slots,
        ring.shape[0],
        num_candidates,
        STREAM=stream,
        CANDIDATES=triton.next_power_of_2(max(PAIRS, num_candidates)),
        SLOTS=triton.next_power_of_2(max(2, num_slots)),
        PAIRS=PAIRS,
        num_warps=16,
    )
    return rows, slots, counts


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _window_update(  # type: ignore[no-untyped-def, unused-ignore]
    slot_of,
    token_of,
    usage,
    ring,
    clock,
    candidates,
    pinned,
    rows,
    slots,
    counts,
    vocab_size,
    num_slots,
    ring_length,
    num_candidates,
    STREAM: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One program; a barrier stands wherever it reads what another of its threads has written."""
    index = tl.arange(0, CANDIDATES)
    ids = tl.load(candidates + index, mask=index < num_candidates, other=-1)
    is_entry = (ids >= 0) & (ids < vocab_size)
    place = tl.cumsum(is_entry.to(tl.int32), 0) - 1
    num_entries = tl.sum(is_entry.to(tl.int32), 0)
    before = tl.load(clock)
    position = (before + place).to(tl.int32)
    slot = tl.load(slot_of + ids, mask=is_entry, other=-1)
    first_kept = num_entries - ring_length if STREAM else 0
    is_kept = is_entry & (place >= first_kept)

    # The last occurrence of each id, and how often it is kept: all pairs, some at a time.
    occurrences = tl.zeros([CANDIDATES], tl.int32)
    num_later = tl.zeros([CANDIDATES], tl.int32)
    places_before = tl.full([], 0, tl.int32)
    for start in range(0, num_candidates, PAIRS):
        other = start + tl.arange(0, PAIRS)
        other_ids = tl.load(candidates + other, mask=other < num_candidates, other=-1)
        other_entry = (other_ids >= 0) & (other_ids < vocab_size)
        other_place = places_before + tl.cumsum(other_entry.to(tl.int32), 0) - 1
        places_before += tl.sum(other_entry.to(tl.int32), 0)
        same = (ids[:, None] == other_ids[None, :]) & other_entry[None, :]
        num_later += tl.sum((same & (other[None, :] > index[:, None])).to(tl.int32), 1)
        occurrences += tl.sum((same & (other_place[None, :] >= first_kept)).to(tl.int32), 1)
    is_last = is_entry & (num_later == 0)
    is_new = is_last & (slot < 0)

    w = tl.arange(0, SLOTS)
    is_slot = w < num_slots
    token = tl.load(token_of + w, mask=is_slot, other=-1)
    is_pinned = tl.load(pinned + w, mask=is_slot, other=1) != 0
    is_active = is_slot & (token >= 0)

    if STREAM:
        cell = ring + (before + place) % tl.maximum(ring_length, 1)
        leaving = tl.load(cell, mask=is_kept, other=-1)
        leaving_slot = tl.load(slot_of + leaving, mask=leaving >= 0, other=-1)
        tl.atomic_add(usage + leaving_slot, -1, mask=leaving_slot >= 0)
        tl.atomic_add(usage + slot, 1, mask=is_kept & (slot >= 0))
        tl.store(cell, ids.to(tl.int32), mask=is_kept)
        tl.debug_barrier()
        used = tl.load(usage + w, mask=is_slot, other=0)
        leaves = is_active & (is_pinned == 0) & (used == 0)
        enters = is_new & is_kept
        usage_of = occurrences
    else:
        tl.store(usage + slot, position, mask=is_last & (slot >= 0))
        tl.debug_barrier()
        used = tl.load(usage + w, mask=is_slot, other=0)
        may_leave = is_active & (is_pinned == 0)
        excess = tl.sum(is_active.to(tl.int32), 0) + tl.sum(is_new.to(tl.int32), 0) - num_slots
        # The excess-th smallest position, bit by bit: the greatest value that fewer ones are below.
        found = tl.full([], 0, tl.int32)
        for step in range(31):
            attempt = found | (1 << (30 - step))
            below = tl.sum((may_leave & (used < attempt)).to(tl.int32), 0)
            below += tl.sum((is_new & (position < attempt)).to(tl.int32), 0)
            found = tl.where(below < excess, attempt, found)
        limit = tl.where(excess > 0, found, -1)
        leaves = may_leave & (used <= limit)
        enters = is_new & (position > limit)
        usage_of = position

    tl.store(slot_of + token, -1, mask=leaves)
    tl.store(token_of + w, -1, mask=leaves)
    tl.store(usage + w, 0, mask=leaves)

    # The ids that enter take the free slots in ascending order: the list of those is the result already.
    num_entering = tl.sum(enters.to(tl.int32), 0)
    is_free = is_slot & ((token < 0) | leaves)
    free_rank = tl.cumsum(is_free.to(tl.int32), 0) - 1
    tl.store(slots + free_rank, w.to(tl.int64), mask=is_free & (free_rank < num_entering))
    tl.debug_barrier()
    rank = tl.cumsum(enters.to(tl.int32), 0) - 1
    taken = tl.load(slots + rank, mask=enters, other=0)
    tl.store(rows + rank, ids, mask=enters)
    tl.store(slot_of + ids, taken.to(tl.int32), mask=enters)
    tl.store(token_of + taken, ids.to(tl.int32), mask=enters)
    tl.store(usage + taken, usage_of, mask=enters)
    rest = (index >= num_entering) & (index < num_candidates)
    tl.store(rows + index, -1, mask=rest)
    tl.store(slots + index, -1, mask=rest)
    tl.store(clock, before + num_entries)
    tl.store(counts, num_entering)
    tl.store(counts + 1, tl.sum(leaves.to(tl.int32), 0))


FUNCTIONS: dict[str, Callable[..., Any]] = {"gather_rows": gather_rows, "window_update": window_update}
