"""`CoralVocabulary`: each row drafts over its own best groups, and over the ids that are always active."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from microspec_hf.ops import groups as op_groups
from microspec_hf.vocabulary import CoralVocabulary, clear_routers, coral, coral_partition
from tests.vocabulary.heads import expected_topk, hidden_rows, make_head, make_tree, make_verification
from tests.vocabulary.routers import best_groups, groups_of, make_router, routed

NONE = torch.empty(2, 0, dtype=torch.int64)


@pytest.fixture(autouse=True)
def _no_routers() -> None:
    clear_routers()


def active_sets(vocabulary: CoralVocabulary, hidden: Tensor, pinned: set[int]) -> list[set[int]]:
    """For each row, what it may draft, in plain Python."""
    groups = groups_of(vocabulary.router)
    sets = []
    for scores in vocabulary.router(hidden):
        best = best_groups(vocabulary.router, scores)[: vocabulary.num_chosen]
        sets.append({i for g in best for i in groups[g]} | pinned)
    return sets


@torch.no_grad()
@pytest.mark.parametrize("known", [True, False], ids=["chosen groups", "one product"])
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_each_row_drafts_over_its_own_groups(
    known: bool, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    clear_routers()
    vocab_size = data.draw(st.integers(2, 70))
    num_groups = data.draw(st.sampled_from([g for g in range(1, 10) if g <= vocab_size and _is_even(vocab_size, g)]))
    head = make_head(
        vocab_size, bias=data.draw(st.booleans()), scale=0.4, softcap=data.draw(st.sampled_from([None, 2.0]))
    )
    stops = data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=3))
    floor = data.draw(st.integers(0, min(4, vocab_size)))
    router = make_router(head, "coral", num_groups, seed=data.draw(st.integers(0, 5)))
    options = routed(
        tmp_path_factory.mktemp("router"),
        router,
        token_ids=tuple(range(vocab_size))[::-1],
        floor=floor,
        max_rows=data.draw(st.integers(max(1, floor), 90)),
    )
    with pytest.MonkeyPatch.context() as patch:
        if not known:
            patch.setattr(coral, "chosen_groups", lambda is_chosen: None)
        vocabulary = CoralVocabulary(head, options, stops, top_k=5)
        vocabulary.begin(torch.tensor([1]), None)
        vocabulary.prepare()
        hidden = hidden_rows(4)
        scores, tokens = vocabulary.topk(hidden, 5)
    pinned = {*stops, *range(vocab_size - floor, vocab_size)}
    room = options.max_rows - len(pinned)
    assert vocabulary.num_chosen == min(num_groups, max(1, room // vocabulary.group_size))
    for row, active in enumerate(active_sets(vocabulary, hidden, pinned)):
        expected_scores, expected_tokens = expected_topk(head, hidden[row : row + 1], active, 5)
        assert tokens[row].tolist() == expected_tokens[0]
        torch.testing.assert_close(scores[row], expected_scores[0])


def _is_even(vocab_size: int, num_groups: int) -> bool:
    return (num_groups - 1) * -(-vocab_size // num_groups) < vocab_size


@torch.no_grad()
def test_counts(tmp_path: Path) -> None:
    """Of the token at depth d: could the pass that drafted depth d propose it for any of its rows?"""
    head = make_head(60)
    vocabulary = CoralVocabulary(head, routed(tmp_path, make_router(head, "coral", 6), max_rows=11), [59], top_k=2)
    vocabulary.begin(torch.tensor([1]), None)
    assert (vocabulary.group_size, vocabulary.num_chosen) == (10, 1)
    first, later = -hidden_rows(3)[:1], hidden_rows(3)
    vocabulary.prepare()
    vocabulary.topk(first, 2)
    vocabulary.topk(later, 2)
    (one,), two = active_sets(vocabulary, first, {59}), set().union(*active_sets(vocabulary, later, {59}))
    assert one != two
    only_one, only_two = min(one - two), min(two - one)
    emitted = [only_one, only_two, 59, only_one]  # the last is a bonus token below the deepest level
    vocabulary.observe(make_tree([1, 2, 3, 4]), NONE, make_verification([0, 1, 2, 3], emitted, num_slots=4))
    statistics = vocabulary.statistics()
    assert statistics.coverage == 3 / 4
    assert statistics.mean_active == (len(one) + len(two)) // 2
    assert (statistics.rounds, statistics.rows_gathered, statistics.evicted) == (1, 0, 0)
    vocabulary.observe(make_tree([1]), NONE, make_verification([0], [0], num_slots=4))
    assert vocabulary.statistics().rounds == 1  # nothing was drafted in between


def test_groups_are_known_for_free_on_a_cpu_only() -> None:
    is_chosen = torch.tensor([[True, False, False], [True, False, True]])
    assert op_groups.chosen_groups(is_chosen) == [0, 2]
    assert op_groups.chosen_groups(is_chosen.to("meta")) is None


def test_partition() -> None:
    members, sizes = coral_partition(10, 3)
    assert members.tolist() == list(range(10))
    assert sizes.tolist() == [4, 4, 2]
    with pytest.raises(ValueError, match="groups of 2 make fewer than 6 groups"):
        coral_partition(10, 6)


@torch.no_grad()
def test_nan_and_more_children_than_ids(tmp_path: Path) -> None:
    head = make_head(6)
    vocabulary = CoralVocabulary(head, routed(tmp_path, make_router(head, "coral", 3), max_rows=2), [], top_k=9)
    vocabulary.begin(torch.tensor([1]), None)
    vocabulary.prepare()
    scores, tokens = vocabulary.topk(torch.full((2, head.weight.shape[1]), torch.nan), 9)
    assert tokens.tolist() == [[-1] * 9] * 2
    assert bool((scores == -torch.inf).all())
    _, tokens = vocabulary.topk(hidden_rows(2), 9)
    assert [sum(i >= 0 for i in row) for row in tokens.tolist()] == [2, 2]
