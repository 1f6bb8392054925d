"""Tree attention against attention with a mask that is made by hand."""

from __future__ import annotations

import math
import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from microspec_hf.ops import attention

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "one row": {"num_rows": 1, "length": 20},
    "no text": {"length": 0},
    "long": {"length": 300, "num_rows": 10},
    "hidden beginning": {"length": 150, "first": 140},
    "all words": {"num_rows": 64, "length": 9},
    "more columns than rows": {"num_rows": 5, "num_columns": 50},
    "no groups": {"num_heads": 2, "num_kv_heads": 2},
    "window": {"window": 7, "length": 40},
    "window and cap": {"window": 3, "softcap": 5.0, "length": 33},
    "cap": {"softcap": 2.0},
    "head of 80": {"head_dim": 80, "length": 70},
    "head of 256": {"head_dim": 256, "num_rows": 9},
    "batch": {"batch": 3, "length": 60},
}


def make(
    seed: int,
    batch: int = 1,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    num_rows: int = 12,
    num_columns: int | None = None,
    head_dim: int = 32,
    length: int = 21,
    first: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:
    """Arguments of an attention: random trees, of which the first row of the last text is padding."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    columns = num_columns or num_rows
    words, depths, lengths = [], [], []
    for text in range(batch):
        ancestors: list[int] = []
        levels: list[int] = []
        for node in range(columns):
            parent = draw.randrange(-1, node) if node else -1
            ancestors.append((ancestors[parent] if parent >= 0 else 0) | 1 << node)
            levels.append(levels[parent] + 1 if parent >= 0 else 0)
        chosen = sorted(draw.sample(range(columns), num_rows))
        words.append([ancestors[node] for node in chosen])
        depths.append(levels)
        lengths.append(max(0, length - 5 * text))
    if batch > 1:
        words[-1][0] = 0
    capacity = length + columns + 40
    signed = [[word - (1 << 64) if word >> 63 else word for word in row] for row in words]
    kv = [torch.randn(batch, num_kv_heads, capacity, head_dim, generator=generator) for _ in range(2)]
    for text, held in enumerate(lengths):
        for buffer in kv:
            buffer[text, :, held + columns :] = math.nan
            buffer[text, :, : min(first, held)] = math.inf
    query = torch.randn(batch, num_rows, num_heads, head_dim, generator=generator).transpose(1, 2)
    return (
        query.to(dtype),
        kv[0].to(dtype),
        kv[1].to(dtype),
        torch.tensor(lengths),
        torch.full((batch,), first),
        torch.tensor(signed),
        torch.tensor(depths),
        head_dim**-0.5,
        window,
        softcap,
    )


def by_hand(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    first: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    batch, num_heads, num_rows, head_dim = query.shape
    group = num_heads // keys.shape[1]
    output = torch.zeros(batch, num_rows, num_heads, head_dim, dtype=torch.float64)
    for b in range(batch):
        held = int(length[b])
        for t in range(num_rows):
            word = int(ancestors[b, t]) & (2**64 - 1)
            nodes = [j for j in range(64) if word >> j & 1]
            own = held + int(depths[b, nodes[-1] if nodes else 0])
            seen = [(c, c) for c in range(int(first[b]), held)] + [(held + j, held + int(depths[b, j])) for j in nodes]
            rows = [row for row, position in seen if not window or position > own - window]
            for h in range(num_heads):
                if not rows:
                    continue
                scores = keys[b, h // group, rows].double() @ query[b, h, t].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                output[b, t, h] = scores.softmax(0) @ values[b, h // group, rows].double()
    return output


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_reference(case: dict[str, Any]) -> None:
    for seed in range(3):
        arguments = make(seed, **case)
        got = attention.tree_attention(*arguments)
        assert got.is_contiguous()
        torch.testing.assert_close(got.double(), by_hand(*arguments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reference_in_half_precision(dtype: torch.dtype) -> None:
    arguments = make(1, dtype=dtype)
    got = attention.tree_attention(*arguments)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), by_hand(*arguments), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("device", ["cpu" if IS_INTERPRETED else CUDA])
def test_triton(device: str, case: dict[str, Any], dtype: torch.dtype) -> None:
    triton_attention = pytest.importorskip("microspec_hf.ops.triton_attention")
    if IS_INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter computes with numpy, which has no bfloat16")
    for seed in range(2):
        arguments = make(seed, dtype=dtype, **case)
        moved = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
        got = triton_attention.tree_attention(*moved).cpu()
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.double(), by_hand(*arguments), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", ["cpu", CUDA] if not IS_INTERPRETED else ["cpu"])
@pytest.mark.parametrize("shared", [True, False], ids=["rows alike", "rows apart"])
def test_rows_are_written(device: str, shared: bool) -> None:
    write = attention.write_rows
    if IS_INTERPRETED:
        write = pytest.importorskip("microspec_hf.ops.triton_attention").write_rows
    generator = torch.Generator().manual_seed(1)
    new = [torch.randn(2, 5, 3 * 24, generator=generator).view(2, 5, 3, 24).transpose(1, 2) for _ in range(2)]
    rows = torch.tensor([[3, 9, 0, 4, 7]]) if shared else torch.tensor([[3, 9, 0, 4, 7], [1, 2, 11, 10, 5]])
    expected = [torch.full((2, 3, 12, 24), -1.0) for _ in range(2)]
    for buffer, states in zip(expected, new, strict=True):
        for text in range(2):
            for t in range(5):
                buffer[text, :, rows[0 if shared else text, t]] = states[text, :, t]
    buffers = tuple(torch.full((2, 3, 12, 24), -1.0, device=device) for _ in range(2))
    write(buffers, rows.to(device), *(states.to(device) for states in new))
    assert all(torch.equal(got.cpu(), wanted) for got, wanted in zip(buffers, expected, strict=True))
