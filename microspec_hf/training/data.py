"""Sequences, the target's hidden states of them, and their batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from microspec_hf.hf import Target
from microspec_hf.training.decoding import fused_attention


@dataclass(frozen=True)
class Batch:
    """Rows of B sequences, padded to R rows; row j pairs the hidden state at j with the token at j + 1.

    Args:
        hidden: `[B, R + 1, H]`, the target's hidden states after the final norm.
        next_tokens: int64 `[B, R]`.
        rows: int64 `[M]`, flat numbers (b * R + j) of the rows that carry a loss: those that predict what
            follows a token of the answer.
    """

    hidden: Tensor
    next_tokens: Tensor
    rows: Tensor


class Sequences:
    """Prompts with their answers, end to end in one tensor, and their hidden states likewise.

    Sequences whose answer is shorter than two tokens are left out: they have no row with a loss.

    Args:
        ids: `[total]`.
        length: `[S]`, tokens of each sequence.
        prompt: `[S]`, tokens of each prompt.
        target: computes the hidden states.
    """

    def __init__(self, ids: Tensor, length: Tensor, prompt: Tensor, target: Target):
        self.target, self.device = target, target.device
        self.ids = ids.to(device=self.device, dtype=torch.int64)
        self.kept = length - prompt >= 2
        self.start = (length.cumsum(0) - length)[self.kept]
        self.length, self.prompt = length[self.kept], prompt[self.kept]
        self.hidden: Tensor | None = None

    def __len__(self) -> int:
        return int(self.length.shape[0])

    def fits(self) -> bool:
        """Whether the hidden states of everything take less than half of the device's free memory."""
        if self.device.type != "cuda":
            return True
        size = self.ids.shape[0] * self.target.hidden_size * self.target.dtype.itemsize
        return size < torch.cuda.mem_get_info(self.device)[0] // 2

    @torch.no_grad()
    def cache_features(self, tokens: int, progress: bool) -> None:
        """Run the target over every sequence once and keep its hidden states, `[total, H]` in its dtype.

        Args:
            tokens: in one pass, padding included.
            progress: whether to show a bar.
        """
        shape = (self.ids.shape[0], self.target.hidden_size)
        hidden = torch.empty(shape, dtype=self.target.dtype, device=self.device)
        for group in tqdm(self.groups(tokens, range(len(self))), desc="features", disable=not progress):
            index, valid = self._index(group)
            hidden[index[valid]] = self._features(self.ids[index])[valid]
        self.hidden = hidden

    def groups(self, tokens: int, members: Sequence[int], seed: int | None = None) -> list[list[int]]:
        """Members in groups of about one length, which fit `tokens` padded; shuffled with a seed."""
        generator = torch.Generator().manual_seed(seed or 0)
        # A little disorder in the lengths gives other neighbours in every epoch at next to no padding.
        jitter = 1 + 0.1 * torch.rand(len(members), generator=generator)
        lengths = self.length[list(members)]
        groups: list[list[int]] = []
        group: list[int] = []
        longest = 0
        for i in (lengths * jitter).argsort().tolist():
            longest = max(longest, int(lengths[i]))
            if group and longest * (len(group) + 1) > tokens:
                groups.append(group)
                group, longest = [], int(lengths[i])
            group.append(members[i])
        groups += [group] if group else []
        if seed is not None:
            groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
        return groups

    @torch.no_grad()
    def batches(self, groups: list[list[int]]) -> Iterator[Batch]:
        """The groups as tensors on the device. Nothing here waits for the device."""
        for group in groups:
            index, _ = self._index(group, extra=1)
            tokens = self.ids[index]
            hidden = self._features(tokens) if self.hidden is None else self.hidden[index]
            yield Batch(hidden, tokens[:, 1:], self._loss_rows(group, index.shape[1] - 1).to(self.device))

    def _features(self, tokens: Tensor) -> Tensor:
        # No mask: padding stands behind every sequence, where a causal model cannot see it.
        with fused_attention(self.device):
            output = self.target.decoder(input_ids=tokens, use_cache=False)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def _loss_rows(self, group: list[int], width: int) -> Tensor:
        row = torch.arange(width)
        prompt, length = self.prompt[group][:, None], self.length[group][:, None]
        return ((row >= prompt - 1) & (row <= length - 2)).flatten().nonzero()[:, 0]

    def _index(self, group: list[int], extra: int = 0) -> tuple[Tensor, Tensor]:
        """Numbers of the group's tokens in the flat tensors, `[B, T]`, last one repeated; and which are real.

        T - extra is a multiple of 16, which attention kernels like.
        """
        length, start = self.length[group][:, None], self.start[group][:, None]
        width = -(-(int(length.max()) - extra) // 16) * 16 + extra
        column = torch.arange(width)
        index = start + torch.minimum(column, length - 1)
        return index.to(self.device, non_blocking=True), (column < length).to(self.device, non_blocking=True)
