"""`DynamicVocabulary` against the window law in plain Python, and what it copies, scores and counts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from microspec_hf.config import VocabularyConfig
from microspec_hf.hf import TargetHead
from microspec_hf.vocabulary import DynamicVocabulary, FullVocabulary, make_vocabulary
from tests.ops.naive import NaiveWindow
from tests.vocabulary.heads import expected_topk, hidden_rows, make_head, make_tree, make_verification

SENTINEL = 777.0


@dataclass
class Round:
    tree: list[int]
    candidates: list[list[int]]
    path: list[int]
    emitted: list[int]


@dataclass
class Text:
    """What a vocabulary sees of one text, and the naive model of it."""

    head: TargetHead
    config: VocabularyConfig
    stop_ids: list[int]
    rounds: list[int] = field(default_factory=list)  # active ids in each
    covered: int = 0
    emitted: int = 0
    gathered: int = 0
    evicted: int = 0

    def __post_init__(self) -> None:
        self.vocabulary = DynamicVocabulary(
            self.head, self.config, self.stop_ids, top_k=10, verify_candidates=self.config.verify_candidates_of(60)
        )
        pinned = list(dict.fromkeys([*self.stop_ids, *(self.config.token_ids or ())[: self.config.floor]]))
        vocab_size = self.head.weight.shape[0]
        room = max(0, self.config.max_rows - len(pinned))
        num_slots = min(vocab_size, room + len(pinned))
        token_of = pinned + [-1] * (num_slots - len(pinned))
        self.naive = NaiveWindow(token_of, vocab_size, room, self.config.window == "stream")
        self.gathered = len(pinned)

    def _push(self, entries: list[int]) -> None:
        entered, _, evicted = self.naive.push(entries)
        self.gathered += len(entered)
        self.evicted += evicted

    def begin(self, prompt: list[int], candidates: list[list[int]]) -> None:
        k = self.vocabulary.prompt_candidates
        ids = torch.tensor(candidates, dtype=torch.int64).reshape(len(prompt), -1)[:, :k]
        self.vocabulary.begin(torch.tensor(prompt, dtype=torch.int64), ids if k else None)
        if self.config.prompt:
            self._push(prompt + ids.flatten().tolist())

    def round(self, played: Round) -> None:
        k = self.vocabulary.verify_candidates
        candidates = [row[:k] for row in played.candidates]
        active = self.naive.active()
        self.rounds.append(len(active))
        self.covered += sum(i in active for i in played.emitted)
        self.emitted += len(played.emitted)
        nodes = range(len(played.tree)) if self.config.verify_nodes == "all" else played.path
        verified = [i for node in nodes if played.tree[node] >= 0 for i in candidates[node]]
        self.vocabulary.observe(
            make_tree(played.tree),
            torch.tensor(candidates, dtype=torch.int64).reshape(len(played.tree), k),
            make_verification(played.path, played.emitted, num_slots=5),
        )
        self._push(played.tree + verified)

    def check(self, active: set[int] | None = None) -> None:
        """The vocabulary drafts over exactly the active ids, with the head's own scores."""
        active = self.naive.active() if active is None else active
        hidden = hidden_rows(3, self.head.weight.dtype)
        self.vocabulary.prepare()
        scores, tokens = self.vocabulary.topk(hidden, 10)
        expected_scores, expected_tokens = expected_topk(self.head, hidden, active, 10)
        assert (scores.dtype, tokens.dtype) == (torch.float32, torch.int64)
        assert tokens.tolist() == expected_tokens
        torch.testing.assert_close(scores, expected_scores, atol=1e-5, rtol=1e-5)


def random_round(generator: random.Random, vocab_size: int) -> Round:
    """Chains of up to 6 nodes with padding nodes at the end; ids by a skewed law."""

    def draw(n: int) -> list[int]:
        return [int(vocab_size * generator.random() ** 2.5) for _ in range(n)]

    num_nodes = generator.randrange(1, 7)
    real = generator.randrange(1, num_nodes + 1)
    accepted = generator.randrange(min(real, 5))
    return Round(
        tree=draw(real) + [-1] * (num_nodes - real),
        candidates=[draw(3) for _ in range(num_nodes)],
        path=list(range(accepted + 1)),
        emitted=draw(accepted + 1),
    )


@st.composite
def texts(draw: st.DrawFn) -> tuple[Text, random.Random, int]:
    vocab_size = draw(st.integers(2, 60))
    ids = st.integers(0, vocab_size - 1)
    max_rows = draw(st.sampled_from([1, 2, 5, 16, 33, 3072]))
    floor = draw(st.integers(0, min(4, max_rows)))
    config = VocabularyConfig(
        max_rows=max_rows,
        prompt_candidates=draw(st.integers(0, 3)),
        verify_candidates=draw(st.integers(0, 3)),
        verify_nodes=draw(st.sampled_from(["all", "path"])),
        window=draw(st.sampled_from(["lru", "stream"])),
        token_ids=tuple(draw(st.lists(ids, min_size=floor, max_size=6))) or None,
        floor=floor,
        packed=draw(st.booleans()),
        prompt=draw(st.booleans()),
    )
    head = make_head(vocab_size, bias=draw(st.booleans()))
    text = Text(head, config, draw(st.lists(ids, max_size=3)))
    return text, random.Random(draw(st.integers(0, 10**6))), draw(st.integers(0, 12))


