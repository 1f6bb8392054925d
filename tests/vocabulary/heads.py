"""LM heads and rounds for the tests of draft vocabularies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from microspec_hf.hf import TargetHead
from microspec_hf.tree import DraftTree, Verification

HIDDEN = 12


def make_head(
    vocab_size: int,
    *,
    bias: bool = False,
    scale: float = 1.0,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> TargetHead:
    """A random head; its weight is a parameter, as a model's is."""
    module = nn.Linear(HIDDEN, vocab_size, bias=bias, dtype=dtype)
    generator = torch.Generator().manual_seed(vocab_size)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return TargetHead(module, module.weight, module.bias, scale=scale, softcap=softcap)


def hidden_rows(num_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(99)).to(dtype)


def expected_topk(head: TargetHead, hidden: Tensor, active: set[int], k: int) -> tuple[Tensor, list[list[int]]]:
    """The best k of the active ids by the full head's logits, log-softmax over the active ids only."""
    ids = sorted(active)
    logits = head(hidden)[:, ids].float()
    width = min(k, len(ids))
    scores, order = logits.log_softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    padding = (0, k - width)
    tokens = [[ids[i] for i in row[:width]] + [-1] * padding[1] for row in order.tolist()]
    return nn.functional.pad(scores[:, :width], padding, value=-torch.inf), tokens


def make_tree(tokens: list[int]) -> DraftTree:
    """A chain; vocabularies look at the tokens only."""
    return DraftTree.from_parents(torch.tensor(tokens), torch.arange(len(tokens)) - 1)


def make_verification(path: list[int], emitted: list[int], num_slots: int) -> Verification:
    """Padded as the verifier pads: the last node again, and no token."""
    padding = num_slots - len(path)
    return Verification(
        path=torch.tensor(path + path[-1:] * padding),
        emitted=torch.tensor(emitted + [-1] * padding),
        num_accepted=torch.tensor([len(path) - 1]),
    )
