"""The small tensor programs of a round: one schema for each, and which implementation serves it.

Each op is registered with the PyTorch dispatcher under `torch.ops.microspec`. The plain PyTorch reference
serves every device; where `loading` finds a compiled kernel for a device it takes its place under the same schema,
and nothing above this package knows the difference. The functions here check shapes on the host and call the op.

All of them are free of host reads and keep their shapes, so that they can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from microspec_hf.ops import reference
from microspec_hf.ops.attention import tree_attention, write_rows
from microspec_hf.ops.beam import Beam, accept_path, grow_beam, slot_tokens
from microspec_hf.ops.loading import Refusal, Service, default_device, forget, load
from microspec_hf.ops.reference import stable_topk
from microspec_hf.ops.schemas import SCHEMAS

__all__ = [
    "SCHEMAS",
    "Beam",
    "Refusal",
    "Service",
    "accept_path",
    "build_tree",
    "compact_kv",
    "draft_topk",
    "forget",
    "gather_rows",
    "grow_beam",
    "load",
    "reference",
    "slot_tokens",
    "stable_topk",
    "status",
    "topk_candidates",
    "tree_attention",
    "used_slots",
    "window_update",
    "write_rows",
]

MAX_NODES = 64
"""Bits of an ancestor word."""


def status(device: torch.device | str | None = None) -> dict[str, str]:
    """For each op, which implementation serves it on a device.

    Args:
        device: its type counts; by default CUDA if there is a GPU, else the CPU.

    Returns:
        For each op one of `"path"`, `"hub"`, `"local"` (compiled kernels from there), `"triton"` and
        `"reference"`. `load(device)` tells where each comes from and why no better one serves.
    """
    return {name: service.tier for name, service in load(device or default_device()).items()}


def draft_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-softmax and top-k of drafter logits: the best k slots of each row and their log-probabilities.

    Order is (fp32 logit desc, slot asc). NaN counts as -inf, and +inf as the largest finite fp32 number.

    Args:
        logits: `[R, C]`, any float dtype; -inf at slots that hold no id.
        k: at most C.

    Returns:
        scores: fp32 `[R, k]`, logit - logsumexp(row); -inf where the logit is -inf, also in a row of nothing
            else.
        slots: int64 `[R, k]`, distinct in each row.

    Raises:
        ValueError: k is not in 1 .. C.
    """
    _require_k("draft_topk", logits, k)
    scores, slots = torch.ops.microspec.draft_topk(logits, k)
    return scores, slots


def topk_candidates(logits: Tensor, k: int) -> Tensor:
    """The k best token ids of each row of target logits by (value desc, id asc); column 0 is the argmax.

    NaN counts as -inf.

    Args:
        logits: `[N, V]`, any float dtype.
        k: at most V.

    Returns:
        int64 `[N, k]`.

    Raises:
        ValueError: k is not in 1 .. V.
    """
    _require_k("topk_candidates", logits, k)
    ids: Tensor = torch.ops.microspec.topk_candidates(logits, k)
    return ids


