"""What lies between the passes of a round: a handful of numbers each, one launch on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from microspec_hf.ops.reference import stable_topk
from microspec_hf.ops.serving import in_triton


class Beam(NamedTuple):
    """The nodes that the next drafter pass expands, k of them, best first.

    Args:
        scores: fp32 `[k]`, log-probabilities of their paths.
        tokens: int64 `[k]`.
        flat: int64 `[k]`, their numbers among all candidates.
        parent: int64 `[k]`, the row of the last pass that each came from.
        ancestors: int64 `[k, W]`, words of the rows that they see, see `hf.Sight`.
    """

    scores: Tensor
    tokens: Tensor
    flat: Tensor
    parent: Tensor
    ancestors: Tensor


@in_triton("triton_beam")
def grow_beam(
    candidates: tuple[Tensor, Tensor, Tensor], offset: int, scores: Tensor, tokens: Tensor, beam: Beam, own: Tensor
) -> Beam:
    """List the children of a beam behind the earlier candidates, and keep the best of them (EAGLE-2 section 4.1).

    Args:
        candidates: scores fp32, tokens and parents int64 `[F]` of all candidates; those from `offset` on are written.
        offset: candidates so far.
        scores, tokens: fp32 and int64 `[k, k]`, the children of each node of the beam.
        beam: what was expanded.
        own: int64 `[k, W]`, the words of the rows that the next pass will write.

    Returns:
        The k best children by (score desc, number asc).
    """
    k = beam.scores.shape[0]
    children = (beam.scores[:, None] + scores).flatten()
    listed = slice(offset, offset + k * k)
    for target, values in zip(candidates, (children, tokens.flatten(), beam.flat.repeat_interleave(k)), strict=True):
        target[listed] = values
    best, chosen = stable_topk(children, k)
    parent = chosen // k
    return Beam(best, tokens.flatten()[chosen], chosen + offset, parent, beam.ancestors[parent] | own)


@in_triton("triton_beam")
def slot_tokens(scores: Tensor, slots: Tensor, token_of: Tensor) -> Tensor:
    """The token ids int64 `[R, k]` of slots int64 `[R, k]`, -1 where the score fp32 `[R, k]` is -inf.

    Args:
        scores, slots: see above.
        token_of: int32 `[C]`, the id of each slot.
    """
    return torch.where(scores > -torch.inf, token_of[slots].long(), -1)


@in_triton("triton_beam")
def accept_path(
    tokens: Tensor, parents: Tensor, depths: Tensor, ancestors: Tensor, chosen: Tensor, num_slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The deepest path of a tree whose every token is the target's choice at its parent.

    Args:
        tokens, parents, depths, ancestors: int64 `[N]`, see `DraftTree`; siblings carry distinct tokens.
        chosen: int64 `[N]`, the target's token at each node.
        num_slots: P, at least the depth of the tree plus one.

    Returns:
        path: int64 `[P]`, nodes from the root; behind them the last one again.
        emitted: int64 `[P]`, the target's tokens at them; -1 behind them.
        num_accepted: int64 `[1]`, nodes on the path but the root.
    """
    num_nodes = tokens.shape[0]
    nodes = torch.arange(num_nodes, device=chosen.device)
    matches = (tokens == chosen[parents.clamp(min=0)]) | (parents < 0)
    is_ancestor = ((ancestors[:, None] >> nodes) & 1).bool()
    agreed = (matches | ~is_ancestor).all(dim=1)
    depth = torch.where(agreed, depths, -1)
    last = depth.argmax().reshape(1)
    on_path = is_ancestor.index_select(0, last)[0]
    order = torch.where(on_path, nodes, num_nodes).sort().values
    order = torch.nn.functional.pad(order, (0, max(0, num_slots - num_nodes)), value=num_nodes)[:num_slots]
    path = torch.where(order < num_nodes, order, last)
    emitted = torch.where(order < num_nodes, chosen[path], -1)
    return path, emitted, depth.index_select(0, last)
