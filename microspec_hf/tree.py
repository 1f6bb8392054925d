"""Records of one round: what was drafted (`DraftTree`) and what the target made of it (`Verification`).

Mask, depths and positions of a tree are all derived from one array, `parents` (algorithms: a mask and a walk from
different sources can disagree; from one source they cannot).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """N nodes in level order; node 0 is the root, the token that is decided but not yet in the target's cache.

    Args:
        tokens: int64 `[N]`, token id of each node; -1 marks a node that was never drafted (too few candidates). It
            matches nothing and is never accepted.
        parents: int64 `[N]`, node number of each node's parent; -1 for the root. A parent precedes its children.
        depths: int64 `[N]`, distance from the root.
        ancestors: int64 `[N]`, bit j of word i is set when node j is node i or an ancestor of it.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor

    @classmethod
    def from_parents(cls, tokens: Tensor, parents: Tensor) -> DraftTree:
        """Derive depths and ancestor words by following `parents` (a loop over nodes; set-up and tests only)."""
        depths: list[int] = []
        words: list[int] = []
        for node, parent in enumerate(parents.tolist()):
            if not (-1 <= parent < node) or (parent == -1) != (node == 0):
                raise ValueError(f"parents[{node}] is {parent}; a parent must precede its child, the root has -1.")
            depths.append(depths[parent] + 1 if node else 0)
            words.append((words[parent] if node else 0) | 1 << node)
        signed = [word - (1 << 64) if word >> 63 else word for word in words]
        device = tokens.device
        return cls(tokens, parents, torch.tensor(depths, device=device), torch.tensor(signed, device=device))

    @property
    def num_nodes(self) -> int:
        return int(self.tokens.shape[0])

    def cut(self, root_position: Tensor, limit: int) -> DraftTree:
        """Without the nodes at positions from `limit` on (they count as undrafted), unless the root is one of them.

        Args:
            root_position: int64 `[1]`.
            limit: see `Target.position_limit`.
        """
        is_over = (root_position + self.depths >= limit) & (root_position < limit)
        return replace(self, tokens=torch.where(is_over, -1, self.tokens))

    def padded(self, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, depths and ancestors `[num_nodes]` of a target pass; rows behind the tree see none of its nodes."""
        behind = (0, num_nodes - self.num_nodes)
        rows = self.tokens.clamp(min=0), self.depths, self.ancestors
        if behind == (0, 0):
            return rows
        tokens, depths, ancestors = (torch.nn.functional.pad(row, behind) for row in rows)
        return tokens, depths, ancestors

    def ancestor_mask(self) -> Tensor:
        """bool `[N, N]`: row i marks node i and its ancestors."""
        bits = torch.arange(self.num_nodes, device=self.ancestors.device)
        return ((self.ancestors[:, None] >> bits) & 1).bool()


@dataclass(frozen=True)
class Verification:
    """The accepted path of one tree; P = levels + 1 slots, padded behind the accepted nodes.

    Args:
        path: int64 `[P]`, node numbers from the root; slots behind `num_accepted` repeat the last accepted node.
        emitted: int64 `[P]`, the target's token at each node of the path: the accepted drafts shifted by one, then the
            bonus token; -1 behind it.
        num_accepted: int64 `[1]`, drafts accepted, 0 to P - 1 (the root is not counted).
    """

    path: Tensor
    emitted: Tensor
    num_accepted: Tensor

    @property
    def num_emitted(self) -> Tensor:
        """int64 `[1]`, tokens emitted by the round: the accepted drafts and the bonus token."""
        return self.num_accepted + 1
