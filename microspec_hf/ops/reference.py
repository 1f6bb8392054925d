"""The definition of every op in plain PyTorch: what a compiled kernel must reproduce, bit for bit.

All shapes are fixed by the arguments' shapes, and nothing is read back to the host, so that a round can be
captured in a CUDA graph. On a CPU tensor a value is already on the host; the two places that use this for
speed say so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK = 64
"""Columns whose maximum stands for them in the first pass over a long row."""

FEW = 2048
"""Elements below which one sort is the fastest selection (on a CPU: 32 ns an element)."""


def stable_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of the last dimension by (score desc, index asc); NaN counts as -inf.

    `torch.topk` leaves the choice among equal scores open. Here it is fixed: a parent that ties with its
    child is kept before it (algorithms 1.7), and the first column is the argmax.
    """
    scores = scores.detach()
    length = scores.shape[-1]
    if length < 2 * k * CHUNK:
        return _select(_without_nan(scores), k)
    best = _chunk_maxima(scores)
    # NaN shows in its chunk's maximum. On a CPU one may look first, which saves a pass over the rows.
    if scores.device.type != "cpu" or bool(best.isnan().any()):
        scores = _without_nan(scores)
        best = _chunk_maxima(scores)
    # The k best chunks hold the k best elements: a better chunk has an element before all of a worse one's.
    chunks = _select(best, k)[1].sort(dim=-1).values
    columns = (chunks[..., None] * CHUNK + torch.arange(CHUNK, device=scores.device)).flatten(-2)
    # Columns behind a last, shorter chunk lose against every real one, also at -inf: they come last.
    values = scores.gather(-1, columns.clamp(max=length - 1)).masked_fill(columns >= length, -math.inf)
    values, chosen = _select(values, k)
    return values, columns.gather(-1, chosen)


def _chunk_maxima(scores: Tensor) -> Tensor:
    whole = scores.shape[-1] // CHUNK * CHUNK
    best: Tensor = scores[..., :whole].unflatten(-1, (-1, CHUNK)).amax(dim=-1)
    if whole == scores.shape[-1]:
        return best
    return torch.cat([best, scores[..., whole:].amax(dim=-1, keepdim=True)], dim=-1)


