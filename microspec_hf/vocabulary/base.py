"""What every draft vocabulary is to the drafter, and what the three kinds share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from microspec_hf import ops
from microspec_hf.hf import TargetHead
from microspec_hf.tree import DraftTree, Verification


@dataclass(frozen=True)
class VocabularyStatistics:
    """Counters of one text.

    Args:
        rounds: rounds that were observed.
        mean_active: ids that the drafter could propose, mean over rounds.
        coverage: share of the emitted tokens that were active when their tree was drafted (1.0 before any).
        rows_gathered: rows of the LM head that were copied into a packed buffer.
        evicted: ids that left the active vocabulary.
    """

    rounds: int = 0
    mean_active: float = 0.0
    coverage: float = 1.0
    rows_gathered: int = 0
    evicted: int = 0


class DraftVocabulary(Protocol):
    """Over which rows of the target's LM head a drafter's scores are computed; one object for one text at a time.

    The order of calls is `begin`, then for each round `prepare`, `topk` (once for each drafter pass) and
    `observe`. None of them reads anything back to the host except `statistics`.
    """

    prompt_candidates: int
    """K_pre, how many of the target's top ids at each prompt position `begin` wants; 0: none."""

    verify_candidates: int
    """K_ver, likewise for each verified node and `observe`."""

    def begin(self, prompt: Tensor, candidates: Tensor | None) -> None:
        """Start anew with a prompt, int64 `[L]`, and the target's top ids at its positions, int64 `[L, K_pre]`."""

    def prepare(self) -> None:
        """Start to copy the rows of newly active ids, beside whatever the caller runs next."""

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The best k active ids for each hidden row of the drafter, by the target's own head function.

        Args:
            hidden: `[R, H]`.
            k: may exceed the number of active ids.

        Returns:
            scores: fp32 `[R, k]`, log-probabilities over the active ids, descending.
            tokens: int64 `[R, k]`, token ids, -1 where the score is -inf.
        """

    def observe(self, tree: DraftTree, candidates: Tensor, verification: Verification) -> None:
        """Take in a verified round: tree, the target's top ids at its nodes int64 `[N, K_ver]`, and path."""

    def statistics(self, drops_last: bool = False) -> VocabularyStatistics:
        """The counters so far, on the host.

        Args:
            drops_last: without the last round, whose outcome nobody took; rows that it copied count.
        """


class Counters:
    """The counters behind `VocabularyStatistics`, kept on the device and read once, at the end.

    Args:
        device: where they are kept.
    """

    def __init__(self, device: torch.device):
        self._totals = torch.zeros(6, dtype=torch.int64, device=device)
        self._before = torch.zeros_like(self._totals)  # the last round

    def reset(self) -> None:
        """Begin to count for another text."""
        self._totals.zero_()
        self._before.zero_()

    def add_round(self, num_active: Tensor, emitted: Tensor, is_covered: Tensor) -> None:
        """One round: how many ids were active `[]`, emitted tokens `[P]` (-1: none), which were active."""
        self._before.copy_(self._totals)
        is_emitted = emitted >= 0
        one = torch.ones_like(num_active)
        self._totals[:4] += torch.stack([one, num_active, (is_emitted & is_covered).sum(), is_emitted.sum()])

    def add_gathered(self, count: Tensor) -> None:
        """Rows copied, `[1]`."""
        self._totals[4:5] += count

    def add_evicted(self, count: Tensor) -> None:
        """Ids that left, `[1]`."""
        self._totals[5:] += count

    def read(self, drops_last: bool = False) -> VocabularyStatistics:
        latest, before = torch.stack([self._totals, self._before]).tolist()
        rounds, active, covered, emitted, _, evicted = before if drops_last else latest
        return VocabularyStatistics(
            rounds=rounds,
            mean_active=active / max(1, rounds),
            coverage=covered / emitted if emitted else 1.0,
            rows_gathered=latest[4],
            evicted=evicted,
        )


@dataclass(frozen=True)
class PackedRows:
    """Chosen rows of an LM head, side by side.

    Args:
        weight: `[C, H]`, uninitialised where no row was copied to.
        bias: `[C]`, or None for a head without one.
        token_of: int32 `[C]`, token id of each slot, -1 in a free one.
    """

    weight: Tensor
    bias: Tensor | None
    token_of: Tensor

    @classmethod
    def empty(cls, head: TargetHead, num_slots: int, top_k: int) -> PackedRows:
        """Free slots only: at least `num_slots` and top-k, rounded up to 64, which matrix products like."""
        capacity = _round_up(max(num_slots, top_k))
        return cls(
            weight=torch.empty(capacity, head.weight.shape[1], dtype=head.dtype, device=head.device),
            bias=None if head.bias is None else head.bias.new_empty(capacity),
            token_of=torch.full((capacity,), -1, dtype=torch.int32, device=head.device),
        )

    def first(self, num_slots: int, top_k: int) -> PackedRows:
        """The leading slots only: at least `num_slots`, and enough for a top-k."""
        size = _round_up(max(num_slots, top_k))
        return type(self)(self.weight[:size], None if self.bias is None else self.bias[:size], self.token_of[:size])

    def topk(self, head: TargetHead, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """`DraftVocabulary.topk` over these rows: slots that hold no id score -inf and stand for no token."""
        logits = head.project(hidden, *self.matrix(head))
        # Free slots are uninitialised: whatever their memory gave is replaced and not added to.
        scores, slots = ops.draft_topk(logits.masked_fill_(self.token_of < 0, -torch.inf), k)
        return scores, ops.slot_tokens(scores, slots, self.token_of)

    def matrix(self, head: TargetHead) -> tuple[Tensor, Tensor | None]:
        """Weight `[C, H]` and bias `[C]` of the slots."""
        return self.weight, self.bias

    def gather(self, head: TargetHead, rows: Tensor, slots: Tensor, count: Tensor) -> None:
        """Copy `count` rows of the head; see `ops.gather_rows`."""
        if head.stored is None:
            ops.gather_rows(self.weight, head.weight, rows, slots, count)
        else:  # dequantised without asking the device how many of them are wanted
            wanted = head.rows(rows.long().clamp(0, head.weight.shape[0] - 1))
            ops.gather_rows(self.weight, wanted, torch.arange(rows.shape[0], device=rows.device), slots, count)
        if self.bias is not None and head.bias is not None:
            ops.gather_rows(self.bias, head.bias, rows, slots, count)


class IndexedRows(PackedRows):
    """Chosen rows of an LM head that stay where they are: each product reads them by their ids."""

    @classmethod
    def empty(cls, head: TargetHead, num_slots: int, top_k: int) -> IndexedRows:
        size = _round_up(max(num_slots, top_k))
        nothing = torch.empty(size, 0, dtype=head.dtype, device=head.device)
        return cls(nothing, None, torch.full((size,), -1, dtype=torch.int32, device=head.device))

    def matrix(self, head: TargetHead) -> tuple[Tensor, Tensor | None]:
        ids = self.token_of.clamp(min=0).long()
        return head.rows(ids), None if head.bias is None else head.bias.index_select(0, ids)

    def gather(self, head: TargetHead, rows: Tensor, slots: Tensor, count: Tensor) -> None:
        """There is nothing to copy."""


def _round_up(num_slots: int) -> int:
    return -(-num_slots // 64) * 64


def valid_ids(token_ids: tuple[int, ...], head: TargetHead) -> tuple[int, ...]:
    """The ids that are rows of the head, each once, in their order."""
    vocab_size = head.weight.shape[0]
    return tuple(dict.fromkeys(i for i in token_ids if 0 <= i < vocab_size))
