"""`DynaSpecVocabulary`: a static core and the clusters that a pass wants most; and the clusters themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from microspec_hf.vocabulary import DynaSpecVocabulary, clear_routers, cluster_rows
from tests.vocabulary.heads import expected_topk, hidden_rows, make_head, make_tree, make_verification
from tests.vocabulary.routers import best_groups, groups_of, make_router, routed

NONE = torch.empty(2, 0, dtype=torch.int64)


@pytest.fixture(autouse=True)
def _no_routers() -> None:
    clear_routers()


def active_ids(vocabulary: DynaSpecVocabulary, hidden: Tensor, pinned: list[int]) -> set[int]:
    """What the rows of a pass may draft, in plain Python."""
    mass = vocabulary.router(hidden).softmax(dim=-1).sum(dim=0)
    groups = groups_of(vocabulary.router)
    order = [i for g in best_groups(vocabulary.router, mass) for i in groups[g] if i not in pinned]
    return {*pinned, *order[: vocabulary.room]}


@torch.no_grad()
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_drafts_over_the_core_and_the_best_clusters(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    clear_routers()
    vocab_size = data.draw(st.integers(2, 70))
    num_groups = data.draw(st.integers(1, min(8, vocab_size)))
    cuts = sorted(data.draw(st.lists(st.integers(0, vocab_size), min_size=num_groups - 1, max_size=num_groups - 1)))
    sizes = [end - start for start, end in zip([0, *cuts], [*cuts, vocab_size], strict=True)]  # some empty
    head = make_head(
        vocab_size, bias=data.draw(st.booleans()), scale=0.4, softcap=data.draw(st.sampled_from([None, 2.0]))
    )
    ids = st.integers(0, vocab_size - 1)
    stops = data.draw(st.lists(ids, max_size=3))
    core = data.draw(st.lists(ids, max_size=4, unique=True))
    router = make_router(head, "dynaspec", num_groups, sizes, seed=data.draw(st.integers(0, 5)))
    options = routed(
        tmp_path_factory.mktemp("router"),
        router,
        token_ids=tuple(core),
        floor=len(core),
        max_rows=data.draw(st.integers(max(1, len(core)), 90)),
    )
    vocabulary = DynaSpecVocabulary(head, options, stops, top_k=5)
    vocabulary.begin(torch.tensor([1]), None)
    pinned = list(dict.fromkeys([*stops, *core]))
    for rows in (hidden_rows(1), hidden_rows(4), hidden_rows(4).flip(0)):  # the buffer forgets the pass before
        vocabulary.prepare()
        scores, tokens = vocabulary.topk(rows, 5)
        expected_scores, expected_tokens = expected_topk(head, rows, active_ids(vocabulary, rows, pinned), 5)
        assert tokens.tolist() == expected_tokens
        torch.testing.assert_close(scores, expected_scores)


@torch.no_grad()
def test_counts(tmp_path: Path) -> None:
    head = make_head(60)
    options = routed(tmp_path, make_router(head, "dynaspec", 6), token_ids=(5, 6), floor=2, max_rows=20)
    vocabulary = DynaSpecVocabulary(head, options, [59], top_k=2)
    vocabulary.begin(torch.tensor([1]), None)
    first, later = -hidden_rows(3)[:1], hidden_rows(3)
    vocabulary.prepare()
    vocabulary.topk(first, 2)
    vocabulary.topk(later, 2)
    one, two = (active_ids(vocabulary, rows, [59, 5, 6]) for rows in (first, later))
    assert len(one) == len(two) == 20
    only_one, only_two = min(one - two), min(two - one)
    emitted = [only_one, only_two, 5, only_one]  # the last is a bonus token below the deepest level
    vocabulary.observe(make_tree([1, 2, 3, 4]), NONE, make_verification([0, 1, 2, 3], emitted, num_slots=4))
    statistics = vocabulary.statistics()
    assert (statistics.rounds, statistics.mean_active, statistics.coverage) == (1, 20.0, 3 / 4)
    assert (statistics.rows_gathered, statistics.evicted) == (3 + 2 * 17, 0)


def test_clusters_find_directions_and_put_frequent_ids_first() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 24, generator=generator)
    truth = torch.randint(5, (200,), generator=generator)
    lengths = 0.1 + 10 * torch.rand(200, 1, generator=generator)  # must not matter
    rows = lengths * (centres[truth] + 0.1 * torch.randn(200, 24, generator=generator))
    counts = torch.randint(1000, (200,), generator=generator)
    members, sizes = cluster_rows(rows, 5, counts, seed=1)
    assert sorted(members.tolist()) == list(range(200))
    assert sizes.sum() == 200
    start = 0
    pure = 0
    for size in sizes.tolist():
        group = members[start : start + size].tolist()
        start += size
        pure += max(sum(int(truth[i]) == label for i in group) for label in range(5))
        assert [int(counts[i]) for i in group] == sorted((int(counts[i]) for i in group), reverse=True)
    assert pure > 150  # K-means may end in a local optimum, chance would give about 60
    again = cluster_rows(rows, 5, counts, seed=1)
    assert torch.equal(again[0], members)


def test_a_cluster_that_runs_empty_is_filled_again() -> None:
    rows = torch.ones(30, 4)  # nearly all alike: most clusters start from the same direction
    rows[:3] = torch.eye(4)[:3]
    _, sizes = cluster_rows(rows, 6, torch.zeros(30, dtype=torch.int64), seed=0)
    assert sizes.sum() == 30
    assert (sizes > 0).sum() >= 4  # the three odd rows are not left with the others


@torch.no_grad()
def test_nan_and_more_children_than_ids(tmp_path: Path) -> None:
    head = make_head(6)
    vocabulary = DynaSpecVocabulary(head, routed(tmp_path, make_router(head, "dynaspec", 3), max_rows=2), [], top_k=9)
    vocabulary.begin(torch.tensor([1]), None)
    vocabulary.prepare()
    _, tokens = vocabulary.topk(torch.full((2, head.weight.shape[1]), torch.nan), 9)
    assert tokens.tolist() == [[-1] * 9] * 2
    _, tokens = vocabulary.topk(hidden_rows(2), 9)
    assert [sum(i >= 0 for i in row) for row in tokens.tolist()] == [2, 2]
