"""The run over prompts and arms: what it writes, and that no answer is lost or given twice."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from microspec_hf import EagleHead, TreeConfig
from microspec_hf.conversations import chat_ids, user
from microspec_hf.evaluation.answers import Answerer, Decoding, turn_stats
from microspec_hf.evaluation.arms import Arm, Resources, parse_arms
from microspec_hf.evaluation.prompts import Prompt
from microspec_hf.evaluation.report import write_report
from microspec_hf.evaluation.runner import evaluate
from tests.evaluation.conftest import PairFolders

ROOT = Path(__file__).parents[2]
TREE = TreeConfig(depth=2, top_k=3, num_nodes=6)
PROMPTS = [
    Prompt("a", "math", ("w3 w14 w15",)),
    Prompt("b", "conv", ("w92 w65", "w9 w8")),
    Prompt("c", "math", ("w35",)),
    Prompt("d", "code", ("w27 w18 w28",)),
    Prompt("e", "conv", ("w2 w7", "w1", "w8")),
]
ARMS = ("plain", "plain-static", "eagle2", "microspec", "microspec:max_rows=20")


@pytest.fixture(scope="module")
def pair(pair_folders: PairFolders) -> tuple[Any, Any, EagleHead]:
    model = AutoModelForCausalLM.from_pretrained(pair_folders.target).eval()
    return model, AutoTokenizer.from_pretrained(pair_folders.target), EagleHead.from_pretrained(pair_folders.drafter)


@pytest.fixture
def answerer(pair: tuple[Any, Any, EagleHead]) -> Answerer:
    return Answerer(*pair, Decoding(max_new_tokens=6))


def arms(*names: str) -> list[Arm]:
    return parse_arms(names or ARMS, [], Resources(TREE))


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """A record as it must be on every run."""
    text = json.loads(json.dumps(record))
    choice = text["choices"][0]
    del choice["wall_time"]
    for stats in choice["stats"]:
        if stats:
            del stats["prefill_seconds"], stats["decode_seconds"]
    return text


def test_records_have_the_fields_form(answerer: Answerer, tmp_path: Path) -> None:
    arguments = {"command": "evaluate", "dtype": "float32", "data": str(tmp_path)}
    returned = evaluate(answerer, PROMPTS, arms(), tmp_path / "out", arguments, progress=False)
    plain = {record["question_id"]: record for record in read(tmp_path / "out", "plain")}
    assert list(plain) == ["a", "b", "c", "d", "e"]
    for arm in arms():
        for record in read(tmp_path / "out", arm.file_name.removesuffix(".jsonl")):
            prompt = next(p for p in PROMPTS if p.id == record["question_id"])
            assert (record["category"], record["arm"], record["turns_left_out"]) == (prompt.task, arm.name, 0)
            (choice,) = record["choices"]
            for name in ("turns", "ids", "new_tokens", "wall_time", "decoding_steps", "prompt_tokens", "stats"):
                assert len(choice[name]) == len(prompt.turns)
            assert choice["ids"] == plain[prompt.id]["choices"][0]["ids"]  # lossless, in later turns too
            assert choice["new_tokens"] == [len(ids) for ids in choice["ids"]]
            assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
            assert all(seconds > 0 for seconds in choice["wall_time"])
            stats = turn_stats(record)
            assert [length for turn in stats for length in turn.emitted] == choice["accept_lengths"]
            if arm.config is None:
                assert set(choice["accept_lengths"]) <= {1}
                assert choice["stats"] == [None] * len(prompt.turns)
            else:
                assert stats[0].num_levels == 3
    origin = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert origin == returned
    assert origin["prompts"] == 5
    assert origin["skipped"] == {"longer than the context": 0, "prompts": {}}
    assert list(origin["arms"]) == list(ARMS)
    assert origin["arms"]["microspec:max_rows=20"]["vocabulary"]["max_rows"] == 20
    assert origin["decoding"] == {"max_new_tokens": 6, "temperature": 0.0, "seed": 0}
    assert str(tmp_path) not in json.dumps(origin)
    assert not (tmp_path / "out" / "unfinished").exists()


def test_later_turns_see_the_conversation(answerer: Answerer) -> None:
    (plain,) = arms("plain")
    record = answerer.answer(plain, PROMPTS[1])
    first, second = record["choices"][0]["ids"]
    reply = {"role": "assistant", "content": answerer.tokenizer.decode(first, skip_special_tokens=True)}
    ids = torch.tensor(chat_ids(answerer.tokenizer, [[user("w92 w65"), reply, user("w9 w8")]]))
    assert record["choices"][0]["prompt_tokens"][1] == ids.shape[1]
    alone = answerer.model.generate(ids, attention_mask=ids.new_ones(ids.shape), do_sample=False, max_new_tokens=6)
    assert second == alone[0, ids.shape[1] :].tolist()


def test_sampling_is_the_targets_and_reproducible(pair: tuple[Any, Any, EagleHead]) -> None:
    answerer = Answerer(*pair, Decoding(max_new_tokens=6, temperature=1.0, seed=3))
    (arm,) = arms("microspec")
    texts = [answerer.answer(arm, PROMPTS[1])["choices"][0]["ids"] for _ in range(2)]
    assert texts[0] == texts[1]
    other = Answerer(*pair, Decoding(max_new_tokens=6, temperature=1.0, seed=4)).answer(arm, PROMPTS[1])
    assert other["choices"][0]["ids"] != texts[0]


def test_long_prompts_are_skipped_and_counted(answerer: Answerer, tmp_path: Path) -> None:
    context = answerer.context
    assert context == 512
    exact = Prompt("exact", "math", (" ".join(["w5"] * (context - 6 - 1)),))  # the template adds one
    long = Prompt("long", "math", (" ".join(["w5"] * (context - 6)),))
    second = Prompt("second", "conv", (" ".join(["w5"] * 480), " ".join(["w6"] * 30)))
    record = evaluate(answerer, [exact, long, second], arms("plain", "microspec"), tmp_path / "out", {}, progress=False)
    assert record["skipped"] == {"longer than the context": 1, "prompts": {"long": context - 6 + 1}}
    assert record["turns_left_out"] == 2  # of one prompt, in both arms
    for name in ("plain", "microspec"):
        rows = read(tmp_path / "out", name)
        assert [row["question_id"] for row in rows] == ["exact", "second"]
        assert [row["turns_left_out"] for row in rows] == [0, 1]
        assert rows[0]["choices"][0]["prompt_tokens"] == [context - 6]
    with pytest.raises(ValueError, match=r"None of the 1 prompts .* 6 new tokens .* context of 512"):
        evaluate(answerer, [long], arms("plain"), tmp_path / "none", {}, progress=False)


class Crash(Exception):
    """Something that nobody foresaw."""


def test_a_crash_loses_nothing_that_was_finished(
    answerer: Answerer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[tuple[str, str]] = Counter()
    right = Answerer.answer

    def crash_at_the_sixth(self: Answerer, arm: Arm, prompt: Prompt) -> dict[str, Any]:
        if calls.total() == 5:
            raise Crash
        calls[arm.name, prompt.id] += 1
        return right(self, arm, prompt)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "answer", crash_at_the_sixth)
        with pytest.raises(Crash):
            evaluate(answerer, PROMPTS, arms("plain", "eagle2", "microspec"), out, {}, progress=False)
    assert not (out / "provenance.json").exists()

    def count(self: Answerer, arm: Arm, prompt: Prompt) -> dict[str, Any]:
        calls[arm.name, prompt.id] += 1
        return right(self, arm, prompt)

    monkeypatch.setattr(Answerer, "answer", count)
    evaluate(answerer, PROMPTS, arms("plain", "eagle2", "microspec", "eagle2:depth=1"), out, {}, progress=False)
    assert calls == {
        (arm.name, p.id): 1 for arm in arms("plain", "eagle2", "microspec", "eagle2:depth=1") for p in PROMPTS
    }
    evaluate(answerer, PROMPTS, arms("plain", "eagle2", "microspec"), tmp_path / "whole", {}, progress=False)
    for name in ("plain", "eagle2", "microspec"):
        assert [without_times(r) for r in read(out, name)] == [without_times(r) for r in read(tmp_path / "whole", name)]


def test_an_arm_that_changed_is_answered_again(
    answerer: Answerer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(self: Answerer, arm: Arm, prompt: Prompt) -> dict[str, Any]:
        if prompt.id == "c":
            raise Crash
        return right(self, arm, prompt)

    right = Answerer.answer
    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "answer", crash)
        with pytest.raises(Crash):
            evaluate(answerer, PROMPTS, arms("eagle2"), tmp_path, {}, progress=False)
    shallow = parse_arms(["eagle2"], [], Resources(TreeConfig(depth=1, top_k=3, num_nodes=6)))
    evaluate(answerer, PROMPTS, shallow, tmp_path, {}, progress=False)
    assert {s["num_levels"] for r in read(tmp_path, "eagle2") for s in r["choices"][0]["stats"]} == {2}


def test_other_settings_and_finished_folders_are_refused(
    answerer: Answerer, pair: tuple[Any, Any, EagleHead], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(self: Answerer, arm: Arm, prompt: Prompt) -> dict[str, Any]:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "answer", crash)
        with pytest.raises(Crash):
            evaluate(answerer, PROMPTS, arms("plain"), tmp_path, {}, progress=False)
    with pytest.raises(ValueError, match="other settings; these differ: decoding"):
        evaluate(Answerer(*pair, Decoding(max_new_tokens=7)), PROMPTS, arms("plain"), tmp_path, {}, progress=False)
    evaluate(answerer, PROMPTS, arms("plain"), tmp_path, {}, progress=False)
    with pytest.raises(ValueError, match="holds a finished evaluation already"):
        evaluate(answerer, PROMPTS, arms("plain"), tmp_path, {}, progress=False)


def test_no_arm_always_comes_first(answerer: Answerer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, str]] = []
    warmed: list[str] = []
    right = Answerer.answer

    def note(self: Answerer, arm: Arm, prompt: Prompt) -> dict[str, Any]:
        order.append((prompt.id, arm.name))
        return right(self, arm, prompt)

    monkeypatch.setattr(Answerer, "answer", note)
    monkeypatch.setattr(Answerer, "warm_up", lambda self, arm, prompt: warmed.append(arm.name))
    evaluate(answerer, PROMPTS, arms("plain", "eagle2"), tmp_path, {}, progress=False)
    assert [arm for _, arm in order[::2]] == ["plain", "eagle2", "plain", "eagle2", "plain"]
    assert [prompt for prompt, _ in order[::2]] == ["a", "b", "c", "d", "e"]
    assert warmed == ["plain", "eagle2"]


@pytest.mark.parametrize("values", [{"max_new_tokens": 0}, {"temperature": -1.0}])
def test_impossible_decoding(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        Decoding(**values)


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [json.dumps({"id": p.id, "task": p.task, "turns": p.turns}) for p in PROMPTS]
    file.write_text("\n".join(rows) + "\n")
    return file


def options_of(pair: PairFolders, *arguments: str) -> list[str]:
    tree = ["--depth", "2", "--nodes", "6", "--top_k", "3", "--device", "cpu", "--max_new_tokens", "6"]
    return ["--target", str(pair.target), "--drafter", str(pair.drafter), *tree, *arguments]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, pair_folders: PairFolders) -> Iterator[Callable[..., None]]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    module = importlib.import_module("evaluate")

    def run_here(*arguments: str) -> None:
        (options,) = HfArgumentParser(module.Arguments).parse_args_into_dataclasses(
            options_of(pair_folders, *arguments)
        )
        module.main(options)

    yield run_here
    PartialState._reset_state()


def test_two_processes_give_the_records_of_one(
    run: Callable[..., None],
    pair_folders: PairFolders,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Five prompts over two processes do not split evenly."""
    chosen = ["--data", str(data), "--suite", "smoke", "--arms", "microspec:max_rows=20"]
    run(*chosen, "--output", str(tmp_path / "one"))
    assert "5 prompts, 4 arms; skipped 0 prompts" in capsys.readouterr().out
    # With --cpu, accelerate starts several processes through MPI only; --multi_gpu does without GPUs.
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launcher += ["--num_machines", "1", "--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [*launcher, str(ROOT / "examples" / "evaluate.py")]
    command += options_of(pair_folders, *chosen, "--output", str(tmp_path / "two"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert "12/12" in finished.stderr  # one bar, of the three prompts of the main process under four arms
    assert "8/8" not in finished.stderr
    for name in ("plain", "eagle2", "microspec", "microspec+max_rows=20"):
        one, two = read(tmp_path / "one", name), read(tmp_path / "two", name)
        assert [without_times(record) for record in one] == [without_times(record) for record in two]
    assert json.loads((tmp_path / "two" / "provenance.json").read_text())["processes"] == 2
    page = write_report(tmp_path / "two").read_text()  # the form is the one that the page is made of
    assert "5 prompts with all their turns, greedy, 6 new tokens a turn" in page
    assert "| `eagle2` |" in page
    assert "100.0%" in page
    assert not (tmp_path / "two" / "unfinished").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arms", "medusa"], "There is no arm 'medusa'"),
        (["--suite", "everything"], "There is no suite everything"),
        (["--arms", "fr-spec-8k"], "needs --frequency_list"),
        (["--arms", "plain", "--tasks", "poetry"], r"no prompt of the task poetry\. Tasks: math, conv, code"),
        ([], "nothing to evaluate"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_loaded(
    run: Callable[..., None],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    module = importlib.import_module("evaluate")
    monkeypatch.setattr(module, "load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=words):
        run("--data", str(data), "--output", str(tmp_path / "out"), *arguments)


def test_a_malformed_line_is_named(run: Callable[..., None], data: Path, tmp_path: Path) -> None:
    data.write_text(data.read_text() + '{"id": "f", "task": "math"}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 6: expected \"turns\""):
        run("--data", str(data), "--arms", "plain", "--output", str(tmp_path / "out"))
    with pytest.raises(SystemExit, match="--output"):
        run("--data", str(data), "--arms", "plain")
