"""`window_update` against the law in plain Python, over long runs and at every edge."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from microspec_hf import ops
from tests.ops.naive import NaiveWindow


class Window:
    """The tensors of one window, and the naive model that they are compared with after every push."""

    def __init__(self, vocab_size: int, pinned: dict[int, int], num_slots: int, room: int, stream: bool):
        """`pinned` gives the id that is pinned in a slot."""
        self.stream = stream
        token_of = [pinned.get(slot, -1) for slot in range(num_slots)]
        self.token_of = torch.tensor(token_of, dtype=torch.int32)
        self.slot_of = torch.full((vocab_size,), -1, dtype=torch.int32)
        for slot, token in pinned.items():
            self.slot_of[token] = slot
        self.pinned = self.token_of >= 0
        self.usage = torch.zeros(num_slots, dtype=torch.int32)
        self.ring = torch.full((room if stream else 0,), -1, dtype=torch.int32)
        self.clock = torch.zeros(1, dtype=torch.int64)
        self.naive = NaiveWindow(token_of, vocab_size, room, stream)

    def push(self, candidates: list[int]) -> tuple[list[int], list[int]]:
        """Push and compare everything; the ids that entered and the counts."""
        entered, taken, num_evicted = self.naive.push(candidates)
        rows, slots, counts = ops.window_update(
            self.slot_of,
            self.token_of,
            self.usage,
            self.ring,
            self.clock,
            torch.tensor(candidates, dtype=torch.int64),
            self.pinned,
            self.stream,
        )
        padding = [-1] * (len(candidates) - len(entered))
        assert rows.tolist() == entered + padding
        assert slots.tolist() == taken + padding
        assert counts.tolist() == [len(entered), num_evicted]
        assert (rows.dtype, slots.dtype, counts.dtype) == (torch.int64, torch.int64, torch.int32)

        assert self.token_of.tolist() == self.naive.token_of
        slot_of = {token: slot for slot, token in enumerate(self.naive.token_of) if token >= 0}
        assert self.slot_of.tolist() == [slot_of.get(token, -1) for token in range(len(self.slot_of))]
        assert set(slot_of) == self.naive.active()
        assert self.usage.tolist() == self.naive.usage()
        assert self.clock.tolist() == [len(self.naive.stream)]
        if self.stream:
            assert self.ring.tolist() == self.naive.ring()
        return entered, counts.tolist()


@dataclass
class Scenario:
    vocab_size: int
    pinned: dict[int, int]
    num_slots: int
    stream: bool
    pushes: list[list[int]]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small windows, so that ids leave all the time; padding and unknown ids among the candidates."""
    vocab_size = draw(st.integers(1, 14))
    num_slots = draw(st.integers(1, vocab_size))
    pinned_slots = draw(st.sets(st.integers(0, num_slots - 1)))
    pinned_ids = draw(st.permutations(range(vocab_size)))
    candidate = st.integers(-2, vocab_size + 1)
    return Scenario(
        vocab_size=vocab_size,
        pinned=dict(zip(sorted(pinned_slots), pinned_ids, strict=False)),
        num_slots=num_slots,
        stream=draw(st.booleans()),
        pushes=draw(st.lists(st.lists(candidate, max_size=2 * vocab_size), max_size=12)),
    )


@given(scenarios())
@settings(max_examples=300, deadline=None)
def test_equals_the_law_after_every_push(scenario: Scenario) -> None:
    room = scenario.num_slots - len(scenario.pinned)
    window = Window(scenario.vocab_size, scenario.pinned, scenario.num_slots, room, scenario.stream)
    for candidates in scenario.pushes:
        window.push(candidates)


