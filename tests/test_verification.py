"""The accept rule: golden walk, the same path from every implementation, processors on true prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from microspec_hf import DraftTree, Verification, ops
from microspec_hf.verification import TokenRule, accept, verify
from tests.doubles import draft_tree
from tests.test_tree import A, D, golden_tree

Z = 25
VOCAB_SIZE = 30
GREEDY = TokenRule(LogitsProcessorList(), do_sample=False)


def peaked(tokens: list[int]) -> Tensor:
    """Logits whose argmax at each node is given."""
    logits = torch.zeros(len(tokens), VOCAB_SIZE)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 5.0
    return logits


def test_golden_walk() -> None:
    """argmax(root) = a, argmax(a) = d, argmax(d) = z: nodes 0, 1, 3, two drafts accepted, [a, d, z] emitted."""
    logits = peaked([A, D, 0, Z, 0, 0])
    verification = verify(golden_tree(), logits, torch.tensor([9]), GREEDY, num_slots=4).verification
    assert verification.path.tolist() == [0, 1, 3, 3]
    assert verification.emitted.tolist() == [A, D, Z, -1]
    assert verification.num_accepted.tolist() == [2]
    assert verification.num_emitted.tolist() == [3]


def test_golden_rows_move_together() -> None:
    """KV rows P + {0, 1, 3} to P .. P + 2; what lies before P stays."""
    start = 5
    buffer = torch.arange(16.0).reshape(1, 1, 16, 1).repeat(1, 2, 1, 3)
    logits = peaked([A, D, 0, Z, 0, 0])
    path = verify(golden_tree(), logits, torch.tensor([9]), GREEDY, num_slots=4).verification.path
    ops.compact_kv([buffer], path, torch.tensor([start]))
    assert buffer[0, 0, : start + 3, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 8]
    assert (buffer[0, 0] == buffer[0, 1]).all()


def slow_walk(tree: DraftTree, chosen: list[int], num_slots: int) -> tuple[list[int], list[int], int]:
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    path = [0]
    while True:
        children = [n for n in range(len(tokens)) if parents[n] == path[-1] and tokens[n] == chosen[path[-1]]]
        if not children:
            break
        path.append(children[0])
    padding = num_slots - len(path)
    emitted = [chosen[node] for node in path]
    return path + path[-1:] * padding, emitted + [-1] * padding, len(path) - 1


@st.composite
def judged_trees(draw: st.DrawFn) -> tuple[DraftTree, list[int], int]:
    """A tree with holes and distinct siblings of few tokens, and the target's choices."""
    levels, children, nodes = [0], [set()], []
    for _ in range(draw(st.integers(0, 40))):
        parent = draw(st.integers(0, len(levels) - 1))
        token = draw(st.integers(-1, 3))
        if levels[parent] == 6 or (token >= 0 and token in children[parent]):
            continue
        children[parent].add(token)
        nodes.append((parent, token))
        levels.append(levels[parent] + 1)
        children.append(set())
    tree = draft_tree(0, nodes)
    chosen = [draw(st.integers(0, 3)) for _ in levels]
    return tree, chosen, max(levels) + 1 + draw(st.integers(0, 2))


def as_lists(verification: Verification) -> tuple[list[int], list[int], int]:
    return verification.path.tolist(), verification.emitted.tolist(), int(verification.num_accepted)


@given(judged_trees())
def test_accept_is_the_walk(judged: tuple[DraftTree, list[int], int]) -> None:
    tree, chosen, num_slots = judged
    assert as_lists(accept(tree, torch.tensor(chosen), num_slots)) == slow_walk(tree, chosen, num_slots)


