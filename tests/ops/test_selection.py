"""`stable_topk`, `draft_topk` and `topk_candidates`: exact order, ties, NaN and infinities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from microspec_hf import ops
from microspec_hf.ops import reference

INF = math.inf


def naive_topk(row: list[float], k: int) -> list[int]:
    """Indices by (value desc, index asc), NaN as -inf."""
    values = [-INF if math.isnan(x) else x for x in row]
    return sorted(range(len(row)), key=lambda i: (-values[i], i))[:k]


# Few distinct values: nearly every selection cuts through ties, also at the k-th place.
TIED = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, -INF, INF, math.nan])


@given(st.lists(TIED, min_size=1, max_size=400), st.data())
@settings(max_examples=200, deadline=None)
def test_stable_topk_with_ties(row: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(row)))
    values, indices = ops.stable_topk(torch.tensor(row), k)
    assert indices.tolist() == naive_topk(row, k)
    assert values.tolist() == [-INF if math.isnan(row[i]) else row[i] for i in indices.tolist()]


def tied_rows(num_rows: int, length: int, num_values: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_values, (num_rows, length), generator=generator).float()


# Every branch: one sort, rank by the k-th value, chunks; lengths around multiples of a chunk.
@pytest.mark.parametrize("length", [40, 700, 1280, 1281, 4095, 4096, 4097, 5000])
@pytest.mark.parametrize("num_values", [1, 3, 50, 10**6])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_candidates_of_long_rows(length: int, num_values: int, k: int) -> None:
    logits = tied_rows(4, length, num_values)
    logits[1, length // 2 :] = -INF
    logits[2, ::3] = math.nan
    logits[3] = -INF
    logits[3, length - 1] = math.nan
    ids = ops.topk_candidates(logits, k)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [naive_topk(row, k) for row in logits.tolist()]


@pytest.mark.parametrize("length", [1281, 4095, 4097])
def test_best_value_at_the_very_end(length: int) -> None:
    """The last chunk is shorter than the others: what stands for its missing columns is never chosen."""
    logits = tied_rows(2, length, 5)
    logits[0, -1] = 9.0
    logits[1] = -INF
    logits[1, -1] = 9.0
    assert ops.topk_candidates(logits, 3).tolist() == [naive_topk(row, 3) for row in logits.tolist()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_first_candidate_is_the_argmax(dtype: torch.dtype) -> None:
    logits = torch.randn(60, 5003, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(ops.topk_candidates(logits, 3)[:, 0], logits.argmax(dim=-1))


def test_float64_is_not_rounded() -> None:
    logits = torch.tensor([[1.0, 1.0 + 1e-12, 1.0]], dtype=torch.float64)
    assert ops.topk_candidates(logits, 2).tolist() == [[1, 0]]


def test_rows_that_are_not_contiguous() -> None:
    logits = tied_rows(6, 9000, 7)
    strided = logits[::2, ::2]
    assert torch.equal(ops.topk_candidates(strided, 5), ops.topk_candidates(strided.contiguous(), 5))
    assert torch.equal(ops.topk_candidates(logits.t()[:6], 5), ops.topk_candidates(logits.t()[:6].contiguous(), 5))


@given(st.lists(st.lists(TIED, min_size=12, max_size=12), min_size=1, max_size=4), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_draft_topk_is_log_softmax_in_stable_order(rows: list[list[float]], k: int) -> None:
    scores, slots = ops.draft_topk(torch.tensor(rows), k)
    assert (scores.dtype, slots.dtype) == (torch.float32, torch.int64)
    assert slots.tolist() == [naive_topk(row, k) for row in rows]
    largest = torch.finfo(torch.float32).max
    clean = torch.tensor(rows, dtype=torch.float64).nan_to_num(nan=-INF, posinf=largest, neginf=-INF)
    expected = clean.log_softmax(dim=-1).nan_to_num(nan=-INF, neginf=-INF).gather(1, slots)
    # A finite logit beside an infinite one: both sides are hopeless, one by rounding to -inf.
    torch.testing.assert_close(scores.clamp(min=-1e38), expected.float().clamp(min=-1e38))


def test_draft_topk_of_half_precision_overflow() -> None:
    logits = torch.tensor([[1.0, INF, 3.0], [math.nan, -INF, -INF]], dtype=torch.float16)
    scores, slots = ops.draft_topk(logits, 2)
    assert slots.tolist() == [[1, 2], [0, 1]]
    assert scores[0, 0] == 0.0
    assert scores[0, 1] < -1e38
    assert scores[1].tolist() == [-INF, -INF]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_draft_topk_scores_are_float32_of_float32_logits(dtype: torch.dtype) -> None:
    logits = 30 * torch.randn(10, 3072, generator=torch.Generator().manual_seed(1)).to(dtype)
    scores, slots = ops.draft_topk(logits, 10)
    torch.testing.assert_close(scores, logits.float().log_softmax(dim=-1).gather(1, slots))
    assert slots.tolist() == [naive_topk(row, 10) for row in logits.float().tolist()]


@pytest.mark.parametrize("op", [ops.draft_topk, ops.topk_candidates])
@pytest.mark.parametrize("k", [0, 8])
def test_impossible_k_is_refused(op: object, k: int) -> None:
    with pytest.raises(ValueError, match=rf"from 1 to their last one.*\(2, 7\) and k={k}"):
        op(torch.zeros(2, 7), k)  # type: ignore[operator]


def test_branches_agree() -> None:
    """The chunked selection is the plain one."""
    rows = tied_rows(3, 4096, 5)
    chunked = ops.stable_topk(rows, 8)
    direct = reference._select(rows, 8)
    assert torch.equal(chunked[1], direct[1])
    assert torch.equal(chunked[0], direct[0])
