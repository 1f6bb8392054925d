"""What a drafter proposes along answers is what it would find best there."""

from __future__ import annotations

import torch

from microspec_hf.hf import Target
from microspec_hf.training.proposals import proposals
from tests.doubles import controlled_pair, random_prompt


def test_proposals_are_the_heads_best_ids() -> None:
    model, head = controlled_pair(scale=0.1)
    target = Target(model)
    texts = [random_prompt(model, length, length)[0] for length in (9, 6)]
    answers = {
        "ids": torch.cat(texts).to(torch.int32),
        "length": torch.tensor([9, 6]),
        "prompt": torch.tensor([4, 5]),  # the second answer is one token, behind which nothing is drafted
        "index": torch.arange(2),
    }
    (first, second) = proposals(target, head, answers, top_k=3, unroll=2)

    with torch.no_grad():
        hidden = target.decoder(input_ids=texts[0][None]).last_hidden_state[:, :-1]
        embedded = target.embeddings(texts[0][None, 1:])
        positions = torch.arange(8)[None]
        predicted = head(embedded, hidden, positions)
        assert torch.equal(first, target.head(predicted[0, 3:]).topk(3).indices)
        for row in range(3, 8):  # one level below: behind the true rows up to the one before, one row of its own
            rows = torch.cat([hidden[:, :row], predicted[:, row - 1 : row]], dim=1)
            below = head(embedded[:, : row + 1], rows, positions[:, : row + 1])
            assert torch.equal(second[row - 3], target.head(below[0, -1]).topk(3).indices)
