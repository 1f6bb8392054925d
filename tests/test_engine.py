"""Captured rounds give what rounds give as they are; the capture's meaning is emulated on the CPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import microspec_hf
from microspec_hf import ops, sessions, verification
from microspec_hf.engine import CapturedRounds, can_capture
from tests.capture import capture
from tests.doubles import controlled_pair, plain, random_head, random_prompt, speculate
from tests.tiny import TINY_MODELS, tiny_llama

VOCABULARIES: dict[str, Any] = {
    "full": "full",
    "static": {"kind": "static", "token_ids": tuple(range(0, 97, 2))},
    "dynamic": {"kind": "dynamic", "max_rows": 40},
    "stream": {"kind": "dynamic", "max_rows": 40, "window": "stream", "verify_nodes": "path"},
}
GRAPHS: dict[str, Any] = {"engine": "graphs", "tree": {"depth": 2, "num_nodes": 12}}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CapturedRounds]:
    """Rounds can be captured here, and are listed as they are made. The ops behave as on a GPU."""
    made: list[CapturedRounds] = []

    def make(**options: Any) -> CapturedRounds:
        made.append(CapturedRounds(capture, **options))
        return made[-1]

    monkeypatch.setattr(sessions, "CapturedRounds", make)
    monkeypatch.setattr(sessions, "can_capture", lambda devices: True)
    monkeypatch.setattr(ops, "used_slots", lambda token_of: token_of.shape[0])
    return made


def both(model: PreTrainedModel, prompt: torch.Tensor, **arguments: Any) -> tuple[Any, Any]:
    """Captured and eager."""
    options = {"return_dict_in_generate": True, **arguments}
    asked = options.pop("microspec", GRAPHS)
    captured = speculate(model, prompt, microspec=asked, **options)
    return captured, speculate(model, prompt, microspec={**asked, "engine": "eager", "fallback": False}, **options)


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_text_is_that_of_the_target(name: str, vocabulary: Any, made: list[CapturedRounds]) -> None:
    model = TINY_MODELS[name](attn_implementation="eager")
    prompt = random_prompt(model, 5)
    got = speculate(model, prompt, max_new_tokens=40, microspec={**GRAPHS, "vocabulary": vocabulary})
    assert got.tolist() == plain(model, prompt, max_new_tokens=40).tolist()
    assert made[0].num_replays > 10


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_rounds_draft_as_well(vocabulary: Any, made: list[CapturedRounds]) -> None:
    """The same trees, not only the same text: everything that a drafter learns is learned in replays too."""
    model, head = controlled_pair(scale=0.05)
    ask: dict[str, Any] = {"drafter": head, "max_new_tokens": 60, "output_scores": True}
    captured, eager = both(
        model, random_prompt(model, 9), **ask, microspec={"engine": "graphs", "vocabulary": vocabulary}
    )
    assert made[0].num_replays > 3
    assert captured.sequences.tolist() == eager.sequences.tolist()
    ours, theirs = captured.stats[0], eager.stats[0]
    assert (ours.is_captured, theirs.is_captured) == (True, False)
    assert ours.emitted == theirs.emitted
    assert (ours.coverage, ours.mean_active_vocabulary) == (theirs.coverage, theirs.mean_active_vocabulary)
    assert (ours.rows_gathered, ours.evicted) == (theirs.rows_gathered, theirs.evicted)
    for a, b in zip(captured.scores, eager.scores, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "full"])
def test_later_calls_replay_from_the_start(kind: str, made: list[CapturedRounds]) -> None:
    """Lengths 10, 100 and 3 in turn, one capture: nothing of a text is left for the next one."""
    model, head = controlled_pair(scale=0.05)
    options = {"engine": "graphs", "vocabulary": kind}
    for seed, length in enumerate((10, 100, 3)):
        captured, eager = both(
            model, random_prompt(model, length, seed), drafter=head, max_new_tokens=30, microspec=options
        )
        assert captured.sequences.tolist() == eager.sequences.tolist()
        assert captured.stats[0].emitted == eager.stats[0].emitted
        assert captured.stats[0].rows_gathered == eager.stats[0].rows_gathered
    assert len(made) == len(made[0]._captured) == 1


def test_plain_decoding_on_the_engine(made: list[CapturedRounds]) -> None:
    model = tiny_llama()
    prompt = random_prompt(model)
    got = plain(
        model, prompt, max_new_tokens=20, custom_generate="microspec", microspec=GRAPHS, return_dict_in_generate=True
    )
    assert got.sequences.tolist() == plain(model, prompt, max_new_tokens=20).tolist()
    assert (got.stats[0].plain_steps, got.stats[0].rounds) == (19, 0)
    assert made[0].num_replays > 15


def test_timed_rounds_wait_for_each_other(made: list[CapturedRounds]) -> None:
    """A round that begins before the last one is read would move the marks that its time is read from."""
    model, head = controlled_pair(scale=0.05)
    ask: dict[str, Any] = {"drafter": head, "max_new_tokens": 40}
    options = {"engine": "graphs", "vocabulary": "dynamic"}
    for _ in range(2):
        captured, eager = both(model, random_prompt(model, 9), **ask, microspec={**options, "time_drafts": True})
        assert captured.sequences.tolist() == eager.sequences.tolist()
        assert captured.stats[0].emitted == eager.stats[0].emitted
        assert captured.stats[0].is_captured
        assert captured.stats[0].draft_seconds > 0
    (rounds,) = made
    assert not rounds.run_ahead
    untimed, _ = both(model, random_prompt(model, 9), **ask, microspec=options)
    assert untimed.stats[0].draft_seconds == 0.0
    assert made[1].run_ahead  # rounds of their own


def test_batch_runs_eagerly(made: list[CapturedRounds]) -> None:
    model, head = controlled_pair(scale=0.05)
    ids = torch.cat([random_prompt(model, 9, seed) for seed in (1, 2, 3)])
    arguments: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": [7, 55], "pad_token_id": 0}
    got = speculate(model, ids, drafter=head, microspec={"engine": "graphs"}, **arguments)
    assert got.tolist() == plain(model, ids, **arguments).tolist()
    assert not made


def test_end_of_text_drops_the_round_that_was_begun(made: list[CapturedRounds]) -> None:
    model = tiny_llama()
    prompt = random_prompt(model)
    text = plain(model, prompt, max_new_tokens=30)[0, prompt.shape[1] :].tolist()
    for end in (3, 11):
        arguments: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": text[end]}
        got = speculate(model, prompt, microspec=GRAPHS, return_dict_in_generate=True, **arguments)
        wanted = plain(model, prompt, return_dict_in_generate=True, **arguments)
        assert got.sequences.tolist() == wanted.sequences.tolist()


@pytest.mark.parametrize("kind", ["dynamic", "full"])
def test_dropped_round_is_not_counted(kind: str, made: list[CapturedRounds]) -> None:
    model, head = controlled_pair(scale=0.05)
    prompt = random_prompt(model, 9)
    text = plain(model, prompt, max_new_tokens=40)[0, 9:].tolist()
    captured, eager = both(
        model,
        prompt,
        drafter=head,
        max_new_tokens=200,
        eos_token_id=text[-1],
        microspec={"engine": "graphs", "vocabulary": kind},
    )
    ours, theirs = captured.stats[0], eager.stats[0]
    assert ours.emitted == theirs.emitted
    assert (ours.coverage, ours.mean_active_vocabulary) == (theirs.coverage, theirs.mean_active_vocabulary)
    assert ours.evicted == theirs.evicted


def test_a_rule_is_read_once_a_call(made: list[CapturedRounds], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors lie on the device: reading them in every round would make each round wait."""
    read: list[Any] = []
    fingerprint = verification._fingerprint
    monkeypatch.setattr(verification, "_fingerprint", lambda processor: (read.append(1), fingerprint(processor))[1])
    model = tiny_llama()
    speculate(model, random_prompt(model), max_new_tokens=30, suppress_tokens=[3, 5], microspec=GRAPHS)
    assert made[0].num_replays > 3
    assert len(read) == 1


