"""Beams and accepted paths: against plain Python, and Triton against the definition."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from microspec_hf import DraftTree, ops

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda")


def implementation(name: str, kind: str) -> Callable[..., Any]:
    if kind == "plain":
        return getattr(ops, name).plain  # type: ignore[no-any-return]
    return getattr(pytest.importorskip("microspec_hf.ops.triton_beam"), name)  # type: ignore[no-any-return]


KINDS = [
    "plain",
    pytest.param("triton", marks=() if IS_INTERPRETED else pytest.mark.gpu),
]


def there(kind: str, *tensors: Tensor) -> list[Tensor]:
    return [tensor.to(DEVICE if kind == "triton" and not IS_INTERPRETED else "cpu") for tensor in tensors]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 2, 3, 10, 16])
def test_beam(k: int, kind: str) -> None:
    draw = random.Random(k)
    values = [-3.0, -1.5, -0.25, 0.0, -math.inf]  # few of them, so that many are equal
    for offset in (k, k + k * k):
        scores = [[draw.choice(values) for _ in range(k)] for _ in range(k)]
        tokens = [[draw.randrange(99) for _ in range(k)] for _ in range(k)]
        above, flat = [draw.choice(values) for _ in range(k)], [draw.randrange(k) for _ in range(k)]
        words, own = [draw.getrandbits(62) for _ in range(k)], [draw.getrandbits(62) for _ in range(k)]
        size = k + 3 * k * k
        lists = there(kind, torch.zeros(size), torch.zeros(size, dtype=torch.int64), torch.zeros(size).long())
        zero = torch.zeros(k, dtype=torch.int64)
        beam = ops.Beam(*there(kind, torch.tensor(above), zero, torch.tensor(flat), zero, torch.tensor(words)[:, None]))
        grow = implementation("grow_beam", kind)
        own_words, child_scores, child_tokens = there(
            kind, torch.tensor(own)[:, None], torch.tensor(scores), torch.tensor(tokens)
        )
        got = grow(tuple(lists), offset, child_scores, child_tokens, beam, own_words)

        children = [(above[i] + scores[i][j], tokens[i][j], flat[i], i) for i in range(k) for j in range(k)]
        listed = slice(offset, offset + k * k)
        assert lists[0][listed].tolist() == [child[0] for child in children]
        assert lists[1][listed].tolist() == [child[1] for child in children]
        assert lists[2][listed].tolist() == [child[2] for child in children]
        assert not lists[0][listed.stop :].any()
        order = sorted(range(k * k), key=lambda i: (-children[i][0], i))[:k]
        assert got.scores.tolist() == [children[i][0] for i in order]
        assert got.tokens.tolist() == [children[i][1] for i in order]
        assert got.flat.tolist() == [i + offset for i in order]
        assert got.parent.tolist() == [children[i][3] for i in order]
        assert got.ancestors.flatten().tolist() == [words[children[i][3]] | own[r] for r, i in enumerate(order)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_nodes", [1, 2, 13, 60, 64])
def test_accepted_path(num_nodes: int, kind: str) -> None:
    draw = random.Random(num_nodes)
    for _ in range(20):
        parents = [-1] + [draw.randrange(max(0, node - 9), node) for node in range(1, num_nodes)]
        tokens = [draw.randrange(4)]
        for node in range(1, num_nodes):
            taken = {tokens[other] for other in range(1, node) if parents[other] == parents[node]}
            free = [token for token in range(6) if token not in taken]
            tokens.append(draw.choice(free) if free else -1)
        chosen = [draw.randrange(4) for _ in range(num_nodes)]
        tree = DraftTree.from_parents(torch.tensor(tokens), torch.tensor(parents))
        slots = int(tree.depths.max()) + 1 + draw.randrange(3)
        path = [0]
        while follow := [n for n in range(1, num_nodes) if parents[n] == path[-1] and tokens[n] == chosen[path[-1]]]:
            path.append(follow[0])
        accept = implementation("accept_path", kind)
        arguments = there(kind, tree.tokens, tree.parents, tree.depths, tree.ancestors, torch.tensor(chosen))
        got_path, emitted, num_accepted = accept(*arguments, slots)
        padding = slots - len(path)
        assert got_path.tolist() == path + path[-1:] * padding
        assert emitted.tolist() == [chosen[node] for node in path] + [-1] * padding
        assert num_accepted.tolist() == [len(path) - 1]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_slots(kind: str) -> None:
    scores, slots = torch.tensor([[0.5, -math.inf], [-2.0, 1.0]]), torch.tensor([[2, 0], [1, 2]])
    token_of = torch.tensor([7, -1, 2**20], dtype=torch.int32)
    got = implementation("slot_tokens", kind)(*there(kind, scores, slots, token_of))
    assert got.tolist() == [[2**20, -1], [-1, 2**20]]
    assert got.dtype == torch.int64
