"""Trees: everything is derived from one array of parents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from microspec_hf import DraftTree, Verification, ops

A, B, C, D, E, F, G, H, I, J = range(10, 20)  # noqa: E741 (the names of the worked example)


def golden_tree() -> DraftTree:
    """The worked example (top-k 2, depth 2, 6 nodes), from its candidates in flat order."""
    scores = [-0.10, -2.50, -0.30, -2.00, -2.80, -3.50, -0.40, -2.90, -2.45, -3.50]
    parents = [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3]  # a, b | of a: c, d; of b: e, f | of c: g, h; of d: i, j
    nodes = ops.build_tree(
        torch.tensor(scores), torch.tensor([A, B, C, D, E, F, G, H, I, J]), torch.tensor(parents), torch.tensor([9]), 6
    )
    return DraftTree(*nodes)


def test_golden_tree() -> None:
    tree = golden_tree()
    assert tree.tokens.tolist() == [
        9,
        A,
        C,
        D,
        G,
        I,
    ]  # flat ids 0, 2, 3, 6, 8: b, of the first level, is not among them
    assert tree.parents.tolist() == [-1, 0, 1, 1, 2, 3]
    assert tree.depths.tolist() == [0, 1, 2, 2, 3, 3]
    assert tree.ancestors.tolist() == [0x1, 0x3, 0x7, 0xB, 0x17, 0x2B]
    assert tree.num_nodes == 6


def test_golden_tree_from_its_parents() -> None:
    golden = golden_tree()
    tree = DraftTree.from_parents(golden.tokens, golden.parents)
    assert torch.equal(tree.depths, golden.depths)
    assert torch.equal(tree.ancestors, golden.ancestors)


def test_ancestor_mask() -> None:
    assert golden_tree().ancestor_mask().int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]


@st.composite
def parent_arrays(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 64))
    return [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]


@given(parent_arrays())
def test_mask_and_depths_follow_the_parents(parents: list[int]) -> None:
    tree = DraftTree.from_parents(torch.arange(len(parents)), torch.tensor(parents))
    for node, row in enumerate(tree.ancestor_mask().tolist()):
        path = {node}
        while parents[node] >= 0:
            node = parents[node]
            path.add(node)
        assert {i for i, marked in enumerate(row) if marked} == path
    assert (tree.ancestor_mask().sum(dim=1) - 1).tolist() == tree.depths.tolist()


def test_sixty_fourth_node_uses_the_sign_bit() -> None:
    tree = DraftTree.from_parents(torch.arange(64), torch.arange(64) - 1)
    assert tree.ancestors.dtype == torch.int64
    assert tree.ancestors[63] == -1
    assert tree.ancestor_mask()[63].all()
    assert tree.ancestor_mask().sum() == 64 * 65 // 2


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, 2, 0], [-1, -1], [-1, 0, -2]])
def test_impossible_parents(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="a parent must precede its child, the root has -1"):
        DraftTree.from_parents(torch.arange(len(parents)), torch.tensor(parents))


def test_emitted_is_accepted_and_one() -> None:
    verification = Verification(torch.zeros(7).long(), torch.zeros(7).long(), torch.tensor([3]))
    assert verification.num_emitted.tolist() == [4]
