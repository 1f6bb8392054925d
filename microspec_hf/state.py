"""Everything one text needs while it is generated; made per call, dies with it, and is never stored on a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from microspec_hf.hf import TreeCache


@dataclass
class GenerationState:
    """The text so far and the target's cache.

    Args:
        ids: int64 `[L]`, all decided tokens; the last one, the root of the next tree, is not in the cache yet.
        cache: the target's KV; its `length` committed rows are those of `ids[:-1]`.
        length: int64 `[1]`, the same length on the device, so that a round needs no host read.
        prompt_length: tokens of the prompt.
    """

    ids: Tensor
    cache: TreeCache
    length: Tensor
    prompt_length: int

    @property
    def root(self) -> Tensor:
        """int64 `[1]`, the last decided token."""
        return self.ids[-1:]

    def commit(self, emitted: list[int]) -> None:
        """Append the tokens of a round, whose KV rows are already in place."""
        self.ids = torch.cat([self.ids, self.ids.new_tensor(emitted)])
        self.cache.length += len(emitted)