def build_tree(
    scores: Tensor, tokens: Tensor, parents: Tensor, root: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rerank all candidates of a drafting round and keep the best as a tree (EAGLE-2 section 4.2).

    Kept are the `num_nodes - 1` best by (score desc, flat id asc), in ascending flat id, behind the root. A
    parent has a smaller flat id and no lower score than its child, so the selection is closed under parents.

    Args:
        scores: fp32 `[F]`, cumulative log-probability of each candidate in flat order; -inf: there is no such
            candidate.
        tokens: int64 `[F]`, token ids.
        parents: int64 `[F]`, flat id of each candidate's parent, -1 for the root.
        root: int64 `[1]`, the root's token.
        num_nodes: N, nodes of the tree with its root, at most 64 and at most F + 1.

    Returns:
        tokens: int64 `[N]`, -1 where the score is -inf.
        parents: int64 `[N]`, node numbers, -1 for the root.
        depths: int64 `[N]`.
        ancestors: int64 `[N]`, bit j of word i is set when node j is node i or an ancestor of it.

    Raises:
        ValueError: num_nodes does not fit, or the lengths differ.
    """
    num_candidates = scores.shape[0]
    if not 1 <= num_nodes <= min(MAX_NODES, num_candidates + 1):
        raise ValueError(
            f"build_tree: num_nodes must be from 1 to {min(MAX_NODES, num_candidates + 1)} (an ancestor word "
            f"has {MAX_NODES} bits, and there are {num_candidates} candidates and a root), got {num_nodes}."
        )
    if not scores.shape == tokens.shape == parents.shape or root.shape != (1,):
        raise ValueError(
            "build_tree: scores, tokens and parents must have one length and root the shape (1,), got "
            f"{tuple(scores.shape)}, {tuple(tokens.shape)}, {tuple(parents.shape)} and {tuple(root.shape)}."
        )
    nodes: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.microspec.build_tree(
        scores, tokens, parents, root, num_nodes
    )
    return nodes


def gather_rows(out: Tensor, weight: Tensor, rows: Tensor, slots: Tensor, count: Tensor) -> None:
    """Copy rows of the LM head into the packed buffer: `out[slots[i]] = weight[rows[i]]` for all i < count.

    Nothing else of `out` is written. Slots below the count must differ from one another; entries behind it
    may hold anything.

    Args:
        out: `[W, H]` (or `[W]`, a bias), written in place.
        weight: `[V, H]` (or `[V]`), same dtype.
        rows: int32 or int64 `[M]`, rows of `weight`.
        slots: int32 or int64 `[M]`, rows of `out`.
        count: int32 `[1]`, at most M.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    if out.shape[1:] != weight.shape[1:] or out.dtype != weight.dtype:
        raise ValueError(
            "gather_rows: out and weight must agree in dtype and in all dimensions but the first, got "
            f"{out.dtype} {tuple(out.shape)} and {weight.dtype} {tuple(weight.shape)}."
        )
    if rows.ndim != 1 or rows.shape != slots.shape or count.shape != (1,):
        raise ValueError(
            "gather_rows: rows and slots must have one length and count the shape (1,), got "
            f"{tuple(rows.shape)}, {tuple(slots.shape)} and {tuple(count.shape)}."
        )
    torch.ops.microspec.gather_rows(out, weight, rows, slots, count)


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
    """Append ids to the stream S and bring the active vocabulary up to date (MicroSpec section 4).

    The entries of a call are its candidates in `0 .. V - 1`, in order; all others are ignored. After the call
    the active set is: the pinned ids and

    - stream: every id among the last R entries of the stream, pinned ones counted as entries, R =
      `len(ring)`;
    - lru: the W - P most recently seen distinct ids that are not pinned, P pinned ids.

    What moves is exactly this:

    - An id is *evicted* when it was active before the call and is not after it; its slot becomes free.
    - An id *enters* when it is active after the call and was not before it. An id that was active before and
      after keeps its slot and is not copied, whatever happened to it in between; an id that was neither,
      although the call saw it (more new ids than room), is not reported.
    - Slots are freed first. Then the ids that enter, in the order of their last occurrences among the
      candidates, take the free slots in ascending order.
    - `usage` of an active slot is, for lru, the stream position of the id's last sighting and, for stream,
      its occurrences among the last R entries; of a free slot, 0. Entries are counted from 0 over all calls,
      so that entry p of the stream lies in `ring[p % R]`.

    Args:
        slot_of: int32 `[V]`, slot of each active id, -1 for the others; written in place, like the next four.
        token_of: int32 `[W]`, id in each slot, -1 in a free one. Pinned ids are there from the start.
        usage: int32 `[W]`.
        ring: int32 `[R]`, stream: the last R entries, -1 before there were so many, R at most W - P unless W
            = V; lru: empty.
        clock: int64 `[1]`, entries so far.
        candidates: int64 `[M]`, -1 where there is no entry.
        pinned: bool `[W]`, slots whose ids never leave.
        stream: which window.

    Returns:
        rows: int64 `[M]`, the ids that entered, in the order above, then -1.
        slots: int64 `[M]`, their slots, then -1.
        counts: int32 `[2]`, how many entered and how many were evicted.

    Raises:
        ValueError: shapes do not fit.
    """
    if not token_of.shape == usage.shape == pinned.shape or clock.shape != (1,) or candidates.ndim != 1:
        raise ValueError(
            "window_update: token_of, usage and pinned must have one length, clock the shape (1,) and "
            f"candidates one dimension, got {tuple(token_of.shape)}, {tuple(usage.shape)}, "
            f"{tuple(pinned.shape)}, {tuple(clock.shape)} and {tuple(candidates.shape)}."
        )
    changes: tuple[Tensor, Tensor, Tensor] = torch.ops.microspec.window_update(
        slot_of, token_of, usage, ring, clock, candidates, pinned, stream
    )
    return changes


def compact_kv(buffers: Sequence[Tensor], path: Tensor, start: Tensor) -> None:
    """Move the KV rows of an accepted path together: row `start + path[i]` to `start + i` for all i.

    All source rows of a buffer are read before any is written. A row whose place lies behind the buffer is
    left out (slots behind a short path, near the end).

    Args:
        buffers: K and V of all layers, `[1, heads, capacity, head_dim]` each, written in place.
        path: int64 `[P]`, node numbers.
        start: int64 `[1]`, committed rows: the row of node 0.

    Raises:
        ValueError: shapes do not fit.
    """
    if path.ndim != 1 or start.shape != (1,):
        raise ValueError(
            "compact_kv: path must have one dimension and start the shape (1,), got "
            f"{tuple(path.shape)} and {tuple(start.shape)}."
        )
    torch.ops.microspec.compact_kv(list(buffers), path, start)


def used_slots(token_of: Tensor) -> int:
    """How many leading slots a projection has to cover: up to the last used one, if that is known for free.

    On a CPU the tensor is on the host already, and half of a young window's rows need not be multiplied.
    Elsewhere all slots count: a look would make the host wait, and shapes must not change.

    Args:
        token_of: int32 `[W]`, -1 in a free slot.
    """
    if token_of.device.type != "cpu":
        return token_of.shape[0]
    slots = torch.arange(1, token_of.shape[0] + 1)
    return int(slots.masked_fill(token_of < 0, 0).amax())


def _require_k(name: str, logits: Tensor, k: int) -> None:
    if logits.ndim != 2 or not 1 <= k <= logits.shape[1]:
        raise ValueError(
            f"{name}: logits must have two dimensions and k must be from 1 to their last one, got logits of "
            f"shape {tuple(logits.shape)} and k={k}."
        )
