"""Plain decoding in the loop's terms: every tree is its root, and nothing is learned."""

from __future__ import annotations

import torch
from torch import Tensor

from microspec_hf.hf import Target
from microspec_hf.tree import DraftTree, Verification
from microspec_hf.vocabulary import VocabularyStatistics


class RootOnly:
    """The shape of a tree that is its root, see `TreeConfig`."""

    num_levels = 0
    num_nodes = 1
    num_path_slots = 1

    def to_dict(self) -> dict[str, int]:
        return {}


class NoVocabulary:
    """Nothing is drafted, so that no ids are active."""

    prompt_candidates = 0
    verify_candidates = 0

    def begin(self, prompt: Tensor, candidates: Tensor | None) -> None:
        """Nothing to learn."""

    def statistics(self, drops_last: bool = False) -> VocabularyStatistics:
        return VocabularyStatistics()


class NoDrafter:
    """Stands where a `MicroSpecCandidateGenerator` does, so that plain decoding runs on the same engine.

    Args:
        target: the model that decides.
    """

    tree = RootOnly()
    size = ()

    def __init__(self, target: Target):
        self.device = target.head.device
        self.vocabulary = NoVocabulary()
        self._zero = torch.zeros(1, dtype=torch.int64, device=self.device)

    def start_at(self, position: int) -> None:
        """Features are not read."""

    def feed(self, hidden: Tensor, next_tokens: Tensor) -> None:
        """Features are not read."""

    def expect(self, hidden: Tensor, next_tokens: Tensor, count: Tensor) -> None:
        """Features are not read."""

    def restart(self, num_rows: int) -> None:
        """Nothing is kept."""

    def reserve(self, slack: int) -> None:
        """Nothing is kept."""

    def can_be_captured(self, drafts: bool) -> bool:
        return True

    def draft(self, root: Tensor) -> DraftTree:
        return self.hold(root)

    def hold(self, root: Tensor) -> DraftTree:
        return DraftTree(root, parents=self._zero - 1, depths=self._zero, ancestors=self._zero + 1)

    def learn(self, hidden: Tensor, tree: DraftTree, candidates: Tensor, verification: Verification) -> None:
        """Nothing is learned."""

    def commit(self, num_rows: int, num_expected: int) -> None:
        """Nothing is kept."""
