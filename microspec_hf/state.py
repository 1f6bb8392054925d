"""Everything one text needs while it is generated; made per call, dies with it, and is never stored on a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class GenerationState:
    """The text so far. The target's cache holds the rows of all its tokens but the last one.

    Args:
        ids: int64 `[L]`, all decided tokens; the last one, the root of the next tree, is not in the cache yet.
        root: int64 `[1]`, the last decided token, written by each round in its place.
        length: int64 `[1]`, L - 1 on the device, likewise, so that a round needs no host read.
        prompt_length: tokens of the prompt.
    """

    ids: Tensor
    root: Tensor
    length: Tensor
    prompt_length: int

    @property
    def num_cached(self) -> int:
        """L - 1, on the host."""
        return int(self.ids.shape[0]) - 1

    def advance(self, emitted: Tensor, num_accepted: Tensor) -> None:
        """On the device: a round emitted `num_accepted + 1` `[1]` of the tokens int64 `[P]`."""
        self.root.copy_(emitted.index_select(0, num_accepted))
        self.length += (num_accepted + 1).to(self.length.device)

    def commit(self, emitted: list[int]) -> None:
        """On the host: append the tokens of a round, whose KV rows are already in place."""
        self.ids = torch.cat([self.ids, self.ids.new_tensor(emitted)])