def test_drafters_are_kept_in_bounds(made: list[CapturedRounds], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    model = tiny_llama()
    prompt, heads = random_prompt(model), [random_head(model, seed) for seed in range(4)]
    wanted = plain(model, prompt, max_new_tokens=9).tolist()
    for head in heads:
        assert speculate(model, prompt, drafter=head, max_new_tokens=9, microspec=GRAPHS).tolist() == wanted
    kept = sessions._engines[model]
    assert len(kept._heads) == len(kept._sessions) == 2
    first = [weight.untyped_storage().data_ptr() for weight in heads[0].parameters()]
    assert len(set(first)) == len(first)  # its layers have memory of their own again


def test_history_free_sampling_is_captured(made: list[CapturedRounds]) -> None:
    model = tiny_llama()
    arguments: dict[str, Any] = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.01, "top_k": 1}
    prompt = random_prompt(model)
    got = speculate(model, prompt, microspec=GRAPHS, **arguments)
    assert got.tolist() == plain(model, prompt, **arguments).tolist()
    assert made[0].num_replays > 0


def test_rules_are_not_mixed(made: list[CapturedRounds]) -> None:
    """Other options of sampling are other rounds; a rule that looks at the text is no captured one."""
    model = tiny_llama()
    prompt, head = random_prompt(model), random_head(model)
    for arguments in (
        {"do_sample": True, "top_k": 1},
        {"do_sample": False, "suppress_tokens": [3, 5]},
        {"do_sample": False, "suppress_tokens": list(range(60))},
        {"do_sample": False, "repetition_penalty": 1.7},
        {},
    ):
        got = speculate(model, prompt, drafter=head, max_new_tokens=20, microspec=GRAPHS, **arguments)
        assert got.tolist() == plain(model, prompt, max_new_tokens=20, **arguments).tolist(), arguments
    assert len(made[0]._captured) == 4