@given(texts())
@settings(max_examples=150, deadline=None)
def test_equals_the_ten_line_reference(drawn: tuple[Text, random.Random, int]) -> None:
    text, generator, num_rounds = drawn
    vocab_size = text.head.weight.shape[0]
    prompt = [generator.randrange(vocab_size) for _ in range(generator.randrange(1, 30))]
    with torch.no_grad():
        text.check(text.naive.pinned)  # before the prompt
        text.begin(prompt, [[generator.randrange(vocab_size) for _ in range(3)] for _ in prompt])
        text.check()
        for _ in range(num_rounds):
            text.round(random_round(generator, vocab_size))
            text.check()
    statistics = text.vocabulary.statistics()
    assert statistics.rounds == num_rounds
    assert statistics.mean_active == pytest.approx(sum(text.rounds) / max(1, num_rounds))
    assert statistics.coverage == pytest.approx(text.covered / text.emitted if text.emitted else 1.0)
    assert statistics.rows_gathered == (text.gathered if text.config.packed else 0)
    assert statistics.evicted == text.evicted


@pytest.mark.parametrize("window", ["lru", "stream"])
@pytest.mark.parametrize("verify_nodes", ["all", "path"])
def test_long_texts(window: str, verify_nodes: str) -> None:
    config = VocabularyConfig(max_rows=70, window=window, verify_nodes=verify_nodes)  # type: ignore[arg-type]
    text = Text(make_head(400), config, stop_ids=[399, 0])
    generator = random.Random(7)
    with torch.no_grad():
        text.begin([5, 6, 7], [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
        for number in range(250):
            text.round(random_round(generator, 400))
            if number % 25 == 0:
                text.check()
    assert text.vocabulary.statistics().rows_gathered < text.gathered  # the last round's are not copied yet
    text.vocabulary.prepare()
    statistics = text.vocabulary.statistics()
    assert statistics.evicted == text.evicted > 200
    assert statistics.rows_gathered == text.gathered
    assert 0 < statistics.coverage == text.covered / text.emitted < 1


@pytest.mark.parametrize("window", ["lru", "stream"])
def test_copies_only_rows_that_entered(window: str) -> None:
    """After every copy all rows are spoiled: the next copy repairs those of new ids and no others."""
    config = VocabularyConfig(max_rows=40, window=window)  # type: ignore[arg-type]
    text = Text(make_head(300, bias=True), config, stop_ids=[11])
    rows, generator = text.vocabulary.rows, random.Random(3)
    assert rows.bias is not None
    with torch.no_grad():
        text.begin(list(range(30)), [[60, 61, 62]] * 30)
        total = text.vocabulary.statistics().rows_gathered  # a prompt's rows are copied at once
        for _ in range(40):
            before = rows.token_of.tolist()
            text.round(random_round(generator, 300))
            changes = zip(before, rows.token_of.tolist(), strict=True)
            entered = [slot for slot, (old, new) in enumerate(changes) if new >= 0 and new != old]
            rows.weight.fill_(SENTINEL)
            rows.bias.fill_(SENTINEL)
            text.vocabulary.prepare()
            copied = (rows.weight != SENTINEL).any(dim=1).nonzero().flatten().tolist()
            assert copied == entered
            assert (rows.bias != SENTINEL).nonzero().flatten().tolist() == entered
            assert torch.equal(rows.weight[entered], text.head.weight[rows.token_of[entered].long()])
            total += len(entered)
    assert text.vocabulary.statistics().rows_gathered == total


def test_rows_never_gathered_cannot_poison() -> None:
    """Free slots of the packed buffer hold whatever memory held: here NaN and infinities."""
    text = Text(make_head(50, bias=True, softcap=5.0), VocabularyConfig(max_rows=20), stop_ids=[49])
    rows = text.vocabulary.rows
    assert rows.bias is not None
    with torch.no_grad():
        rows.weight.fill_(torch.nan)
        rows.weight[::2] = torch.inf
        rows.bias.fill_(torch.nan)
        text.begin([3, 4], [[5, 6, 7], [8, 9, 10]])
        text.check()


@pytest.mark.parametrize(
    "options",
    [{"bias": True}, {"scale": 0.0625}, {"softcap": 3.0}, {"bias": True, "scale": 2.0, "softcap": 4.0}],
)
def test_scores_are_those_of_the_true_head(options: dict[str, float]) -> None:
    text = Text(make_head(80, **options), VocabularyConfig(), stop_ids=[1])  # type: ignore[arg-type]
    with torch.no_grad():
        text.begin(list(range(0, 80, 3)), [[2, 4, 8]] * 27)
        text.check()
        bare = make_head(80)  # the same rows without the option: it does make a difference
        wrong, _ = expected_topk(bare, hidden_rows(3), text.naive.active(), 10)
        assert not torch.allclose(text.vocabulary.topk(hidden_rows(3), 10)[0], wrong, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    text = Text(make_head(80, bias=True, dtype=dtype), VocabularyConfig(), stop_ids=[1])
    with torch.no_grad():
        text.begin(list(range(5)), [[20, 30, 40]] * 5)
        scores, tokens = text.vocabulary.topk(hidden_rows(2, dtype), 10)
    assert scores.dtype == torch.float32
    assert {*tokens.flatten().tolist(), -1} == {*range(5), 20, 30, 40, 1, -1}


@pytest.mark.parametrize("kind", ["full", "static", "dynamic"])
def test_all_kinds_agree_when_everything_is_active(kind: str) -> None:
    head = make_head(30, bias=True, scale=0.5)
    config = VocabularyConfig(kind=kind, token_ids=tuple(reversed(range(30))))  # type: ignore[arg-type]
    vocabulary = make_vocabulary(config, head, stop_ids=[3], top_k=10)
    prompt = torch.arange(30)
    with torch.no_grad():
        k = vocabulary.prompt_candidates
        vocabulary.begin(prompt, torch.zeros(30, k, dtype=torch.int64) if k else None)
        vocabulary.prepare()
        scores, tokens = vocabulary.topk(hidden_rows(4), 10)
        full_scores, full_tokens = FullVocabulary(head, 10).topk(hidden_rows(4), 10)
    assert torch.equal(tokens, full_tokens)
    torch.testing.assert_close(scores, full_scores)


def test_hidden_rows_of_nan_draft_nothing() -> None:
    for kind in ("full", "static", "dynamic"):
        config = VocabularyConfig(kind=kind, token_ids=(1, 2, 3))  # type: ignore[arg-type]
        vocabulary = make_vocabulary(config, make_head(30), stop_ids=[3], top_k=5)
        vocabulary.begin(torch.tensor([4, 5]), torch.tensor([[1, 2, 3]] * 2) if kind == "dynamic" else None)
        vocabulary.prepare()
        with torch.no_grad():
            scores, tokens = vocabulary.topk(torch.full((2, 12), torch.nan), 5)
        assert (tokens == -1).all()
        assert (scores == -torch.inf).all()


def test_pinned_ids_may_exceed_max_rows() -> None:
    text = Text(make_head(20), VocabularyConfig(max_rows=1), stop_ids=[4, 9, 4, 2])
    with torch.no_grad():
        text.begin([1, 2, 3], [[5, 6, 7]] * 3)
        text.check({2, 4, 9})


def test_stop_ids_that_the_head_lacks_are_ignored() -> None:
    vocabulary = DynamicVocabulary(make_head(20), VocabularyConfig(), stop_ids=[-1, 20, 5, 5], top_k=4)
    with torch.no_grad():
        assert vocabulary.topk(hidden_rows(1), 4)[1].tolist() == [[5, -1, -1, -1]]


def test_a_floor_that_does_not_fit_is_refused() -> None:
    config = VocabularyConfig(token_ids=tuple(range(10)), floor=8, max_rows=4)
    with pytest.raises(ValueError, match=r"floor=8 .* max_rows=4"):
        make_vocabulary(config, make_head(20), stop_ids=[], top_k=4)


def test_more_candidates_than_ids_exist() -> None:
    """K_pre and K_ver are clipped to the vocabulary, or the target could not name so many."""
    config = VocabularyConfig(prompt_candidates=50, verify_candidates=50)
    vocabulary = DynamicVocabulary(make_head(4), config, stop_ids=[], top_k=10, verify_candidates=50)
    assert (vocabulary.prompt_candidates, vocabulary.verify_candidates) == (4, 4)


def test_one_text_leaves_no_trace_in_the_next() -> None:
    """A then B equals B alone: ids, scores and counters."""
    head, config = make_head(100), VocabularyConfig(max_rows=30)

    def play(seed: int) -> tuple[list[int], object]:
        text = Text(head, config, stop_ids=[0])
        generator = random.Random(seed)
        with torch.no_grad():
            text.begin([generator.randrange(100) for _ in range(9)], [[1, 2, 3]] * 9)
            for _ in range(5):
                text.round(random_round(generator, 100))
        return text.vocabulary.token_of.tolist(), text.vocabulary.statistics()

    alone = play(2)
    play(1)
    assert play(2) == alone


def test_observing_twice_without_drafting_loses_no_row() -> None:
    text = Text(make_head(100), VocabularyConfig(max_rows=30), stop_ids=[0])
    generator = random.Random(5)
    with torch.no_grad():
        text.begin([1, 2], [[3, 4, 5]] * 2)
        for _ in range(4):
            text.round(random_round(generator, 100))
        text.check()
