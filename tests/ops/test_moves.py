"""`gather_rows` and `compact_kv`: exactly the named rows move, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from microspec_hf import ops
from microspec_hf.ops import reference

SENTINEL = -12345.0
Gather = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]

# The form of a fixed size serves devices without a kernel; here it runs on the CPU.
FORMS = pytest.mark.parametrize("gather", [ops.gather_rows, reference.gather_rows_masked], ids=["exact", "masked"])


@FORMS
@pytest.mark.parametrize("width", [(), (1,), (5,), (64,)], ids=["bias", "1", "5", "64"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 3, 6])
def test_copies_exactly_count_rows(
    gather: Gather, width: tuple[int, ...], index_dtype: torch.dtype, count: int
) -> None:
    weight = torch.randn(20, *width, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([19, 0, 7, 7, 3, 12], dtype=index_dtype)
    slots = torch.tensor([2, 9, 0, 4, 8, 5], dtype=index_dtype)
    # Behind the count anything may stand; the slot of an entry that is not the first is the hardest case.
    rows[count:], slots[count:] = -1, (9 if count else -1)
    out = torch.full((10, *width), SENTINEL)
    expected = out.clone()
    for row, slot in zip(rows[:count].tolist(), slots[:count].tolist(), strict=True):
        expected[slot] = weight[row]
    gather(out, weight, rows, slots, torch.tensor([count], dtype=torch.int32))
    assert torch.equal(out, expected)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_and_parameters(gather: Gather, dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.randn(6, 3, dtype=dtype))
    out = torch.zeros(4, 3, dtype=dtype)
    with torch.no_grad():
        gather(out, weight, torch.tensor([5, 1]), torch.tensor([0, 3]), torch.tensor([2], dtype=torch.int32))
    assert torch.equal(out[[0, 3]], weight[[5, 1]])
    assert not out.requires_grad


def test_no_entries_at_all() -> None:
    out = torch.full((3, 2), SENTINEL)
    none = torch.empty(0, dtype=torch.int64)
    ops.gather_rows(out, torch.zeros(4, 2), none, none, torch.zeros(1, dtype=torch.int32))
    assert (out == SENTINEL).all()


def test_gather_shapes_are_checked() -> None:
    rows = torch.tensor([0])
    count = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"float32 \(3, 2\) and torch.float16 \(4, 2\)"):
        ops.gather_rows(torch.zeros(3, 2), torch.zeros(4, 2, dtype=torch.float16), rows, rows, count)
    with pytest.raises(ValueError, match=r"\(1,\), \(2,\) and \(1,\)"):
        ops.gather_rows(torch.zeros(3, 2), torch.zeros(4, 2), rows, torch.tensor([0, 1]), count)


def kv_buffers(capacity: int) -> list[Tensor]:
    """Buffers of two layers, unlike in heads and width, whose every row says where it was."""
    shapes = [(1, 2, capacity, 4), (1, 2, capacity, 4), (1, 1, capacity, 8)]
    return [torch.arange(capacity).float().view(1, 1, -1, 1).expand(shape).clone() for shape in shapes]


def rows_of(buffer: Tensor) -> list[int]:
    assert (buffer == buffer[:1, :1, :, :1]).all()
    return [int(row) for row in buffer[0, 0, :, 0]]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_compaction_reads_before_it_writes(data: st.DataObject) -> None:
    num_nodes = data.draw(st.integers(1, 12))
    start = data.draw(st.integers(0, 5))
    path = data.draw(st.lists(st.integers(0, num_nodes - 1), min_size=1, max_size=9))  # any order, duplicates too
    capacity = start + max(num_nodes, len(path)) + data.draw(st.integers(0, 3))
    buffers = kv_buffers(capacity)
    ops.compact_kv(buffers, torch.tensor(path), torch.tensor([start]))
    expected = list(range(capacity))
    expected[start : start + len(path)] = [start + node for node in path]
    assert [rows_of(buffer) for buffer in buffers] == [expected] * 3


def test_golden_path() -> None:
    """Nodes 0, 1 and 3 accepted behind 5 committed rows; the padding repeats the last one."""
    buffers = kv_buffers(12)
    ops.compact_kv(buffers, torch.tensor([0, 1, 3, 3]), torch.tensor([5]))
    assert rows_of(buffers[0])[:8] == [0, 1, 2, 3, 4, 5, 6, 8]


def test_a_path_longer_than_the_buffer_has_room_for() -> None:
    """A small tree near the end: slots behind the path fall behind the buffer and are left out."""
    buffers = kv_buffers(8)
    ops.compact_kv(buffers, torch.tensor([0, 1, 1, 1, 1, 1, 1]), torch.tensor([6]))
    assert rows_of(buffers[0]) == [0, 1, 2, 3, 4, 5, 6, 7]
    ops.compact_kv(buffers, torch.tensor([1, 0, 0]), torch.tensor([6]))
    assert rows_of(buffers[0]) == [0, 1, 2, 3, 4, 5, 7, 6]


def test_nothing_to_move() -> None:
    ops.compact_kv([], torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(ValueError, match=r"start the shape \(1,\), got \(1,\) and \(\)"):
        ops.compact_kv(kv_buffers(4), torch.tensor([0]), torch.tensor(0))