def test_changed_weights_are_captured_anew(made: list[CapturedRounds]) -> None:
    model = tiny_llama()
    prompt, head = random_prompt(model), random_head(model)
    for change in (None, "target", "drafter"):
        with torch.no_grad():
            if change == "target":
                model.model.layers[0].mlp.down_proj.weight.mul_(-3)
            if change == "drafter":
                head.fc.weight.mul_(-3)
        captured, eager = both(model, prompt, drafter=head, max_new_tokens=20)
        assert captured.sequences.tolist() == plain(model, prompt, max_new_tokens=20).tolist()
        assert captured.stats[0].emitted == eager.stats[0].emitted
    assert len(made) == 3


def test_release_undoes_everything(made: list[CapturedRounds], tmp_path: Any) -> None:
    model = tiny_llama()
    prompt = random_prompt(model)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    text = speculate(model, prompt, max_new_tokens=9, microspec=GRAPHS)
    microspec_hf.release(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    places = [weight.untyped_storage().data_ptr() for weight in model.parameters()]
    assert len(set(places)) == len(places)
    assert speculate(model, prompt, max_new_tokens=9, microspec=GRAPHS).tolist() == text.tolist()
    assert len(made) == 2
    microspec_hf.release(model)
    microspec_hf.release(model)


def test_a_model_with_an_engine_is_saved_whole(made: list[CapturedRounds], tmp_path: Any) -> None:
    model = tiny_llama()
    speculate(model, random_prompt(model), max_new_tokens=9, microspec=GRAPHS)
    assert made
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in model.state_dict().items())


def test_engine_dies_with_its_model(made: list[CapturedRounds]) -> None:
    model = tiny_llama()
    speculate(model, random_prompt(model), max_new_tokens=9, microspec=GRAPHS)
    kept = weakref.ref(sessions._engines[model])
    del model
    gc.collect()
    assert kept() is None


def test_a_busy_engine_leaves_the_call_to_eager_rounds(made: list[CapturedRounds]) -> None:
    model = tiny_llama()
    prompt = random_prompt(model)
    text = speculate(model, prompt, max_new_tokens=9, microspec=GRAPHS)
    with sessions._engines[model].lock:
        got = speculate(model, prompt, max_new_tokens=9, microspec=GRAPHS, return_dict_in_generate=True)
    assert got.sequences.tolist() == text.tolist()
    assert not got.stats[0].is_captured


def test_what_cannot_be_captured_runs_eagerly(
    made: list[CapturedRounds], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(decide: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(sessions, "CapturedRounds", lambda **options: CapturedRounds(refuse, **options))
    model = tiny_llama()
    prompt = random_prompt(model)
    for _ in range(2):
        got = speculate(model, prompt, max_new_tokens=20, microspec=GRAPHS)
        assert got.tolist() == plain(model, prompt, max_new_tokens=20).tolist()
    assert "operation not permitted when stream is capturing" in caplog.text


def test_target_whose_modules_have_hooks_runs_eagerly(
    made: list[CapturedRounds], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama()
    model.model.layers[1].register_forward_hook(lambda *arguments: None)
    prompt = random_prompt(model)
    for _ in range(2):
        got = speculate(model, prompt, max_new_tokens=12, microspec=GRAPHS, return_dict_in_generate=True)
        assert got.sequences.tolist() == plain(model, prompt, max_new_tokens=12).tolist()
        assert not got.stats[0].is_captured
    assert caplog.text.count("LlamaDecoderLayer has forward hooks") == 1


def test_where_rounds_are_captured() -> None:
    cpu, cuda, other = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
    assert can_capture({cuda})
    assert not can_capture({cpu})
    assert not can_capture({cuda, cpu})
    assert not can_capture({cuda, other})
    assert not can_capture({torch.device("meta")})


@pytest.mark.parametrize("engine", ["auto", "graphs", "compiled", "eager"])
def test_option_without_a_gpu_changes_nothing(engine: str) -> None:
    model = tiny_llama()
    prompt = random_prompt(model)
    got = speculate(model, prompt, max_new_tokens=9, drafter=random_head(model), microspec={"engine": engine})
    assert got.tolist() == plain(model, prompt, max_new_tokens=9).tolist()


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


def test_more_kinds_of_calls_are_kept_where_asked_for_and_never_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    for asked, kept in ((5, 5), (1, 5), (6, 6)):
        sessions.keep(asked)
        assert kept == sessions.MAX_SESSIONS
