"""Reading, writing and counting lists of token ids."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from microspec_hf.vocabulary import (
    calibrate_token_ids,
    count_token_ids,
    emitted_by,
    load_token_ids,
    save_token_ids,
)


@pytest.mark.parametrize("name", ["freq_4.pt", "freq_4.json", "new/folder/list.json"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    save_token_ids(tmp_path / name, [7, 3, 128255, 0])
    assert load_token_ids(tmp_path / name) == (7, 3, 128255, 0)


def test_released_layout_and_duplicates(tmp_path: Path) -> None:
    """FR-Spec's files are Python lists written by torch.save; one released list repeats its stop ids."""
    torch.save([5, 6, 5, 7, 6], tmp_path / "freq_5.pt")
    assert load_token_ids(str(tmp_path / "freq_5.pt")) == (5, 6, 7)


def test_a_tensor_is_a_list_too(tmp_path: Path) -> None:
    torch.save(torch.tensor([2, 1]), tmp_path / "ids.pt")
    assert load_token_ids(tmp_path / "ids.pt") == (2, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"ids": [1]}, "non-empty list of token ids, got a dict"),
        ([], "got an empty list"),
        ([1, 2.0], "got 2.0 at place 1"),
        ([1, -2], "got -2 at place 1"),
        ([True], "got True at place 0"),
        (["the"], "got 'the' at place 0"),
        (None, "got a NoneType"),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_faulty_lists_are_refused(tmp_path: Path, content: object, message: str, suffix: str) -> None:
    path = tmp_path / f"list{suffix}"
    if suffix == ".pt":
        torch.save(content, path)
    else:
        path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        load_token_ids(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.json", b"[1, 2"), ("a.json", b"\xff\xfe"), ("a.pt", b""), ("a.pt", b"not a list")],
)
def test_broken_files_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"is not valid JSON|could not be read"):
        load_token_ids(tmp_path / name)


def test_matrices_are_refused(tmp_path: Path) -> None:
    torch.save(torch.zeros(2, 2, dtype=torch.int64), tmp_path / "a.pt")
    with pytest.raises(ValueError, match="got a Tensor"):
        load_token_ids(tmp_path / "a.pt")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no token id list at .*a\.pt"):
        load_token_ids(tmp_path / "a.pt")
    with pytest.raises(FileNotFoundError):
        load_token_ids(tmp_path)


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("writer", [torch.save, partial(pickle.dump, protocol=2)], ids=["torch", "pickle"])
def test_hostile_pickles_are_refused_and_not_run(tmp_path: Path, writer: Any) -> None:
    with (tmp_path / "freq.pt").open("wb") as file:
        writer([Hostile(tmp_path / "harm")], file)
    with pytest.raises(ValueError, match="without running code"):
        load_token_ids(tmp_path / "freq.pt")
    assert not (tmp_path / "harm").exists()


def test_other_suffixes_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"as \.json or \.pt, got .*list\.txt"):
        save_token_ids(tmp_path / "list.txt", [1])


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=60),
    st.floats(0, 1, exclude_min=True),
    st.integers(1, 6),
)
def test_as_few_ids_as_make_up_a_share_and_none_that_is_rare(ids: list[int], coverage: float, min_count: int) -> None:
    every = count_token_ids([ids], vocab_size=21)
    if ids.count(every[0]) < min_count:
        with pytest.raises(ValueError, match=f"occurs {min_count} times"):
            count_token_ids([ids], vocab_size=21, coverage=coverage, min_count=min_count)
        return
    kept = count_token_ids([ids], vocab_size=21, coverage=coverage, min_count=min_count)
    assert kept == every[: len(kept)]
    assert all(ids.count(token) >= min_count for token in kept)
    covered = sum(ids.count(token) for token in kept)
    if len(kept) < sum(ids.count(token) >= min_count for token in every):  # the share ended the list
        assert covered >= coverage * len(ids)
    assert covered - ids.count(kept[-1]) < coverage * len(ids)  # without the last one it would not do


@pytest.mark.parametrize("coverage", [0.0, -0.5, 1.01])
def test_a_share_that_is_none_is_refused(coverage: float) -> None:
    with pytest.raises(ValueError, match="coverage must be a share"):
        count_token_ids([[1]], vocab_size=2, coverage=coverage)


@given(st.lists(st.lists(st.integers(0, 20), max_size=30), max_size=8), st.integers(1, 25) | st.none())
def test_count_is_by_frequency_then_id(sequences: list[list[int]], size: int | None) -> None:
    counts = Counter(i for ids in sequences for i in ids)
    if not counts:
        with pytest.raises(ValueError, match="no token ids"):
            count_token_ids(sequences, vocab_size=21, size=size)
        return
    expected = sorted(counts, key=lambda i: (-counts[i], i))
    assert count_token_ids(iter(sequences), vocab_size=21, size=size) == tuple(expected[:size])


def test_count_takes_tensors_of_any_shape() -> None:
    assert count_token_ids([torch.tensor([[1, 2], [2, 3]]), [3, 3]], vocab_size=4) == (3, 2, 1)


@pytest.mark.parametrize("strange", [-1, 4])
def test_ids_of_another_tokenizer_are_refused(strange: int) -> None:
    with pytest.raises(ValueError, match=rf"token id {strange}, but ids must be from 0 to 3"):
        count_token_ids([[0, 1], [2, strange]], vocab_size=4)


def test_what_a_target_emits(tiny_llama: PreTrainedModel) -> None:
    """VocabTrim: the new ids are counted, and the prompts' are not."""
    prompts = [torch.tensor([3, 1, 4]), torch.tensor([1, 5, 9, 2, 6])]
    new_ids = []
    for prompt in prompts:
        text = tiny_llama.generate(prompt[None], max_new_tokens=12, do_sample=False)[0]
        new_ids += text[len(prompt) :].tolist()
    counts = Counter(new_ids)
    expected = sorted(counts, key=lambda i: (-counts[i], i))[:5]
    emit = emitted_by(tiny_llama, max_new_tokens=12, do_sample=False)
    assert calibrate_token_ids(emit, prompts, vocab_size=101, size=5) == tuple(expected)


def test_what_a_drafter_emits() -> None:
    """Any function from a prompt to id sequences will do: here one that gives the tokens of drafted trees."""

    def trees(prompt: torch.Tensor) -> Iterator[list[int]]:
        yield [7, 8]
        yield [int(prompt[0]), 8]

    assert calibrate_token_ids(trees, [torch.tensor([1]), torch.tensor([2])], vocab_size=10) == (8, 7, 1, 2)
