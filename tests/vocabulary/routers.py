"""Routers for the tests: random ones, and one that says what a test wants."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from microspec_hf.config import VocabularyConfig
from microspec_hf.hf import TargetHead
from microspec_hf.vocabulary import RouterConfig, VocabularyRouter, coral_partition


def make_router(
    head: TargetHead, kind: Literal["coral", "dynaspec"], num_groups: int, sizes: list[int] | None = None, seed: int = 0
) -> VocabularyRouter:
    """A random router; DynaSpec's groups are random too, and of one size unless sizes are given."""
    vocab_size, hidden_size = head.weight.shape
    generator = torch.Generator().manual_seed(seed)
    config = RouterConfig(kind, hidden_size, vocab_size, num_groups, width=16)
    if sizes is None:
        sizes = coral_partition(vocab_size, num_groups)[1].tolist()
    members = torch.randperm(vocab_size, generator=generator) if kind == "dynaspec" else torch.arange(vocab_size)
    with torch.random.fork_rng(devices=[]):
        router = VocabularyRouter(config, members, torch.tensor(sizes))
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return router


def routed(folder: Path, router: VocabularyRouter, **options: object) -> VocabularyConfig:
    """The configuration of a vocabulary with this router, saved to a folder."""
    router.save(folder)
    return VocabularyConfig(kind=router.config.kind, router=str(folder), **options)  # type: ignore[arg-type]


def best_groups(router: VocabularyRouter, scores: Tensor) -> list[int]:
    """Groups by (score desc, number asc), in plain Python."""
    values = scores.tolist()
    return sorted(range(len(values)), key=lambda g: (-values[g], g))


def groups_of(router: VocabularyRouter) -> list[list[int]]:
    """The ids of each group, in the order of `members`."""
    members, groups = router.members.tolist(), []
    for size in router.sizes.tolist():
        groups.append(members[:size])
        members = members[size:]
    return groups
