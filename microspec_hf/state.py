"""Everything one text needs while it is generated; made per call, dies with it, and is never stored on a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class GenerationState:
    """The text so far. The target's cache holds the rows of all its tokens but the last one.

    `root` and `length` stay where they are from text to text, so that a captured round finds them again.

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

    @classmethod
    def empty(cls, device: torch.device) -> GenerationState:
        """Of no text yet."""
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        return cls(ids=nothing[:0], root=nothing.clone(), length=nothing.clone(), prompt_length=0)

    def begin(self, prompt: Tensor, first: Tensor) -> None:
        """A text of `prompt` `[L]`, whose rows are cached, and its first decided token `[1]`."""
        self.ids = torch.cat([prompt, first])
        self.root.copy_(first)
        self.length.fill_(prompt.shape[0])
        self.prompt_length = prompt.shape[0]

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