def _without_nan(scores: Tensor) -> Tensor:
    return scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def _select(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`stable_topk` of short rows without NaN."""
    length = scores.shape[-1]
    if k == 0 or scores.numel() <= FEW:
        values, indices = scores.sort(dim=-1, descending=True, stable=True)
        return values[..., :k], indices[..., :k]
    # The k-th value decides: everything above it is in, and of its equals the first ones.
    limit = scores.topk(k, sorted=False).values.amin(dim=-1, keepdim=True)
    earlier = torch.arange(length, 0, -1, dtype=torch.int32, device=scores.device)
    rank = torch.where(scores > limit, length + earlier, torch.where(scores == limit, earlier, 0))
    chosen = rank.topk(k, sorted=False).indices.sort(dim=-1).values
    values, order = scores.gather(-1, chosen).sort(dim=-1, descending=True, stable=True)
    return values, chosen.gather(-1, order)


def draft_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    # +inf (half precision overflows) as the largest finite number, or it would turn the row's scores to NaN.
    logits = logits.detach().float().nan_to_num(nan=-math.inf, neginf=-math.inf)
    values, slots = stable_topk(logits, k)
    scores = logits.log_softmax(dim=-1).gather(-1, slots)
    return torch.where(values > -math.inf, scores, -math.inf), slots


def topk_candidates(logits: Tensor, k: int) -> Tensor:
    return stable_topk(logits, k)[1]


def build_tree(
    scores: Tensor, tokens: Tensor, parents: Tensor, root: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    selected = stable_topk(scores, num_nodes - 1)[1].sort().values
    nodes = torch.arange(num_nodes, device=scores.device)

    # Node number of each flat id, one place further on: place 0 is the root's.
    node_of = torch.zeros(scores.shape[0] + 1, dtype=torch.int64, device=scores.device)
    node_of[selected + 1] = nodes[1:]
    node_parents = torch.cat([nodes.new_full((1,), -1), node_of[parents[selected] + 1]])
    node_tokens = torch.cat([root, torch.where(scores[selected] > -math.inf, tokens[selected], -1)])

    # Pointer jumping: after s steps each node knows 2**s ancestors. The root is its own parent here.
    jump = node_parents.clamp(min=0)
    depths = (nodes > 0).to(torch.int64)
    ancestors = torch.ones_like(nodes) << nodes
    for _ in range((num_nodes - 1).bit_length()):
        depths = depths + depths[jump]
        ancestors = ancestors | ancestors[jump]
        jump = jump[jump]
    return node_tokens, node_parents, depths, ancestors


def gather_rows(out: Tensor, weight: Tensor, rows: Tensor, slots: Tensor, count: Tensor) -> None:
    if count.device.type == "cpu":  # the count is on the host already: no more rows than needed are copied
        n = int(count)
        out.index_copy_(0, slots[:n].long(), weight.detach().index_select(0, rows[:n]))
    elif rows.shape[0] > 0:
        gather_rows_masked(out, weight, rows, slots, count)


def gather_rows_masked(out: Tensor, weight: Tensor, rows: Tensor, slots: Tensor, count: Tensor) -> None:
    """`gather_rows` with work of a fixed size, at least one entry."""
    # Entries behind the count repeat the first one; without any, the first slot is written with itself.
    is_entry = torch.arange(rows.shape[0], device=rows.device) < count
    sources = torch.where(is_entry, rows, rows[:1]).clamp(0, weight.shape[0] - 1)
    targets = torch.where(is_entry, slots, slots[:1]).long().clamp(0, out.shape[0] - 1)
    some = (count > 0).view(-1, *[1] * (weight.ndim - 1))
    copied = torch.where(some, weight.detach().index_select(0, sources), out.index_select(0, targets))
    out.index_copy_(0, targets, copied)


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
    vocab_size = slot_of.shape[0]
    if candidates.shape[0] == 0:
        return candidates.clone(), candidates.clone(), candidates.new_zeros(2, dtype=torch.int32)

    # Which candidates are entries, at which positions of the stream, and the last position of each id seen.
    # Tables over ids have one place more, vocab_size, for what is no entry.
    is_entry = (candidates >= 0) & (candidates < vocab_size)
    tokens = torch.where(is_entry, candidates, vocab_size)
    positions = clock + is_entry.cumsum(0) - 1
    clock += is_entry.sum()
    latest = torch.full((vocab_size + 1,), -1, dtype=torch.int64, device=candidates.device)
    latest = latest.scatter_reduce(0, tokens, positions, "amax")
    is_new = is_entry & (latest[tokens] == positions) & (slot_of[tokens.clamp(max=vocab_size - 1)] < 0)

    is_active = token_of >= 0
    held = torch.where(is_active, token_of, vocab_size).long()
    if stream:
        is_kept = is_entry & (positions >= clock - ring.shape[0])
        change = _advance_ring(ring, tokens, positions, is_kept, vocab_size)
        usage += change[held].masked_fill(~is_active, 0)
        is_evicted = is_active & ~pinned & (usage == 0)
        enters = is_new & is_kept
        usage_of = change
    else:
        usage.copy_(torch.where(is_active & (latest[held] >= 0), latest[held], usage))
        # Slots and new ids compete for the slots: as many as there are candidates must go, the oldest first,
        # and free slots before them.
        recency = torch.where(is_active, usage, -1).long().masked_fill(pinned, torch.iinfo(torch.int64).max)
        both = torch.cat([recency, torch.where(is_new, positions, -1)])
        limit = both.topk(candidates.shape[0], largest=False, sorted=False).values.amax()
        is_evicted = is_active & (recency <= limit)
        enters = is_new & (positions > limit)
        usage_of = latest

    # A slot that was freed and not taken again has usage 0: lru frees no more than it needs.
    rows, slots = _reassign(slot_of, token_of, candidates, is_evicted, enters)
    usage.copy_(_scatter(usage, slots, usage_of[torch.where(rows >= 0, rows, vocab_size)]))
    return rows, slots, torch.stack([enters.sum(), is_evicted.sum()]).to(torch.int32)


def _advance_ring(ring: Tensor, tokens: Tensor, positions: Tensor, is_kept: Tensor, vocab_size: int) -> Tensor:
    """Write the kept entries over the oldest; by how much each id's occurrences change, int32 `[V + 1]`."""
    cells = torch.where(is_kept, positions % max(1, ring.shape[0]), -1)
    renewed = _scatter(ring, cells, tokens)
    is_overwritten = _scatter(torch.zeros_like(ring), cells, is_kept).bool()
    leaving = torch.where(is_overwritten & (ring >= 0), ring, vocab_size).long()
    ring.copy_(renewed)
    change = torch.zeros(vocab_size + 1, dtype=torch.int32, device=ring.device)
    change = change.scatter_add(0, tokens, is_kept.to(torch.int32))
    return change.scatter_add(0, leaving, torch.full_like(ring, -1))


def _reassign(
    slot_of: Tensor, token_of: Tensor, candidates: Tensor, is_evicted: Tensor, enters: Tensor
) -> tuple[Tensor, Tensor]:
    """Free the slots of evicted ids, and give the free slots in ascending order to the ids that enter."""
    num_slots, num_candidates = token_of.shape[0], candidates.shape[0]
    slot_of.copy_(_scatter(slot_of, torch.where(is_evicted, token_of, -1), -1))
    token_of.masked_fill_(is_evicted, -1)
    rows = _compact(candidates, enters, num_candidates)
    numbers = torch.arange(num_slots, device=token_of.device)
    free = _compact(numbers, token_of < 0, max(num_slots, num_candidates))
    slots = torch.where(rows >= 0, free[:num_candidates], -1)
    slot_of.copy_(_scatter(slot_of, rows, slots))
    token_of.copy_(_scatter(token_of, slots, rows))
    return rows, slots


def _scatter(target: Tensor, indices: Tensor, values: Tensor | int) -> Tensor:
    """A copy of `target` `[n]` with `values` at `indices`; negative indices write nothing."""
    size = target.shape[0]
    sink = torch.cat([target, target.new_zeros(1)])
    indices = torch.where(indices >= 0, indices, size).long()
    if isinstance(values, Tensor):
        return sink.scatter(0, indices, values.to(target.dtype))[:size]
    return sink.scatter(0, indices, values)[:size]


def _compact(values: Tensor, mask: Tensor, size: int) -> Tensor:
    """The values under the mask, in order, then -1: `[size]`."""
    places = torch.where(mask, mask.cumsum(0) - 1, -1)
    return _scatter(values.new_full((size,), -1), places, values)


def compact_kv(buffers: list[Tensor], path: Tensor, start: Tensor) -> None:
    steps = torch.arange(path.shape[0], device=path.device)
    moves: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}  # the same for all layers of one device
    for buffer in buffers:
        kind = buffer.shape[2], buffer.device
        if kind not in moves:
            # A row without a place in the buffer repeats the move of the first one.
            has_place = start + steps < buffer.shape[2]
            sources = start + torch.where(has_place, path, path[:1])
            targets = start + torch.where(has_place, steps, 0)
            moves[kind] = sources.to(buffer.device), targets.to(buffer.device)
        sources, targets = moves[kind]
        buffer.index_copy_(2, targets, buffer.index_select(2, sources))