@pytest.mark.parametrize("stream", [False, True], ids=["lru", "stream"])
@pytest.mark.parametrize("num_slots", [1, 7, 33, 100], ids=lambda n: f"{n}slots")
def test_long_runs_wrap_the_ring_many_times(stream: bool, num_slots: int) -> None:
    generator = random.Random(num_slots)
    pinned = {0: 0, num_slots - 1: 199} if num_slots > 2 else {}
    room = num_slots - len(pinned)
    window = Window(200, pinned, num_slots, room, stream)
    entered = evicted = 0
    for _ in range(150):
        # Ids by a skewed law, so that some stay for long while others come and go.
        size = generator.randrange(40)
        counts = window.push([int(200 * generator.random() ** 3) for _ in range(size)])[1]
        entered, evicted = entered + counts[0], evicted + counts[1]
    assert len(window.naive.stream) > 20 * room, "the run is too short to wrap the ring many times"
    assert entered > evicted > num_slots


@pytest.mark.parametrize("stream", [False, True], ids=["lru", "stream"])
class TestEdges:
    def test_first_and_last_id(self, stream: bool) -> None:
        window = Window(9, {}, 3, 3, stream)
        assert window.push([8, 0])[0] == [8, 0]

    def test_order_is_that_of_last_occurrences_and_slots_ascend(self, stream: bool) -> None:
        window = Window(9, {1: 8}, 4, 3, stream)
        assert window.push([5, 3, 5])[0] == [3, 5]
        assert window.token_of.tolist() == [3, 8, 5, -1]

    def test_all_candidates_the_same(self, stream: bool) -> None:
        window = Window(9, {}, 3, 3, stream)
        assert window.push([4] * 20) == ([4], [1, 0])
        assert window.push([4] * 20) == ([], [0, 0])

    def test_more_new_ids_than_room(self, stream: bool) -> None:
        window = Window(9, {0: 0}, 3, 2, stream)
        assert window.push([1, 2, 3, 4, 5]) == ([4, 5], [2, 0])
        assert window.push([6, 7, 8]) == ([7, 8], [2, 2])

    def test_no_room_beside_the_pinned_ids(self, stream: bool) -> None:
        window = Window(9, {0: 3, 1: 4}, 2, 0, stream)
        assert window.push([3, 5, 8, 4, 5]) == ([], [0, 0])

    def test_pinned_ids_stay_without_being_seen(self, stream: bool) -> None:
        window = Window(9, {2: 8}, 3, 2, stream)
        for i in range(8):
            window.push([i])
        assert int(window.token_of[2]) == 8

    def test_an_id_that_leaves_and_returns_within_a_call_is_not_copied(self, stream: bool) -> None:
        window = Window(9, {}, 2, 2, stream)
        window.push([1, 2])
        assert window.push([3, 4, 5, 1]) == ([5], [1, 1])  # 1 kept its slot
        assert window.token_of.tolist() == [1, 5]

    @pytest.mark.parametrize("nothing", [[], [-1, -1], [9, 100, -7]], ids=["empty", "padding", "no such ids"])
    def test_no_entries(self, stream: bool, nothing: list[int]) -> None:
        window = Window(9, {}, 3, 3, stream)
        window.push([1, 2])
        assert window.push(nothing) == ([], [0, 0])
        assert int(window.clock) == 2


def test_windows_differ_on_repetitions() -> None:
    """Three entries of one id push two others out of the stream window and out of no lru window."""
    entered = []
    for stream in (False, True):
        window = Window(9, {}, 3, 3, stream)
        window.push([1, 2, 3])
        window.push([3, 3, 3])
        entered.append(window.naive.active())
    assert entered == [{1, 2, 3}, {3}]


def test_ring_longer_than_the_vocabulary() -> None:
    """With a slot for every id the ring may be as long as W_max asks."""
    window = Window(5, {0: 4}, 5, 50, stream=True)
    generator = random.Random(0)
    for _ in range(60):
        window.push([int(5 * generator.random() ** 6) for _ in range(9)])
    assert len(window.naive.stream) == 540


def test_shapes_are_checked() -> None:
    window = Window(9, {}, 3, 3, stream=False)
    with pytest.raises(ValueError, match=r"one length.*\(3,\).*\(2,\)"):
        ops.window_update(
            window.slot_of,
            window.token_of,
            window.usage[:2],
            window.ring,
            window.clock,
            torch.tensor([1]),
            window.pinned,
            False,
        )
