"""Captured rounds give what rounds give as they are; the capture's meaning is emulated on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from microspec_hf import generation, ops
from microspec_hf.engine import CapturedRounds, Rounds, can_capture, round_up
from tests.capture import capture
from tests.doubles import controlled_pair, plain, random_head, random_prompt, speculate
from tests.tiny import TINY_MODELS, tiny_llama

VOCABULARIES: dict[str, Any] = {
    "full": "full",
    "static": {"kind": "static", "token_ids": tuple(range(0, 97, 2))},
    "dynamic": {"kind": "dynamic", "max_rows": 40},
    "stream": {"kind": "dynamic", "max_rows": 40, "window": "stream", "verify_nodes": "path"},
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CapturedRounds]:
    """Every call of `generate` captures; its rounds, as they are made. The ops behave as on a GPU."""
    made: list[CapturedRounds] = []

    def choose(*arguments: Any) -> CapturedRounds:
        made.append(CapturedRounds(capture, step=16))
        return made[-1]

    monkeypatch.setattr(generation, "choose_rounds", choose)
    monkeypatch.setattr(ops, "used_slots", lambda token_of: token_of.shape[0])
    return made


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_captured_rounds_change_no_text(name: str, vocabulary: Any, made: list[CapturedRounds]) -> None:
    model = TINY_MODELS[name](attn_implementation="eager")
    prompt = random_prompt(model, 5)
    got = speculate(
        model, prompt, max_new_tokens=40, microspec={"vocabulary": vocabulary, "tree": {"depth": 2, "num_nodes": 12}}
    )
    assert got.tolist() == plain(model, prompt, max_new_tokens=40).tolist()
    assert made[0].num_replays > 10


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_captured_rounds_draft_as_well(vocabulary: Any, made: list[CapturedRounds]) -> None:
    """The same trees, not only the same text: everything that a drafter learns is learned in replays too."""
    model, head = controlled_pair(scale=0.05)
    prompt = random_prompt(model, 9)
    ask: dict[str, Any] = {
        "drafter": head,
        "max_new_tokens": 60,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_hidden_states": True,
        "microspec": {"vocabulary": vocabulary, "fallback": False},
    }
    captured = speculate(model, prompt, **ask)
    assert made[0].num_replays > 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "choose_rounds", lambda *arguments: Rounds())
        eager = speculate(model, prompt, **ask)
    assert captured.sequences.tolist() == eager.sequences.tolist()
    ours, theirs = captured.stats[0], eager.stats[0]
    assert ours.emitted == theirs.emitted
    assert (ours.coverage, ours.mean_active_vocabulary) == (theirs.coverage, theirs.mean_active_vocabulary)
    assert (ours.rows_gathered, ours.evicted) == (theirs.rows_gathered, theirs.evicted)
    for field in ("scores", "hidden_states"):
        for a, b in zip(captured[field], eager[field], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("made")
def test_captured_batch() -> None:
    model, head = controlled_pair(scale=0.05)
    ids = torch.cat([random_prompt(model, 9, seed) for seed in (1, 2, 3)])
    arguments: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": [7, 55], "pad_token_id": 0}
    got = speculate(model, ids, drafter=head, **arguments)
    assert got.tolist() == plain(model, ids, **arguments).tolist()


def test_history_free_sampling_is_captured(made: list[CapturedRounds]) -> None:
    model = tiny_llama()
    arguments: dict[str, Any] = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.01, "top_k": 1}
    prompt = random_prompt(model)
    assert speculate(model, prompt, **arguments).tolist() == plain(model, prompt, **arguments).tolist()
    assert made[0].num_replays > 0


def test_captures_are_bounded_by_the_length(made: list[CapturedRounds]) -> None:
    model = tiny_llama()
    speculate(model, random_prompt(model, 5), max_new_tokens=70, microspec={"fallback": False})
    assert len(made[0]._captured) <= 1 + 75 // 16 + 1


def test_where_rounds_are_captured() -> None:
    cpu, cuda, other = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    assert can_capture({cuda})
    assert not can_capture({cpu})
    assert not can_capture({cuda, cpu})
    assert not can_capture({cuda, other})
    assert not can_capture({torch.device("meta")})


def test_option_without_a_gpu_changes_nothing() -> None:
    model = tiny_llama()
    prompt = random_prompt(model)
    got = speculate(model, prompt, max_new_tokens=9, drafter=random_head(model), microspec={"cuda_graphs": True})
    assert got.tolist() == plain(model, prompt, max_new_tokens=9).tolist()


def test_round_up() -> None:
    assert [round_up(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert round_up(7, 1) == 7


def test_emulated_capture_does_nothing_until_it_is_replayed() -> None:
    counter, total = torch.zeros(1), torch.zeros(1)

    def function() -> torch.Tensor:
        counter.add_(1)
        total.copy_(total + counter)
        return total * 2

    doubled, replay = capture(function)
    assert (float(counter), float(total)) == (0, 0)
    for expected in (1, 3, 6):
        replay()
        assert (float(total), float(doubled)) == (expected, 2 * expected)


def test_emulated_capture_refuses_host_reads() -> None:
    with pytest.raises(AssertionError, match="_local_scalar_dense waits for the device"):
        capture(lambda: int(torch.ones(1)))
