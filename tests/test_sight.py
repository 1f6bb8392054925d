"""What rows see, against a list made by hand from parents."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from microspec_hf.hf import WORD, Sight, bit_words, chain_words


@st.composite
def parents(draw: st.DrawFn) -> list[int]:
    count = draw(st.integers(1, 70))
    return [-1] + [draw(st.integers(-1, node - 1)) for node in range(1, count)]


@given(parents(), st.integers(0, 9), st.integers(0, 4), st.integers(0, 3))
def test_positions(parents: list[int], length: int, first: int, spare: int) -> None:
    count = len(parents)
    own = bit_words(count, torch.device("cpu"))
    words, depths = [], []
    for node, parent in enumerate(parents):
        words.append(own[node] if parent < 0 else own[node] | words[parent])
        depths.append(0 if parent < 0 else depths[parent] + 1)
    sight = Sight(torch.tensor([length]), torch.stack(words)[None], torch.tensor([depths]), torch.tensor([first]))
    got = sight.positions(length + count + spare)[0].tolist()
    for node in range(count):
        expected = [column if column >= first else -1 for column in range(length)] + [-1] * (count + spare)
        other = node
        while other >= 0:
            expected[length + other] = length + depths[other]
            other = parents[other]
        assert got[node] == expected


def test_texts_of_a_batch_have_their_own_lengths() -> None:
    words = chain_words(2, torch.device("cpu")).repeat(2, 1, 1)
    words[1, 1] = 0  # padding
    depths = torch.tensor([[0, 1], [0, 0]])
    got = Sight(torch.tensor([3, 1]), words, depths, torch.tensor([1, 0])).positions(5)
    assert got[0].tolist() == [[-1, 1, 2, 3, -1], [-1, 1, 2, 3, 4]]
    assert got[1].tolist() == [[0, 1, -1, -1, -1], [0, -1, -1, -1, -1]]


def test_words() -> None:
    assert bit_words(3, torch.device("cpu")).tolist() == [[1], [2], [4]]
    assert bit_words(0, torch.device("cpu")).shape == (0, 0)
    last = bit_words(WORD + 1, torch.device("cpu"))
    assert last[WORD - 1].tolist() == [-(2**63), 0]
    assert last[WORD].tolist() == [0, 1]
    assert chain_words(WORD, torch.device("cpu"))[-1].tolist() == [-1]