class Unchanged(LogitsProcessor):
    """Sends `verify` node by node, since it may look at the ids."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


@given(judged_trees())
def test_all_ways_to_verify_agree(judged: tuple[DraftTree, list[int], int]) -> None:
    tree, chosen, num_slots = judged
    logits, prefix = peaked(chosen), torch.tensor([7, 0])
    expected = slow_walk(tree, chosen, num_slots)
    for processors in ([], [TemperatureLogitsWarper(0.7)], [Unchanged()]):
        for do_sample in (False, True):
            sharp = logits * 1e4 if do_sample else logits  # a draw without a choice
            rule = TokenRule(LogitsProcessorList(processors), do_sample)
            judgement = verify(tree, sharp, prefix, rule, num_slots)
            assert as_lists(judgement.verification) == expected
            if judgement.scores is not None:
                temperature = 0.7 if processors and type(processors[0]) is TemperatureLogitsWarper else 1.0
                torch.testing.assert_close(judgement.scores, (sharp / temperature)[judgement.verification.path])


def test_node_that_was_never_drafted_is_never_accepted() -> None:
    tree = draft_tree(5, [(0, -1), (0, 3), (1, 2), (2, -1)])
    assert as_lists(accept(tree, torch.tensor([3, 2, 29, 0, 0]), 4)) == ([0, 2, 2, 2], [3, 29, -1, -1], 1)


def test_root_alone() -> None:
    assert as_lists(accept(draft_tree(5, []), torch.tensor([3]), 3)) == ([0, 0, 0], [3, -1, -1], 0)


def test_root_matches_whatever_its_token_is() -> None:
    """The root's parent is -1; the token chosen at the last node must not be compared with it."""
    tree = draft_tree(5, [(0, 1)])
    for last in (5, 6):
        assert int(accept(tree, torch.tensor([1, last]), 2).num_accepted) == 1


def test_equal_logits_choose_the_lowest_id() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [4, 17]] = 1.0
    for rule in (GREEDY, TokenRule(LogitsProcessorList([Unchanged()]), False)):
        assert verify(draft_tree(0, []), logits, torch.tensor([0]), rule, 1).verification.emitted.tolist() == [4]


class Witness(LogitsProcessor):
    """Notes the ids that it is shown."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        self.seen += input_ids.tolist()
        return scores


def test_processors_see_each_true_prefix_once_and_in_order() -> None:
    witness = Witness()
    rule = TokenRule(LogitsProcessorList([witness]), do_sample=False)
    verify(golden_tree(), peaked([A, D, 0, Z, 0, 0]), torch.tensor([4, 9]), rule, num_slots=4)
    assert witness.seen == [[4, 9], [4, 9, A], [4, 9, A, D]]


def test_processors_see_the_padding_of_a_batch() -> None:
    witness = Witness()
    rule = TokenRule(LogitsProcessorList([witness]), do_sample=False, padding=torch.tensor([0, 0]))
    verify(draft_tree(9, []), peaked([A]), torch.tensor([4, 9]), rule, num_slots=2)
    assert witness.seen == [[0, 0, 4, 9]]


def test_penalty_changes_the_choice_by_each_nodes_own_prefix() -> None:
    """Root and its child both prefer token 3, then 4: the child's prefix has 3 in it, so there 4 is chosen."""
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 3], logits[:, 4] = 2.0, 1.9
    rule = TokenRule(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)]), do_sample=False)
    verification = verify(draft_tree(9, [(0, 3)]), logits, torch.tensor([9]), rule, num_slots=2).verification
    assert verification.emitted.tolist() == [3, 4]


class Subclass(TemperatureLogitsWarper):
    pass


@pytest.mark.parametrize(
    ("processors", "is_history_free"),
    [
        ([], True),
        ([TemperatureLogitsWarper(0.5), TopKLogitsWarper(3), TopPLogitsWarper(0.9)], True),
        ([SuppressTokensLogitsProcessor([3])], True),
        ([TemperatureLogitsWarper(0.5), RepetitionPenaltyLogitsProcessor(1.2)], False),
        ([Subclass(0.5)], False),
        ([Unchanged()], False),
    ],
)
def test_which_processors_may_see_a_whole_tree(processors: list[Any], is_history_free: bool) -> None:
    assert TokenRule(LogitsProcessorList(processors), do_sample=True).is_history_free is is_history_free


def test_processors_do_not_write_to_the_targets_logits() -> None:
    class InPlace(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.fill_(0.0)

    logits = peaked([3])
    before = logits.clone()
    verify(draft_tree(0, []), logits, torch.tensor([0]), TokenRule(LogitsProcessorList([InPlace()]), False), 1)
    assert torch.equal(logits, before)


def test_half_precision_logits_are_processed_in_float32() -> None:
    rule = TokenRule(LogitsProcessorList([TemperatureLogitsWarper(0.3)]), do_sample=False)
    scores = rule.scores(torch.tensor([0]), torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, torch.tensor([[1.0, 2.0]]) / 0.3)


def test_greedy_leaves_the_random_state_alone() -> None:
    state = torch.random.get_rng_state()
    for processors in ([], [TemperatureLogitsWarper(0.5)], [Unchanged()]):
        verify(
            golden_tree(),
            peaked([A, D, 0, Z, 0, 0]),
            torch.tensor([9]),
            TokenRule(LogitsProcessorList(processors), False),
            4,
        )
    assert torch.equal(torch.random.get_rng_state(), state)
