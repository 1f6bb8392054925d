"""EAGLE-2: every id may be drafted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from microspec_hf import ops
from microspec_hf.hf import TargetHead
from microspec_hf.tree import DraftTree, Verification
from microspec_hf.vocabulary.base import Counters, VocabularyStatistics


class FullVocabulary:
    """The whole LM head, as EAGLE-2 uses it.

    Args:
        head: the target's LM head.
        top_k: children of a node; more than there are ids is allowed.
    """

    prompt_candidates = 0
    verify_candidates = 0

    def __init__(self, head: TargetHead, top_k: int):
        self.head, self.top_k = head, top_k
        self._counters = Counters(head.device)
        self._size = torch.tensor(head.weight.shape[0], device=head.device)

    def begin(self, prompt: Tensor, candidates: Tensor | None) -> None:
        self._counters.reset()

    def prepare(self) -> None:
        """Nothing to copy."""

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        logits = self.head(hidden)
        logits = nn.functional.pad(logits, (0, max(0, k - logits.shape[1])), value=-torch.inf)
        scores, tokens = ops.draft_topk(logits, k)
        return scores, torch.where(scores > -torch.inf, tokens, -1)

    def observe(self, tree: DraftTree, candidates: Tensor, verification: Verification) -> None:
        emitted = verification.emitted
        self._counters.add_round(self._size, emitted, emitted >= 0)

    def statistics(self, drops_last: bool = False) -> VocabularyStatistics:
        return self._counters.read(drops_last)
