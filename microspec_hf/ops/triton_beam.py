"""`grow_beam` and `accept_path` in Triton, one program each. Importing this needs Triton."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor

from microspec_hf.ops.beam import Beam
from microspec_hf.ops.triton_launch import started_early, wait_for_earlier

MAX_CHILDREN = 256
"""All of which are compared with one another."""
MAX_NODES = 64


def grow_beam(
    candidates: tuple[Tensor, Tensor, Tensor], offset: int, scores: Tensor, tokens: Tensor, beam: Beam, own: Tensor
) -> Beam | None:
    k = beam.scores.shape[0]
    if k * k > MAX_CHILDREN or own.shape[1] != 1:
        return None
    grown = Beam(*(torch.empty_like(part) for part in beam))
    _grow_beam[(1,)](
        *candidates,
        offset,
        scores.contiguous(),
        tokens.contiguous(),
        *beam,
        own.contiguous(),
        *grown,
        K=k,
        CHILDREN=triton.next_power_of_2(k * k),
        num_warps=8,
        **started_early(scores.device),
    )
    return grown


@triton.jit(do_not_specialize=["offset"])  # type: ignore[untyped-decorator, unused-ignore]
def _grow_beam(  # type: ignore[no-untyped-def, unused-ignore]
    all_scores,
    all_tokens,
    all_parents,
    offset,
    scores,
    tokens,
    beam_scores,
    beam_tokens,
    beam_flat,
    beam_parent,
    beam_ancestors,
    own,
    new_scores,
    new_tokens,
    new_flat,
    new_parent,
    new_ancestors,
    K: tl.constexpr,
    CHILDREN: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    wait_for_earlier(EARLY)
    child = tl.arange(0, CHILDREN)
    is_child = child < K * K
    row = child // K
    score = tl.load(beam_scores + row, mask=is_child, other=0.0) + tl.load(scores + child, mask=is_child, other=0.0)
    token = tl.load(tokens + child, mask=is_child, other=-1)
    tl.store(all_scores + offset + child, score, mask=is_child)
    tl.store(all_tokens + offset + child, token, mask=is_child)
    tl.store(all_parents + offset + child, tl.load(beam_flat + row, mask=is_child, other=0), mask=is_child)

    # As `stable_topk` orders: NaN counts as -inf, and children that there are not come last.
    key = tl.where(score == score, score, float("-inf"))
    other = tl.arange(0, CHILDREN)
    is_other = other < K * K
    other_row = other // K
    rival = tl.load(beam_scores + other_row, mask=is_other, other=0.0)
    rival += tl.load(scores + other, mask=is_other, other=0.0)
    rival = tl.where(rival == rival, rival, float("-inf"))
    is_better = (rival[None, :] > key[:, None]) | ((rival[None, :] == key[:, None]) & (other[None, :] < child[:, None]))
    rank = tl.sum((is_better & is_other[None, :]).to(tl.int32), 1)
    is_kept = is_child & (rank < K)
    tl.store(new_scores + rank, key, mask=is_kept)
    tl.store(new_tokens + rank, token, mask=is_kept)
    tl.store(new_flat + rank, (child + offset).to(tl.int64), mask=is_kept)
    tl.store(new_parent + rank, row.to(tl.int64), mask=is_kept)
    seen = tl.load(beam_ancestors + row, mask=is_kept, other=0) | tl.load(own + rank, mask=is_kept, other=0)
    tl.store(new_ancestors + rank, seen, mask=is_kept)


def slot_tokens(scores: Tensor, slots: Tensor, token_of: Tensor) -> Tensor:
    tokens = torch.empty_like(slots)
    size = slots.numel()
    _slot_tokens[(triton.cdiv(size, 128),)](
        scores.contiguous(),
        slots.contiguous(),
        token_of,
        tokens,
        SIZE=size,
        num_warps=1,
        **started_early(scores.device),
    )
    return tokens


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _slot_tokens(  # type: ignore[no-untyped-def, unused-ignore]
    scores, slots, token_of, tokens, SIZE: tl.constexpr, EARLY: tl.constexpr = False
):
    wait_for_earlier(EARLY)
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    is_there = i < SIZE
    score = tl.load(scores + i, mask=is_there, other=float("-inf"))
    slot = tl.load(slots + i, mask=is_there, other=0)
    token = tl.load(token_of + slot, mask=is_there, other=-1)
    tl.store(tokens + i, tl.where(score > float("-inf"), token.to(tl.int64), -1), mask=is_there)


def accept_path(
    tokens: Tensor, parents: Tensor, depths: Tensor, ancestors: Tensor, chosen: Tensor, num_slots: int
) -> tuple[Tensor, Tensor, Tensor] | None:
    num_nodes = tokens.shape[0]
    if num_nodes > MAX_NODES:
        return None
    path, emitted = tokens.new_empty(num_slots), tokens.new_empty(num_slots)
    num_accepted = tokens.new_empty(1)
    _accept_path[(1,)](
        tokens.contiguous(),
        parents.contiguous(),
        depths.contiguous(),
        ancestors.contiguous(),
        chosen.contiguous(),
        path,
        emitted,
        num_accepted,
        N=num_nodes,
        SLOTS=num_slots,
        MOST_SLOTS=triton.next_power_of_2(num_slots),
        MOST_NODES=MAX_NODES,
        num_warps=1,
        **started_early(tokens.device),
    )
    return path, emitted, num_accepted


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _accept_path(  # type: ignore[no-untyped-def, unused-ignore]
    tokens,
    parents,
    depths,
    ancestors,
    chosen,
    path,
    emitted,
    num_accepted,
    N: tl.constexpr,
    SLOTS: tl.constexpr,
    MOST_SLOTS: tl.constexpr,
    MOST_NODES: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    wait_for_earlier(EARLY)
    node = tl.arange(0, MOST_NODES)
    is_node = node < N
    token = tl.load(tokens + node, mask=is_node, other=-1)
    parent = tl.load(parents + node, mask=is_node, other=-1)
    depth = tl.load(depths + node, mask=is_node, other=0)
    word = tl.load(ancestors + node, mask=is_node, other=0)
    own = tl.load(chosen + node, mask=is_node, other=-1)
    wanted = tl.load(chosen + tl.maximum(parent, 0), mask=is_node, other=-1)
    bit = tl.full([MOST_NODES], 1, tl.int64) << node.to(tl.int64)
    matching = tl.sum(tl.where(is_node & ((token == wanted) | (parent < 0)), bit, 0), 0)
    agrees = is_node & ((word & ~matching) == 0)
    # Deepest first, then the first of them.
    best = tl.max(tl.where(agrees, depth * MOST_NODES + (MOST_NODES - 1 - node), -1), 0)
    last = MOST_NODES - 1 - best % MOST_NODES
    deepest = best // MOST_NODES
    last_word = tl.sum(tl.where(node == last, word, 0), 0)
    on_path = is_node & (((last_word >> node.to(tl.int64)) & 1) == 1)
    slot = tl.arange(0, MOST_SLOTS)
    is_behind = (slot < SLOTS) & (slot > deepest)
    tl.store(path + slot, (tl.zeros([MOST_SLOTS], tl.int64) + last), mask=is_behind)
    tl.store(emitted + slot, tl.full([MOST_SLOTS], -1, tl.int64), mask=is_behind)
    tl.store(path + depth, node.to(tl.int64), mask=on_path)
    tl.store(emitted + depth, own, mask=on_path)
    tl.store(num_accepted, deepest)
