"""Batches hold the target's hidden states, each sequence once, and losses only at rows of the answer."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from microspec_hf.hf import Target
from microspec_hf.training.data import Sequences

LENGTHS = torch.tensor([9, 30, 5, 17, 22, 12])
PROMPTS = torch.tensor([4, 20, 4, 3, 21, 6])  # the third and fifth answers are a single token


@pytest.fixture
def sequences(tiny_llama: PreTrainedModel) -> Sequences:
    ids = torch.randint(101, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(0))
    return Sequences(ids, LENGTHS, PROMPTS, Target(tiny_llama))


@pytest.mark.parametrize("cached", [True, False])
def test_batches(sequences: Sequences, tiny_llama: PreTrainedModel, cached: bool) -> None:
    if cached:
        sequences.cache_features(64, progress=False)
    texts = [ids for ids, keep in zip(sequences.ids.split(LENGTHS.tolist()), sequences.kept, strict=True) if keep]
    prompts = PROMPTS[sequences.kept].tolist()
    groups = sequences.groups(64, range(len(sequences)), seed=3)
    assert sorted(i for group in groups for i in group) == list(range(4))
    for group, batch in zip(groups, sequences.batches(groups), strict=True):
        width = batch.next_tokens.shape[1]
        assert width % 16 == 0
        rows = []
        for number, i in enumerate(group):
            text, count = texts[i], len(texts[i])
            with torch.no_grad():
                hidden = tiny_llama.model(text[None]).last_hidden_state[0]
            torch.testing.assert_close(batch.hidden[number, :count], hidden)
            assert torch.equal(batch.next_tokens[number, : count - 1], text[1:])
            # row n - 1 is the first to predict what follows an answer token, row T - 2 the last
            rows += [number * width + row for row in range(prompts[i] - 1, count - 1)]
        assert batch.rows.tolist() == rows


def test_groups_keep_the_budget_and_the_members(sequences: Sequences) -> None:
    members = [3, 1, 0]
    for budget in (1, 40, 60, 1000):
        groups = sequences.groups(budget, members)
        assert sorted(i for group in groups for i in group) == [0, 1, 3]
        for group in groups:
            assert len(group) == 1 or len(group) * int(sequences.length[group].max()) <= budget
    many = Sequences(
        torch.zeros(4000, dtype=torch.int64), torch.full((400,), 10), torch.full((400,), 3), sequences.target
    )
    assert many.groups(50, range(400), seed=1) != many.groups(50, range(400), seed=2)
    assert many.groups(50, range(400), seed=1) == many.groups(50, range(400), seed=1)
