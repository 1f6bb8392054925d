"""DynaSpec: clusters of the LM head's rows, of which a router chooses some for each drafter pass (arXiv 2510.13847).

DynaSpec routes from the inputs of the drafter, beside its forward pass. Here the router sees the drafter's output row,
as CORAL's does, so that both arms run on the drafter as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from microspec_hf import ops
from microspec_hf.config import VocabularyConfig
from microspec_hf.hf import TargetHead
from microspec_hf.vocabulary.base import PackedRows
from microspec_hf.vocabulary.router import RoutedVocabulary


class DynaSpecVocabulary(RoutedVocabulary):
    """A static core, and clusters in the order of the router's score until `max_rows` rows are full.

    The score of a cluster is its probability, summed over the rows of the pass: the rows of a beam share one
    shortlist. Of the cluster that no longer fits its most frequent ids are taken. The core's rows stay in the packed
    buffer, the others are copied for each pass.

    Args, Raises: see `RoutedVocabulary`; the core are the ids that are always active.
    """

    def __init__(self, head: TargetHead, config: VocabularyConfig, stop_ids: Sequence[int], top_k: int):
        super().__init__(head, config, stop_ids, top_k)
        device, num_pinned = head.device, self.pinned.shape[0]
        self.room = min(self.room, head.weight.shape[0] - num_pinned)
        self.rows = PackedRows.empty(head, num_pinned + self.room, top_k)
        slots = torch.arange(num_pinned + self.room, device=device)
        self._pinned_slots, self._room_slots = slots[:num_pinned], slots[num_pinned:]
        self._num_room = torch.tensor([self.room], dtype=torch.int32, device=device)

        # The clusters without the core, whose ids must not be proposed twice.
        members = self.router.members.long()
        is_free = torch.ones(head.weight.shape[0], dtype=torch.bool, device=device)
        is_free[self.pinned] = False
        self._members = members[is_free[members]]
        group_of = self.router.group_of()[self._members]
        self._sizes = torch.bincount(group_of, minlength=self.router.config.num_groups)
        self._starts = self._sizes.cumsum(0) - self._sizes

    def begin(self, prompt: Tensor, candidates: Tensor | None) -> None:
        """Copy the rows of the core."""
        super().begin(prompt, candidates)
        count = torch.tensor([self.pinned.shape[0]], dtype=torch.int32, device=self.pinned.device)
        self.rows.gather(self.head, self.pinned, self._pinned_slots, count)
        self.rows.token_of[self._pinned_slots] = self.pinned.to(torch.int32)
        self._counters.add_gathered(count)

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if self.room:
            routed = self._routed(hidden)
            self.rows.gather(self.head, routed, self._room_slots, self._num_room)
            self.rows.token_of[self._room_slots] = routed.to(torch.int32)
            self._counters.add_gathered(self._num_room)
            self._next_pass().zero_().index_fill_(0, torch.cat([self.pinned, routed]), True)
        else:
            self._next_pass().zero_().index_fill_(0, self.pinned, True)
        return self.rows.topk(self.head, hidden, k)

    def _routed(self, hidden: Tensor) -> Tensor:
        """int64 `[room]`, the ids of the best clusters for these hidden rows, `[R, H]`, in the clusters' order."""
        mass = self.router(hidden).float().softmax(dim=-1).sum(dim=0)
        order = ops.stable_topk(mass, mass.shape[0])[1]
        sizes = self._sizes[order]
        ends = sizes.cumsum(0)
        slots = torch.arange(self.room, device=hidden.device)
        rank = torch.searchsorted(ends, slots, right=True)
        return self._members[self._starts[order][rank] + slots - (ends - sizes)[rank]]


def cluster_rows(weight: Tensor, num_groups: int, counts: Tensor, seed: int, rounds: int = 20) -> tuple[Tensor, Tensor]:
    """DynaSpec's clusters: spherical K-means over the rows of an LM head.

    A cluster that runs empty is given the row that fits its own worst.

    Args:
        weight: `[V, H]`.
        num_groups: G, at most V.
        counts: int `[V]`, how often each id was seen; orders the ids of a cluster, most frequent first.
        seed: of the rows that clusters start from.
        rounds: of the iteration; it ends sooner when nothing moves.

    Returns:
        members int32 `[V]` and sizes int32 `[G]`, as `VocabularyRouter` has them, on the CPU.
    """
    rows = _unit_rows(weight)
    start = torch.randperm(rows.shape[0], generator=torch.Generator().manual_seed(seed))[:num_groups]
    centres = rows[start.to(rows.device)]
    group_of = torch.full((rows.shape[0],), -1, device=rows.device)
    for _ in range(rounds):
        likeness, nearest = _nearest(rows, centres)
        sizes = torch.bincount(nearest, minlength=num_groups)
        empty = (sizes == 0).nonzero().flatten()
        if empty.shape[0]:
            nearest[likeness.argsort(stable=True)[: empty.shape[0]]] = empty
        if torch.equal(nearest, group_of):
            break
        group_of = nearest
        centres = _unit_rows(torch.zeros_like(centres).index_add_(0, group_of, rows))
    group_of = group_of.cpu()
    by_count = counts.cpu().argsort(descending=True, stable=True)
    members = by_count[group_of[by_count].argsort(stable=True)]
    return members.to(torch.int32), torch.bincount(group_of, minlength=num_groups).to(torch.int32)


def _unit_rows(rows: Tensor) -> Tensor:
    """fp32, each row of length 1 (a zero row stays)."""
    return nn.functional.normalize(rows.detach().float(), dim=-1)


def _nearest(rows: Tensor, centres: Tensor, chunk: int = 16_384) -> tuple[Tensor, Tensor]:
    """For each row its cosine with the nearest centre, and which that is."""
    parts = [(part @ centres.T).max(dim=-1) for part in rows.split(chunk)]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])
