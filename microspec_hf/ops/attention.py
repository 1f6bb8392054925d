"""The attention of a captured round: every row sees its text and its own ancestors, whatever their number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from microspec_hf.ops.serving import in_triton


@in_triton("triton_attention")
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
) -> Tensor:
    """Attention of T rows that stand behind a text, over a buffer of which `length` and the words tell what is seen.

    Row t sees the cache rows `first .. length - 1`, and row `length + j` for each bit j of its word. A row without any
    bit sees the text alone; one that sees nothing gets zeros. Rows that nobody sees may hold anything.

    Args:
        query: `[B, heads, T, D]`.
        keys, values: `[B, KV heads, C, D]`, whole buffers; the rows of the tree are in place.
        length, first: int64 `[B]`, on the device.
        ancestors: int64 `[B, T]`.
        depths: int64 `[B, M]`, M <= 64: tree row j stands at position `length + depths[j]`.
        scale: factor of the scores.
        window: rows see positions above their own minus this many; a row's own column is its highest bit. 0: all.
        softcap: scores become `softcap * tanh(score / softcap)`. 0: they stay.

    Returns:
        `[B, T, heads, D]`, contiguous, in the dtype of `query`; scores and softmax are computed in float32.
    """
    batch, num_heads, num_rows, head_dim = query.shape
    num_kv_heads, capacity = keys.shape[1:3]
    is_seen = _is_seen(length, first, ancestors, depths, capacity, window)
    # Query heads that share keys are rows of one product: no key is copied.
    grouped = query.float().reshape(batch, num_kv_heads, -1, head_dim)
    scores = grouped @ keys.float().transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(batch, num_heads, num_rows, capacity).masked_fill(~is_seen[:, None], -math.inf)
    sees_any = is_seen.any(dim=2)[:, None, :, None]
    weights = torch.where(sees_any, scores, 0.0).softmax(dim=-1) * is_seen[:, None]
    held = torch.where(is_seen.any(dim=1)[:, None, :, None], values.float(), 0.0)  # nothing times NaN is NaN
    output = weights.view(batch, num_kv_heads, -1, capacity) @ held
    return output.view(batch, num_heads, num_rows, head_dim).transpose(1, 2).to(query.dtype).contiguous()


def _is_seen(length: Tensor, first: Tensor, ancestors: Tensor, depths: Tensor, capacity: int, window: int) -> Tensor:
    """bool `[B, T, C]`."""
    num_columns = depths.shape[1]
    rows = torch.arange(capacity, device=length.device)
    column = rows - length[:, None]
    inside = column.clamp(0, num_columns - 1)
    bit = (ancestors[:, :, None] >> inside[:, None]) & 1
    in_tree = ((column >= 0) & (column < num_columns))[:, None] & (bit == 1)
    is_seen = in_tree | ((column < 0) & (rows >= first[:, None]))[:, None]
    if window:
        columns = torch.arange(num_columns, device=length.device)
        bits = (ancestors[:, :, None] >> columns) & 1
        own = (bits * (columns + 1)).amax(dim=2).sub(1).clamp(min=0)
        own_position = length[:, None] + depths.gather(1, own)
        position = torch.where(column < 0, rows, length[:, None] + depths.gather(1, inside))
        is_seen = is_seen & (position[:, None] > own_position[:, :, None] - window)
    return is_seen


@in_triton("triton_attention")
def write_rows(buffers: tuple[Tensor, Tensor], rows: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Put new keys and values `[B, KV heads, T, D]` into rows of the buffers, in place.

    Args:
        buffers: of keys and of values, `[B, KV heads, C, D]`.
        rows: int64 `[B, T]`, or `[1, T]` for all texts alike.
        keys, values: what is written.

    Returns:
        The buffers.
    """
    for buffer, states in zip(buffers, (keys, values), strict=True):
        if rows.shape[0] == 1:
            buffer.index_copy_(2, rows[0], states)
        else:
            buffer.scatter_(2, rows[:, None, :, None].expand_as(states), states)
    return buffers
