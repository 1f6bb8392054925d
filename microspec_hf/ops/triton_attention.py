"""`tree_attention` in Triton: a text's keys and values are read once, by blocks that share them out among themselves.

Query heads that share a key-value head are rows of one tile. The columns are divided among a fixed number of splits,
by the length that lies on the device, so that a captured launch serves every length; a second kernel adds the splits
up (flash-decoding). Importing this needs Triton.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from microspec_hf.ops.triton_launch import started_early, wait_for_earlier

MAX_SPLITS = 64


@dataclass(frozen=True)
class Tiles:
    """How a launch is cut.

    Args:
        rows: query rows of a tile.
        columns: keys of a step.
        warps, stages: of Triton.
        waves: blocks for each multiprocessor.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    waves: int = 1


def tiles_for(num_rows: int, head_dim: int, itemsize: int) -> Tiles:
    """For `num_rows` query rows of a key-value head."""
    if itemsize > 2:  # float32: the same bytes in half the elements
        return Tiles(16 if num_rows <= 16 else 32, 32, 4, 1)
    if num_rows <= 16:
        return Tiles(16, 64, 4, 3, waves=2)
    return Tiles(64, 64, 4, 2)


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    first: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    tiles: Tiles | None = None,
) -> Tensor:
    batch, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    tiles = tiles or tiles_for(group * num_rows, head_dim, query.element_size())
    num_tiles = triton.cdiv(group * num_rows, tiles.rows)
    blocks = batch * num_kv_heads * num_tiles
    splits = min(MAX_SPLITS, max(1, tiles.waves * _num_processors(query.device) // blocks))
    splits = 1 << (splits.bit_length() - 1)
    width = max(16, triton.next_power_of_2(head_dim))
    early = started_early(query.device)
    partial = query.new_empty(batch * num_heads * num_rows, splits, head_dim + 2, dtype=torch.float32)
    output = query.new_empty(batch, num_rows, num_heads, head_dim)
    if keys.stride() != values.stride() or keys.stride(3) != 1 or query.stride(3) != 1:
        query, keys, values = query.contiguous(), keys.contiguous(), values.contiguous()
    _attend[(batch * num_kv_heads, num_tiles, splits)](
        query,
        keys,
        values,
        length,
        first,
        ancestors.contiguous(),
        depths.contiguous(),
        partial,
        scale,
        softcap,
        window,
        query.stride(0),
        query.stride(1),
        query.stride(2),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        T=num_rows,
        M=depths.shape[1],
        D=head_dim,
        WIDTH=width,
        TREE=max(16, triton.next_power_of_2(depths.shape[1])),
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        SPLITS=splits,
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **early,
    )
    _add_up[(batch * num_rows, num_heads)](
        partial, output, HEADS=num_heads, T=num_rows, D=head_dim, WIDTH=width, SPLITS=splits, num_warps=1, **early
    )
    return output


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _attend(  # type: ignore[no-untyped-def, unused-ignore]
    query,
    keys,
    values,
    length_of,
    first_of,
    ancestors,
    depths,
    partial,
    scale,
    softcap,
    window,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_row,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    T: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    TREE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """One split of one tile of rows: maximum, sum and weighted values, [heads, T, SPLITS, D + 2] in float32."""
    wait_for_earlier(EARLY)
    batch = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < GROUP * T
    query_of_row = head * GROUP + row // T
    t = row % T
    dim = tl.arange(0, WIDTH)
    is_dim = dim < D

    length = tl.load(length_of + batch)
    first = tl.load(first_of + batch)
    word = tl.load(ancestors + batch * T + t, mask=is_row, other=0)
    own_depth = tl.zeros([ROWS], tl.int64)
    if HAS_WINDOW:
        for j in range(M):
            depth = tl.load(depths + batch * M + j)
            own_depth = tl.where(((word >> j) & 1) == 1, depth, own_depth)

    places = query + batch * query_batch + query_of_row[:, None] * query_head + t[:, None] * query_row + dim[None, :]
    q = tl.load(places, mask=is_row[:, None] & is_dim[None, :], other=0.0)

    # The text's columns in steps, and the tree's as the last one: each split takes an equal share of them.
    start = first // COLUMNS * COLUMNS
    text_steps = tl.cdiv(length - start, COLUMNS)
    share = tl.cdiv(text_steps + 1, SPLITS)
    begin = split * share
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    base = batch * key_batch + head * key_head
    for step in range(begin, tl.minimum(begin + share, text_steps)):
        column = start + step * COLUMNS + tl.arange(0, COLUMNS)
        is_seen = ((column < length) & (column >= first))[None, :] & is_row[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (column[None, :] > (length + own_depth - window)[:, None])
        k_places = keys + base + column[None, :] * key_row + dim[:, None]
        k = tl.load(k_places, mask=(column < length)[None, :] & is_dim[:, None], other=0.0)
        scores = _scores(q, k, is_seen, scale, softcap, HAS_SOFTCAP)
        weights, fade, highest = _weigh(scores, highest)
        weight_sum = weight_sum * fade + tl.sum(weights, 1)
        v_places = values + base + column[:, None] * key_row + dim[None, :]
        # What stands before the first row may be anything, and nothing times NaN is NaN.
        v = tl.load(v_places, mask=((column < length) & (column >= first))[:, None] & is_dim[None, :], other=0.0)
        sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")

    if (begin <= text_steps) & (text_steps < begin + share):
        node = tl.arange(0, TREE)
        is_node = node < M
        is_seen = (((word[:, None] >> node[None, :].to(tl.int64)) & 1) == 1) & (is_node[None, :] & is_row[:, None])
        if HAS_WINDOW:
            depth = tl.load(depths + batch * M + node, mask=is_node, other=0)
            is_seen = is_seen & (depth[None, :] > (own_depth - window)[:, None])
        column = length + node
        k_places = keys + base + column[None, :] * key_row + dim[:, None]
        k = tl.load(k_places, mask=is_node[None, :] & is_dim[:, None], other=0.0)
        scores = _scores(q, k, is_seen, scale, softcap, HAS_SOFTCAP)
        weights, fade, highest = _weigh(scores, highest)
        weight_sum = weight_sum * fade + tl.sum(weights, 1)
        v_places = values + base + column[:, None] * key_row + dim[None, :]
        v = tl.load(v_places, mask=is_node[:, None] & is_dim[None, :], other=0.0)
        v = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, tl.zeros_like(v))  # a rejected draft may be NaN
        sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")

    line = ((batch * KV_HEADS * GROUP + query_of_row) * T + t).to(tl.int64)
    to = partial + (line * SPLITS + split) * (D + 2)
    tl.store(to, highest, mask=is_row)
    tl.store(to + 1, weight_sum, mask=is_row)
    tl.store(to[:, None] + 2 + dim[None, :], sums, mask=is_row[:, None] & is_dim[None, :])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _scores(q, k, is_seen, scale, softcap, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        # tanh through exp, where an overflow gives 1: 1 - 2 / (e^2x + 1).
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
    return tl.where(is_seen, scores, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _weigh(scores, highest):  # type: ignore[no-untyped-def, unused-ignore]
    """Weights of new scores, the factor of the earlier ones, and the new maximum of each row."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    floor = tl.where(higher == float("-inf"), 0.0, higher)
    return tl.exp(scores - floor[:, None]), tl.exp(highest - floor), higher


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_up(  # type: ignore[no-untyped-def, unused-ignore]
    partial,
    output,
    HEADS: tl.constexpr,
    T: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    wait_for_earlier(EARLY)
    batch = tl.program_id(0) // T
    t = tl.program_id(0) % T
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, WIDTH)
    is_dim = dim < D
    line = ((batch * HEADS + head) * T + t).to(tl.int64)
    start = partial + (line * SPLITS + split) * (D + 2)
    highest = tl.load(start)
    top = tl.max(highest, 0)
    share = tl.exp(highest - tl.where(top == float("-inf"), 0.0, top))
    weight_sum = tl.sum(tl.load(start + 1) * share, 0)
    sums = tl.load(start[:, None] + 2 + dim[None, :], mask=is_dim[None, :], other=0.0)
    mean = tl.sum(sums * share[:, None], 0) / tl.where(weight_sum > 0, weight_sum, 1.0)
    place = output + ((batch * T + t).to(tl.int64) * HEADS + head) * D + dim
    tl.store(place, mean.to(output.dtype.element_ty), mask=is_dim)


def write_rows(
    buffers: tuple[Tensor, Tensor], rows: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor] | None:
    into_keys, into_values = buffers
    batch, num_heads, num_rows, head_dim = keys.shape
    layouts = {tuple(tensor.stride()) for tensor in buffers}
    if keys.shape != values.shape or len(layouts) > 1 or keys.stride(3) != 1 or values.stride(3) != 1:
        return None
    if into_keys.stride(3) != 1 or into_keys.dtype != keys.dtype or into_values.dtype != values.dtype:
        return None
    _write_rows[(batch * num_rows, num_heads)](
        into_keys,
        into_values,
        rows.contiguous(),
        keys,
        values,
        into_keys.stride(0),
        into_keys.stride(1),
        into_keys.stride(2),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        T=num_rows,
        D=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        SHARED=rows.shape[0] == 1,
        num_warps=1,
        **started_early(keys.device),
    )
    return buffers


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _write_rows(  # type: ignore[no-untyped-def, unused-ignore]
    into_keys,
    into_values,
    rows,
    keys,
    values,
    into_batch,
    into_head,
    into_row,
    key_batch,
    key_head,
    key_row,
    value_batch,
    value_head,
    value_row,
    T: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    wait_for_earlier(EARLY)
    batch = tl.program_id(0) // T
    t = tl.program_id(0) % T
    head = tl.program_id(1)
    dim = tl.arange(0, WIDTH)
    is_dim = dim < D
    row = tl.load(rows + t) if SHARED else tl.load(rows + batch * T + t)
    key = tl.load(keys + batch * key_batch + head * key_head + t * key_row + dim, mask=is_dim)
    value = tl.load(values + batch * value_batch + head * value_head + t * value_row + dim, mask=is_dim)
    place = batch.to(tl.int64) * into_batch + head * into_head + row * into_row + dim
    tl.store(into_keys + place, key, mask=is_dim)
    tl.store(into_values + place, value, mask=is_dim)


@functools.cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # interpreted: some splits
    return torch.cuda.get_device_properties(device).multi_processor_count
