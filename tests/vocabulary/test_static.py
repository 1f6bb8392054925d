"""`StaticVocabulary` and `FullVocabulary`: scores, list faults, and the cache of gathered rows."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch

from microspec_hf.config import VocabularyConfig
from microspec_hf.vocabulary import FullVocabulary, StaticVocabulary, clear_cache, make_vocabulary, static
from tests.vocabulary.heads import expected_topk, hidden_rows, make_head, make_tree, make_verification


@pytest.fixture(autouse=True)
def _empty_cache() -> None:
    clear_cache()


@torch.no_grad()
def test_scores_over_the_listed_ids_and_the_stop_ids() -> None:
    head = make_head(90, bias=True, scale=0.3, softcap=2.0)
    vocabulary = StaticVocabulary(head, token_ids=[50, 7, 50, 8, 9], stop_ids=[89, 8], top_k=10)
    vocabulary.begin(torch.tensor([1, 2]), None)
    vocabulary.prepare()
    scores, tokens = vocabulary.topk(hidden_rows(3), 10)
    expected_scores, expected_tokens = expected_topk(head, hidden_rows(3), {50, 7, 8, 9, 89}, 10)
    assert tokens.tolist() == expected_tokens
    torch.testing.assert_close(scores, expected_scores)


@torch.no_grad()
def test_counts() -> None:
    vocabulary = StaticVocabulary(make_head(90), token_ids=[1, 2, 3], stop_ids=[4], top_k=10)
    none = torch.empty(2, 0, dtype=torch.int64)
    vocabulary.observe(make_tree([1, 2]), none, make_verification([0, 1], [2, 50], num_slots=4))
    vocabulary.observe(make_tree([50, -1]), none, make_verification([0], [0], num_slots=4))
    statistics = vocabulary.statistics()
    assert (statistics.rounds, statistics.mean_active, statistics.evicted) == (2, 4.0, 0)
    assert statistics.coverage == pytest.approx(1 / 3)
    assert statistics.rows_gathered == 4


@torch.no_grad()
def test_size_keeps_the_first_ids() -> None:
    config = VocabularyConfig(kind="static", token_ids=(9, 8, 7, 6), size=2)
    vocabulary = make_vocabulary(config, make_head(20), stop_ids=[1], top_k=5)
    assert set(vocabulary.topk(hidden_rows(1), 5)[1][0].tolist()) == {9, 8, 1, -1}


@torch.no_grad()
def test_second_text_finds_the_rows() -> None:
    head = make_head(90)
    first = StaticVocabulary(head, [1, 2, 3], [4], top_k=10)
    second = StaticVocabulary(head, [1, 2, 3], [4], top_k=10)
    assert first.statistics().rows_gathered == 4
    assert second.statistics().rows_gathered == 0
    assert torch.equal(first.topk(hidden_rows(2), 5)[0], second.topk(hidden_rows(2), 5)[0])


@torch.no_grad()
@pytest.mark.parametrize("change", ["in place", "moved", "bias"])
def test_changed_weights_are_gathered_again(change: str) -> None:
    head = make_head(90, bias=True)
    StaticVocabulary(head, [1, 2, 3], [4], top_k=10)
    if change == "in place":
        head.weight.mul_(2)
    elif change == "moved":
        head.weight.data = head.weight.data * 2
    else:
        assert head.bias is not None
        head.bias.add_(torch.arange(90.0))
    vocabulary = StaticVocabulary(head, [1, 2, 3], [4], top_k=10)
    assert vocabulary.statistics().rows_gathered == 4
    expected, _ = expected_topk(head, hidden_rows(2), {1, 2, 3, 4}, 4)
    torch.testing.assert_close(vocabulary.topk(hidden_rows(2), 4)[0], expected)


@torch.no_grad()
def test_cache_is_bounded_and_lets_go() -> None:
    head = make_head(90)
    for size in range(1, 3 * static.MAX_CACHED):
        StaticVocabulary(head, list(range(size)), [], top_k=10)
    assert len(static._cache[head.weight]) == static.MAX_CACHED
    oldest = list(range(size - static.MAX_CACHED + 1))
    for ids, gathered in (
        (oldest, 0),
        ([88], 1),
        (oldest, 0),
        ([0], 1),
    ):  # used again, it is the oldest no more
        assert StaticVocabulary(head, ids, [], top_k=10).statistics().rows_gathered == gathered
    del head
    gc.collect()
    assert len(static._cache) == 0


def test_ids_that_the_head_lacks_are_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"2 of the 4 token_ids .* 30 rows .*the first is 30\)"):
        vocabulary = StaticVocabulary(make_head(30), [5, 30, -1, 6], [29, 400], top_k=10)
    with torch.no_grad():
        assert set(vocabulary.topk(hidden_rows(1), 10)[1][0].tolist()) == {5, 6, 29, -1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StaticVocabulary(make_head(30), [5, 6], [29, 400], top_k=10)


def test_a_list_of_another_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"None of the 2 token_ids .* has 30\..*this target's tokenizer"):
        StaticVocabulary(make_head(30), [30, 31], [29], top_k=10)


@torch.no_grad()
def test_full_vocabulary() -> None:
    head = make_head(7, bias=True, softcap=3.0)
    vocabulary = FullVocabulary(head, top_k=10)
    vocabulary.begin(torch.tensor([1]), None)
    vocabulary.prepare()
    scores, tokens = vocabulary.topk(hidden_rows(3), 10)  # more than there are ids
    expected_scores, expected_tokens = expected_topk(head, hidden_rows(3), set(range(7)), 10)
    assert tokens.tolist() == expected_tokens
    torch.testing.assert_close(scores, expected_scores)
    none = torch.empty(1, 0, dtype=torch.int64)
    vocabulary.observe(make_tree([1]), none, make_verification([0], [6], num_slots=4))
    statistics = vocabulary.statistics()
    assert (statistics.rounds, statistics.mean_active, statistics.coverage) == (1, 7.0, 1.0)
    assert (statistics.rows_gathered, statistics.evicted) == (0, 0)


def test_nothing_observed_yet() -> None:
    statistics = FullVocabulary(make_head(7), top_k=3).statistics()
    assert (statistics.rounds, statistics.mean_active, statistics.coverage) == (0, 0.0, 1.0)
