"""CORAL: sub-vocabularies fixed offline, of which a router chooses some for each draft token (CORAL, LM head router).

Only this part of CORAL is here, on the same drafter as every other arm; its drafter training is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from microspec_hf import ops
from microspec_hf.config import VocabularyConfig
from microspec_hf.hf import TargetHead
from microspec_hf.ops.groups import chosen_groups
from microspec_hf.vocabulary.router import RoutedVocabulary


class CoralVocabulary(RoutedVocabulary):
    """For each hidden row, the best groups of consecutive ids by the router's score, as many as `max_rows` holds.

    The rows of a group lie side by side in the head, so that nothing is copied. Where the groups that a pass needs are
    known for free (on a CPU) only those are multiplied; elsewhere all are, in one product of a fixed shape, since the
    rows of a beam choose differently and a look at their choice would make the host wait.

    Args, Raises: see `RoutedVocabulary`.
    """

    def __init__(self, head: TargetHead, config: VocabularyConfig, stop_ids: Sequence[int], top_k: int):
        super().__init__(head, config, stop_ids, top_k)
        num_groups = self.router.config.num_groups
        self.group_size = coral_group_size(head.weight.shape[0], num_groups)
        self.num_chosen = min(num_groups, max(1, self.room // self.group_size))
        ids = torch.arange(head.weight.shape[0], device=head.device)
        self._group_of = ids // self.group_size
        self._is_pinned = torch.zeros_like(ids, dtype=torch.bool)
        self._is_pinned[self.pinned] = True
        self._pinned_weight = head.rows(self.pinned).detach()
        self._pinned_bias = None if head.bias is None else head.bias.detach()[self.pinned]

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        chosen = ops.stable_topk(self.router(hidden), self.num_chosen)[1]
        is_chosen = torch.zeros(hidden.shape[0], self.router.config.num_groups, dtype=torch.bool, device=hidden.device)
        is_chosen = is_chosen.scatter(1, chosen, True)
        is_active = is_chosen[:, self._group_of] | self._is_pinned
        torch.any(is_active, dim=0, out=self._next_pass())

        logits = self._logits(hidden, is_chosen).masked_fill(~is_active, -torch.inf)
        logits = nn.functional.pad(logits, (0, max(0, k - logits.shape[1])), value=-torch.inf)
        scores, tokens = ops.draft_topk(logits, k)
        return scores, torch.where(scores > -torch.inf, tokens, -1)

    def _logits(self, hidden: Tensor, is_chosen: Tensor) -> Tensor:
        """`[R, V]`, right wherever an id is active."""
        groups = chosen_groups(is_chosen)
        if groups is None:
            return self.head(hidden)
        logits = hidden.new_empty(hidden.shape[0], self._group_of.shape[0])
        for group in groups:
            ids = slice(group * self.group_size, (group + 1) * self.group_size)
            bias = None if self.head.bias is None else self.head.bias[ids]
            logits[:, ids] = self.head.project(hidden, self._rows(ids), bias)
        logits[:, self.pinned] = self.head.project(hidden, self._pinned_weight, self._pinned_bias)
        return logits

    def _rows(self, ids: slice) -> Tensor:
        """The head's rows of consecutive ids; a view where the head is a plain matrix."""
        if self.head.stored is None:
            return self.head.weight[ids]
        return self.head.rows(torch.arange(self._group_of.shape[0], device=self.head.device)[ids])


def coral_group_size(vocab_size: int, num_groups: int) -> int:
    """Ids of each group of consecutive ids; the last one may have fewer."""
    return -(-vocab_size // num_groups)


def coral_partition(vocab_size: int, num_groups: int) -> tuple[Tensor, Tensor]:
    """CORAL's sub-vocabularies: `members` int32 `[V]` and `sizes` int32 `[G]` of equal groups of consecutive ids.

    Raises:
        ValueError: groups of one size would leave some empty.
    """
    size = coral_group_size(vocab_size, num_groups)
    if (num_groups - 1) * size >= vocab_size:
        raise ValueError(
            f"{vocab_size} tokens in groups of {size} make fewer than {num_groups} groups. Choose a number of groups "
            "that divides the vocabulary."
        )
    sizes = torch.full((num_groups,), size, dtype=torch.int32)
    sizes[-1] = vocab_size - (num_groups - 1) * size
    return torch.arange(vocab_size, dtype=torch.int32), sizes
