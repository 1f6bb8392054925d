"""Every command as a user starts it, on a tiny pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import microspec_hf
from microspec_hf.cli import app
from microspec_hf.cli.demo import PROMPTS
from microspec_hf.evaluation import lossless, read_prompts
from tests.cli.conftest import PairFolders, word_tokenizer

COMMANDS = ("demo", "generate", "chat", "check", "train")


def run(*arguments: str, answers: str | None = None) -> Any:
    return CliRunner().invoke(app, arguments, input=answers, env={"COLUMNS": "200", "NO_COLOR": "1"})


def refused(result: Any) -> str:
    """The sentence of a refusal: exit code 2, on stderr, no traceback."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


def plain_ids(pair: PairFolders, text: str, max_new_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(pair.target)
    inputs = word_tokenizer()(text, return_tensors="pt")
    output = model.generate(inputs["input_ids"], max_new_tokens=max_new_tokens, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def words(ids: list[int]) -> str:
    return word_tokenizer().decode(ids, skip_special_tokens=True)


def test_help_of_the_program_names_every_command() -> None:
    shown = run("--help").output
    assert all(command in shown for command in COMMANDS)
    assert run().output.strip() == shown.strip()  # no arguments: the same


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_explains_every_option(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    lines = [line.strip("│ ") for line in result.output.splitlines()]
    options = [line for line in lines if line.startswith(("--", "*")) and "--help" not in line]
    assert len(options) >= 10
    assert all(len(line.split()) >= 4 for line in options), options
    assert str(Path(microspec_hf.__file__).parent) not in result.output  # no default of this machine


def test_version() -> None:
    assert run("--version").output.strip() == f"microspec_hf {microspec_hf.__version__}"


def test_generate_prints_the_plain_text(pair_folders: PairFolders) -> None:
    result = run("generate", "w3 w14 w15", *pair_folders.arguments, "-n", "12")
    assert result.exit_code == 0, result.output
    text, figures = result.stdout.splitlines()
    assert text == words(plain_ids(pair_folders, "w3 w14 w15 w1", 12))  # the template adds w1
    assert figures.startswith("12 tokens, ")
    assert "tokens a pass" in figures


def test_generate_raw_from_stdin_with_json_on_stdout(pair_folders: PairFolders) -> None:
    result = run("generate", "-", "--raw", "--json", "-", *pair_folders.arguments, "-n", "9", answers="w5 w6\n")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)  # nothing else is there
    assert record["ids"] == plain_ids(pair_folders, "w5 w6", 9)
    assert record["text"] == words(record["ids"])
    assert record["tokens_per_second"] == pytest.approx(9 / record["seconds"])
    assert sum(record["stats"]["emitted"]) >= 8
    assert record["provenance"]["arguments"]["max_new_tokens"] == 9
    assert record["text"] in result.stderr


def test_generate_samples_by_seed(pair_folders: PairFolders) -> None:
    def sampled(*arguments: str) -> list[int]:
        result = run("generate", "w5", "--json", "-", *pair_folders.arguments, "-n", "16", *arguments)
        return json.loads(result.stdout)["ids"]

    first = sampled("--temperature", "3", "--seed", "1")
    assert sampled("--temperature", "3", "--seed", "1") == first
    assert sampled("--temperature", "3", "--seed", "2") != first
    assert sampled("--sample", "--top-k", "1") == sampled()


def test_demo_compares_and_writes_every_key(pair_folders: PairFolders, tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    result = run("demo", *pair_folders.arguments, "-n", "8", "--repeats", "2", "--json", str(file))
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    assert record["identical"] is True
    assert record["speedup"] == pytest.approx(record["tokens_per_second"] / record["plain_tokens_per_second"])
    assert 1 <= record["acceptance_length"] <= 4
    assert 0 < record["mean_active_vocabulary"] <= 101
    assert record["tree"] == {"depth": 2, "top_k": 3, "num_nodes": 6}
    assert (record["repeats"], record["max_new_tokens"], record["dtype"]) == (2, 8, "float32")
    assert [row["id"] for row in record["prompts"]] == [prompt.id for prompt in read_prompts(PROMPTS)]
    assert all(len(row["seconds"]) == len(row["plain_seconds"]) == 2 for row in record["prompts"])
    assert record["provenance"]
    assert str(tmp_path) not in file.read_text()
    assert str(pair_folders.target.parent) not in file.read_text()
    shown = " ".join(result.stdout.split())
    assert f"{record['speedup']:.2f}x" in shown
    assert all(prompt.turns[0][:40] in shown for prompt in read_prompts(PROMPTS))
    assert shown.count("MicroSpec (accepted drafts)") == len(record["prompts"])


def test_demo_says_when_texts_differ(pair_folders: PairFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    from microspec_hf.cli import compare

    honest = compare.answer_plainly

    def different(*arguments: Any, **options: Any) -> compare.Answer:
        answer = honest(*arguments, **options)
        return compare.Answer([*answer.ids[:-1], answer.ids[-1] ^ 1], answer.seconds)

    monkeypatch.setattr(compare, "answer_plainly", different)
    result = run("demo", *pair_folders.arguments, "-n", "4", "--repeats", "1")
    assert result.exit_code == 0
    assert "The texts differ." in result.stdout


def test_check_finds_the_text_equal_under_several_vocabularies(pair_folders: PairFolders, tmp_path: Path) -> None:
    ids, file = tmp_path / "ids.json", tmp_path / "check.json"
    ids.write_text(json.dumps(list(range(40))))
    vocabularies = [*("--vocabulary", "full"), *("--vocabulary", "static:20"), *("--vocabulary", "dynamic")]
    result = run(
        *("check", *pair_folders.arguments, "-n", "8", "--json", str(file)),
        *("--static-list", str(ids), *vocabularies, "--limit", "3"),
    )
    assert result.exit_code == 0, result.output
    assert "fits" in result.stdout
    record = json.loads(file.read_text())
    assert (record["identical"], record["verdict"], record["prompts"]) == (True, "identical", 3)
    assert [r["vocabulary"] for r in record["records"]] == ["full", "static:20", "dynamic"]
    assert all(r["identical"] == 3 for r in record["records"])
    assert list(tmp_path.glob("*.unfinished*")) == []


def test_check_shows_a_fault_and_fails(pair_folders: PairFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = lossless.decode

    def different(*arguments: Any) -> Any:
        ids, stats = honest(*arguments)
        return [*ids[:3], (ids[3] + 1) % 101, *ids[4:]], stats

    monkeypatch.setattr(lossless, "decode", different)
    result = run("check", *pair_folders.arguments, "-n", "8", "--limit", "2")
    assert result.exit_code == 1
    assert "a fault" in result.stdout
    assert "after 3 equal tokens" in result.stdout


def test_check_reads_prompts_of_a_file(pair_folders: PairFolders, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "one", "task": "qa", "turns": ["w3 w4"]}) + "\n")
    result = run("check", *pair_folders.arguments, "-n", "4", "--prompts", str(prompts), "--json", "-")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["prompts"], record["max_new_tokens"]) == (1, 4)
    prompts.write_text("{}")
    assert "line 1" in refused(run("check", *pair_folders.arguments, "--prompts", str(prompts)))


def test_chat_keeps_the_history_until_new(pair_folders: PairFolders) -> None:
    result = run("chat", *pair_folders.arguments, "-n", "5", answers="w7 w8\n\nw9\n/new\nw9\n/exit\nw10\n")
    assert result.exit_code == 0, result.output
    first = plain_ids(pair_folders, "w7 w8 w1", 5)
    second = plain_ids(pair_folders, f"w7 w8 w1 {words(first)} w1 w9 w1", 5)
    third = plain_ids(pair_folders, "w9 w1", 5)
    answers = [line for line in result.stdout.splitlines() if "tokens a pass" in line]
    assert len(answers) == 3
    for ids in (first, second, third):
        assert words(ids) in result.stdout


def test_chat_ends_with_its_input_and_takes_a_system_prompt(pair_folders: PairFolders) -> None:
    result = run("chat", "--system", "w2", *pair_folders.arguments, "-n", "5", answers="w7\n")
    assert result.exit_code == 0, result.output
    assert words(plain_ids(pair_folders, "w2 w1 w7 w1", 5)) in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words_of_it"),
    [
        (["--tree", "6"], "DEPTH,TOP_K,NODES"),
        (["--tree", "0,2,60"], "num_nodes=60"),
        (["--vocabulary", "tiny"], "full, dynamic, static"),
        (["--vocabulary", "static"], "--static-list"),
        (["--top-p", "0.9"], "--sample"),
        (["--json", "no/such/folder/x.json"], "does not exist"),
        (["--drafter", "no/such-drafter"], "no/such-drafter"),
    ],
)
def test_refusals_are_one_sentence(pair_folders: PairFolders, arguments: list[str], words_of_it: str) -> None:
    assert words_of_it in refused(run("generate", "w1", *pair_folders.arguments, *arguments))


def test_an_empty_prompt_is_refused(pair_folders: PairFolders) -> None:
    assert "The prompt is empty" in refused(run("generate", " ", *pair_folders.arguments))


def test_an_unknown_target_needs_a_drafter(pair_folders: PairFolders) -> None:
    assert "knows no drafter" in refused(run("generate", "w1", "--model", str(pair_folders.target)))


def test_a_folder_that_is_not_there_is_named(pair_folders: PairFolders) -> None:
    missing = str(pair_folders.target / "nothing")
    assert f"There is no folder {missing}" in refused(run("generate", "w1", "--model", missing))


def test_traceback_on_request(pair_folders: PairFolders) -> None:
    result = run("--traceback", "generate", "w1", *pair_folders.arguments, "--tree", "6")
    assert isinstance(result.exception, ValueError)
