"""A tiny pair, in memory and on disk, and prompts for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from microspec_hf import EagleHead
from microspec_hf.evaluation import Prompt
from tests.cli.conftest import PairFolders, pair_folders

__all__ = ["PairFolders", "pair_folders"]


@pytest.fixture(scope="session")
def head(pair_folders: PairFolders) -> EagleHead:
    return EagleHead.from_pretrained(pair_folders.drafter)


@pytest.fixture
def target(tiny_llama: PreTrainedModel) -> PreTrainedModel:
    return tiny_llama


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    texts = {"math": ("w3 w14 w15", "w92 w65"), "code": ("w27 w18 w28 w18",)}
    return [Prompt(f"{task}-{i}", task, (text,)) for task, all_ in texts.items() for i, text in enumerate(all_)]


def ids_of(prompt: Prompt) -> Tensor:
    """The ids that the words of a prompt name, int64 `[1, L]`."""
    return torch.tensor([[int(word[1:]) for word in prompt.turns[0].split()]])
