"""`build_tree`: the golden tree, ties, missing candidates, and an independent rerank in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from microspec_hf import config, ops
from microspec_hf.tree import DraftTree


def naive_tree(
    scores: list[float], tokens: list[int], parents: list[int], root: int, num_nodes: int
) -> tuple[list[int], list[int]]:
    """Tokens and parents of the nodes."""
    best = sorted(range(len(scores)), key=lambda f: (-scores[f], f))[: num_nodes - 1]
    number = {-1: 0} | {flat: node for node, flat in enumerate(sorted(best), start=1)}
    node_tokens = [root] + [tokens[f] if scores[f] > -math.inf else -1 for f in sorted(best)]
    return node_tokens, [-1] + [number[parents[f]] for f in sorted(best)]


def check(scores: list[float], parents: list[int], num_nodes: int) -> None:
    tokens = [1000 + f for f in range(len(scores))]
    tree = ops.build_tree(
        torch.tensor(scores, dtype=torch.float32),
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(parents, dtype=torch.int64),
        torch.tensor([7]),
        num_nodes,
    )
    node_tokens, node_parents = naive_tree(torch.tensor(scores).tolist(), tokens, parents, 7, num_nodes)
    expected = DraftTree.from_parents(torch.tensor(node_tokens), torch.tensor(node_parents))
    for actual, wanted in zip(
        tree, (expected.tokens, expected.parents, expected.depths, expected.ancestors), strict=True
    ):
        assert actual.dtype == torch.int64
        assert actual.tolist() == wanted.tolist()


def test_golden_tree() -> None:
    """Two children a node, two expansions, six nodes; worked out by hand."""
    scores = torch.tensor([-0.10, -2.50, -0.30, -2.00, -2.80, -3.50, -0.40, -2.90, -2.45, -3.50])
    parents = torch.tensor([-1, -1, 0, 0, 1, 1, 2, 2, 3, 3])
    names = torch.tensor([ord(c) for c in "abcdefghij"])
    tokens, node_parents, depths, ancestors = ops.build_tree(scores, names, parents, torch.tensor([ord("r")]), 6)
    assert "".join(map(chr, tokens.tolist())) == "racdgi"
    assert node_parents.tolist() == [-1, 0, 1, 1, 2, 3]
    assert depths.tolist() == [0, 1, 2, 2, 3, 3]
    assert ancestors.tolist() == [0x1, 0x3, 0x7, 0xB, 0x17, 0x2B]


@st.composite
def candidates(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Scores that fall along every path, often by nothing (ties) and sometimes to -inf, and the parents."""
    step = st.sampled_from([0.0, 0.0, 0.25, 1.0, math.inf])
    scores: list[float] = []
    parents: list[int] = []
    for flat in range(draw(st.integers(0, 90))):
        parents.append(draw(st.integers(-1, flat - 1)))
        scores.append((scores[parents[-1]] if parents[-1] >= 0 else 0.0) - draw(step))
    return scores, parents


@given(candidates(), st.data())
@settings(max_examples=200, deadline=None)
def test_equals_the_naive_rerank(drawn: tuple[list[float], list[int]], data: st.DataObject) -> None:
    scores, parents = drawn
    check(scores, parents, data.draw(st.integers(1, min(64, len(scores) + 1))))


def test_default_shape_and_full_words() -> None:
    """510 candidates of which 63 are kept: bit 63 is the sign of an ancestor word."""
    generator = torch.Generator().manual_seed(0)
    k, depth = 10, 5
    scores = (-torch.rand(k, generator=generator)).tolist()
    parents = [-1] * k
    for level in range(depth):
        start = len(scores) - (k if level == 0 else k * k)
        for beam in range(start, start + k):
            for step in torch.rand(k, generator=generator).tolist():
                scores.append(scores[beam] - step)
                parents.append(beam)
    assert len(scores) == 510
    check(scores, parents, 60)
    check(scores, parents, 64)


def test_a_chain_of_64_nodes() -> None:
    check([0.0] * 63, list(range(-1, 62)), 64)


def test_missing_candidates_have_no_token() -> None:
    """Fewer ids than nodes: NaN and -inf are candidates that were never drafted, and come last."""
    scores = torch.tensor([math.nan, -1.0, -math.inf])
    tree = ops.build_tree(scores, torch.tensor([5, 6, 7]), torch.tensor([-1, -1, 1]), torch.tensor([9]), 4)
    assert tree[0].tolist() == [9, -1, 6, -1]
    assert tree[1].tolist() == [-1, 0, 0, 2]


@pytest.mark.parametrize("num_nodes", [0, 12, 65])
def test_impossible_sizes_are_refused(num_nodes: int) -> None:
    size = 10 if num_nodes < 65 else 100
    flat = torch.zeros(size, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"num_nodes must be from 1 to .* got {num_nodes}\."):
        ops.build_tree(flat.float(), flat, flat - 1, torch.tensor([1]), num_nodes)


def test_words_are_as_wide_as_the_largest_tree() -> None:
    assert ops.MAX_NODES == config.MAX_NODES


def test_lengths_are_checked() -> None:
    flat = torch.zeros(10, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"\(10,\), \(9,\), \(10,\) and \(1,\)"):
        ops.build_tree(flat.float(), flat[:9], flat - 1, torch.tensor([1]), 4)
