"""What the rows of a pass see: a text, and of the tree behind it their own ancestors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 64
"""Bits of a word of ancestors."""


@dataclass(frozen=True)
class Sight:
    """What each of T rows of B texts sees in a cache: the rows of its text, and tree rows behind them.

    Column j of the tree is cache row `length + j`. Everything is read on the device only.

    Args:
        length: int64 `[B]`, rows of each text.
        ancestors: int64 `[B, T, W]`: a row sees column j when bit j % 64 of its word j // 64 is set. A row without any
            bit is padding: it sees the text alone.
        depths: int64 `[B, M]`: column j stands at position `length + depths[j]`.
        first: int64 `[B]`, the first row of each text that is seen.
    """

    length: Tensor
    ancestors: Tensor
    depths: Tensor
    first: Tensor

    def positions(self, view: int) -> Tensor:
        """int64 `[B, T, view]`, the position of each cache row that a row sees, -1 for the others."""
        columns = torch.arange(view, device=self.length.device)
        offset = columns - self.length[:, None]
        column = offset.clamp(0, self.depths.shape[1] - 1)
        words = self.ancestors.gather(2, (column // WORD)[:, None].expand(-1, self.ancestors.shape[1], -1))
        is_behind = (offset >= 0) & (offset < self.depths.shape[1])
        in_tree = is_behind[:, None] & ((words >> (column % WORD)[:, None]) & 1 == 1)
        in_text = (offset < 0) & (columns >= self.first[:, None])
        behind = self.length[:, None] + self.depths.gather(1, column)
        return torch.where(in_tree, behind[:, None], torch.where(in_text, columns, -1)[:, None])


def chain_words(num_rows: int, device: torch.device) -> Tensor:
    """int64 `[T, W]`: row i sees the columns 0 .. i."""
    return bit_words(num_rows, device).cumsum(0)


def bit_words(num_columns: int, device: torch.device) -> Tensor:
    """int64 `[M, W]`: row j sees column j."""
    columns = torch.arange(num_columns, device=device)
    words = torch.zeros(num_columns, -(-num_columns // WORD), dtype=torch.int64, device=device)
    return words.scatter_(1, (columns // WORD)[:, None], (torch.ones_like(columns) << (columns % WORD))[:, None])
