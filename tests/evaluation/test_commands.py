"""The measuring examples as users start them."""

from __future__ import annotations

import ast
import gzip
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import save_file
from transformers import AutoTokenizer, HfArgumentParser

from microspec_hf import EagleHead
from microspec_hf.autotune import candidate_trees
from microspec_hf.evaluation import lossless
from microspec_hf.training.trainer import held_out
from tests.cli.conftest import word_tokenizer
from tests.evaluation.conftest import PairFolders

ROOT = Path(__file__).parent.parent.parent
PLAIN_DEPENDENCIES = {
    "accelerate",
    "measuring",
    "microspec_hf",
    "numpy",
    "safetensors",
    "torch",
    "tqdm",
    "transformers",
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a tiny Spec-Bench and HumanEval."""
    rows = {
        "spec_bench.jsonl": [("a", "math", "w3 w14 w15"), ("b", "qa", "w92 w65"), ("c", "math", "w35")],
        "humaneval.jsonl": [("d", "code", "w27 w18 w28")],
    }
    folder = tmp_path / "data"
    folder.mkdir()
    for name, prompts in rows.items():
        lines = [json.dumps({"id": i, "task": task, "turns": [text]}) for i, task, text in prompts]
        (folder / name).write_text("\n".join(lines))
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, pair_folders: PairFolders) -> Iterator[Callable[..., Any]]:
    """Run an example in this process, with a small tree: its exit code."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))

    def run_here(script: str, *arguments: str, pair: PairFolders = pair_folders) -> Any:
        module = importlib.import_module(script)
        (options,) = HfArgumentParser(module.Arguments).parse_args_into_dataclasses(options_of(pair, *arguments))
        return module.main(options)

    yield run_here
    PartialState._reset_state()


def run_twice_at_once(script: str, pair: PairFolders, *arguments: str) -> None:
    """Run an example in two processes, as users start it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, str(ROOT / "examples" / f"{script}.py"), *options_of(pair, *arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


def options_of(pair: PairFolders, *arguments: str) -> list[str]:
    tree = ["--depth", "2", "--nodes", "6", "--top-k", "3", "--device", "cpu"]
    return ["--target", str(pair.target), "--drafter", str(pair.drafter), *tree, *arguments]


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def test_acceptance(run: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    (tmp_path / "ids.json").write_text(json.dumps(list(range(50))))
    vocabularies = ["--vocabularies", "full,dynamic,static:16", "--static-list", str(tmp_path / "ids.json")]
    limits = ["--per-task", "1", "--max-new-tokens", "8"]
    run("acceptance", "--data", str(data), *limits, *vocabularies, "--output", str(output))
    result = read(output)
    assert [(r["vocabulary"], r["task"]) for r in result["records"]] == [
        (vocabulary, task) for vocabulary in ("full", "dynamic", "static:16") for task in ("math", "qa", "code", "all")
    ]
    assert all(r["acceptance_length"] >= 1 and 0 <= r["coverage"] <= 1 for r in result["records"])
    overall = {r["vocabulary"]: r for r in result["records"] if r["task"] == "all"}
    assert all(record["prompts"] == 3 for record in overall.values())
    assert overall["full"]["mean_active_vocabulary"] == 101
    assert overall["static:16"]["mean_active_vocabulary"] == 16
    assert overall["dynamic"]["mean_active_vocabulary"] < 101
    assert result["provenance"]["dtype"] == "float32"
    assert result["provenance"]["arguments"]["target"] == "target"
    assert str(tmp_path) not in output.read_text()


def test_acceptance_is_the_same_over_two_processes(
    run: Callable[..., Any], pair_folders: PairFolders, data: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    arguments = ["--data", str(data), "--max-new-tokens", "6"]
    run("acceptance", *arguments, "--output", str(one))
    run_twice_at_once("acceptance", pair_folders, *arguments, "--output", str(two))
    assert read(one)["records"] == read(two)["records"]


def test_grid_writes_the_table_into_the_drafter(
    run: Callable[..., Any], pair_folders: PairFolders, tmp_path: Path
) -> None:
    pair = PairFolders(pair_folders.target, tmp_path / "drafter")
    shutil.copytree(pair_folders.drafter, pair.drafter)
    training = {"config": {"languages": ["en"], "heldout": 0.3, "max_prompt_tokens": 3}}
    (pair.drafter / "training.json").write_text(json.dumps(training))
    before = read(pair.drafter / "config.json")
    output = tmp_path / "grid.json"
    arguments = ["--train-prompts", str(training_prompts(tmp_path)), "--grid-prompts", "2"]
    limits = ["--max-new-tokens", "4"]
    run("acceptance", "--grid", *arguments, *limits, "--output", str(output), pair=pair)
    config = read(pair.drafter / "config.json")
    table = config["expected_acceptance"]
    measured = [(int(depth), int(nodes)) for depth, row in table.items() for nodes in row]
    assert sorted(measured) == sorted((tree.depth, tree.num_nodes) for tree in candidate_trees())
    assert config == before | {"expected_acceptance": table}
    assert EagleHead.from_pretrained(pair.drafter).config.expected_acceptance == table
    records = read(output)["records"]
    assert len(records) == len(measured)
    assert all(record["prompts"] == 2 for record in records)
    for r in records:
        assert table[str(r["depth"])][str(r["nodes"])] == pytest.approx(r["acceptance_length"], abs=1e-3)


def test_grid_uses_only_prompts_that_were_never_trained_on(
    monkeypatch: pytest.MonkeyPatch, pair_folders: PairFolders, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    acceptance = importlib.import_module("acceptance")
    training = {"config": {"languages": ["en"], "heldout": 0.3, "max_prompt_tokens": 3}}
    (tmp_path / "training.json").write_text(json.dumps(training))
    file = training_prompts(tmp_path)
    arguments = acceptance.Arguments("t", str(tmp_path), train_prompts=str(file), grid_prompts=1000)
    chosen = acceptance.held_out_prompts(word_tokenizer(), arguments)
    english = [row["prompt"] for row in map(json.loads, file.read_text().splitlines()) if row["lang"] == "en"]
    held = held_out(torch.arange(len(english)), 0.3).tolist()
    short = [text for text, is_held in zip(english, held, strict=True) if is_held and len(text.split()) < 3]
    assert 0 < len(short) < sum(held) < len(english)
    assert [prompt.turns[0] for prompt in chosen] == short
    with pytest.raises(SystemExit, match="--train-prompts"):
        acceptance.held_out_prompts(word_tokenizer(), acceptance.Arguments("t", str(tmp_path)))


def training_prompts(folder: Path) -> Path:
    """Prompts of two and three words in two languages, in the form that drafters are trained on."""
    rows = [{"prompt": f"w{i} w{i + 1}" + " w9" * (i % 3 > 0), "lang": "en" if i % 2 else "de"} for i in range(90)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "train.jsonl"


def test_check_lossless_stops_and_goes_on(
    run: Callable[..., Any], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, journal = tmp_path / "check.json", tmp_path / "check.unfinished.jsonl"
    arguments = ["--data", str(data), "--max-new-tokens", "6", "--output", str(output)]
    assert run("check_lossless", *arguments, "--seconds", "0") == 0
    assert "0 of 4 prompts: nothing checked" in capsys.readouterr().out
    assert journal.exists()
    assert not output.exists()
    assert run("check_lossless", *arguments) == 0
    result = read(output)
    assert result["identical"] is True
    assert result["prompts"] == 4
    assert [(r["vocabulary"], r["identical"]) for r in result["records"]] == [("full", 4), ("dynamic", 4)]
    assert not journal.exists()


def test_check_lossless_fails_on_a_wrong_token(
    run: Callable[..., Any], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = lossless.decode

    def wrong(*arguments: Any) -> Any:
        text, stats = right(*arguments)
        return [*text[:-1], (text[-1] + 1) % 101], stats

    monkeypatch.setattr(lossless, "decode", wrong)
    output = tmp_path / "check.json"
    assert run("check_lossless", "--data", str(data), "--max-new-tokens", "6", "--output", str(output)) == 1
    assert read(output)["verdict"] == "differs: a fault"
    assert [r["faults"] for r in read(output)["records"]] == [4, 4]


@pytest.mark.slow
def test_check_lossless_over_two_processes(pair_folders: PairFolders, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "check.json"
    arguments = ["--data", str(data), "--max-new-tokens", "6", "--output", str(output)]
    run_twice_at_once("check_lossless", pair_folders, *arguments)
    assert read(output)["identical"] is True
    assert [record["prompts"] for record in read(output)["records"]] == [4, 4]


@pytest.mark.parametrize(
    "script",
    ["acceptance.py", "check_lossless.py", "evaluate.py", "measuring.py", "static_list.py", "train_router.py"],
)
def test_needs_only_what_the_package_needs_anyway(script: str) -> None:
    """They also run where torch, transformers and accelerate are all there is."""
    tree = ast.parse((ROOT / "examples" / script).read_text())
    names = [n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    foreign = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert foreign <= PLAIN_DEPENDENCIES


def test_the_library_needs_no_command_line_packages() -> None:
    code = (
        "import sys\n"
        "sys.modules['typer'] = sys.modules['rich'] = sys.modules['gguf'] = None\n"
        "import microspec_hf, microspec_hf.evaluation, microspec_hf.training\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    finished = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr


@pytest.fixture
def static_list(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("static_list")


def test_static_list_counts_answers_and_not_prompts(
    static_list: Any, pair_folders: PairFolders, tmp_path: Path
) -> None:
    (tmp_path / "answers").mkdir()
    responses = {
        "ids": torch.tensor([7, 7, 7, 5, 4, 7, 4, 4, 9], dtype=torch.int32),
        "length": torch.tensor([5, 4]),  # prompts 7 7 7 and 7, answers 5 4 and 4 4 9
        "prompt": torch.tensor([3, 1]),
        "index": torch.tensor([0, 1]),
    }
    save_file(responses, tmp_path / "answers" / "0.safetensors")
    output = tmp_path / "ids.json"
    source = {"answers": str(tmp_path / "answers")}
    static_list.main(static_list.Arguments(pair_folders.target, str(output), **source))
    assert read(output) == [4, 5, 9]
    static_list.main(static_list.Arguments(pair_folders.target, str(output), **source, size=2))
    assert read(output) == [4, 5]
    (tmp_path / "fill.json").write_text("[1, 4, 2]")
    fill = {"fill": str(tmp_path / "fill.json"), "size": 4}
    static_list.main(static_list.Arguments(pair_folders.target, str(output), **source, **fill))
    assert read(output) == [4, 5, 9, 1]
    static_list.main(static_list.Arguments(pair_folders.target, str(output), **source, max_answers=1))
    assert read(output) == [4, 5]
    static_list.main(
        static_list.Arguments(pair_folders.target, str(output), **source, drafter=pair_folders.drafter, size=20)
    )
    assert len(set(read(output))) == 20


def test_static_list_counts_a_corpus(static_list: Any, pair_folders: PairFolders, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pair_folders.target)
    lines = ["one two two", "two one three"]
    counts = Counter(i for line in lines for i in tokenizer(line, add_special_tokens=False)["input_ids"])
    expected = sorted(counts, key=lambda i: (-counts[i], i))
    json_lines = json.dumps({"text": lines[0]}) + "\n" + json.dumps({"prompt": lines[1]}) + "\n"
    (tmp_path / "a.jsonl").write_text(json_lines)
    (tmp_path / "d.txt").write_text("\n".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json_lines.encode()))
    for name in ("a.jsonl", "b.jsonl.gz", "d.txt"):
        output = tmp_path / "ids.json"
        static_list.main(static_list.Arguments(pair_folders.target, str(output), corpus=str(tmp_path / name)))
        assert read(output) == expected
    (tmp_path / "c.jsonl").write_text(json_lines + "{}\n")
    with pytest.raises(SystemExit, match='line 3: expected a JSON object with a "text" or a "prompt"'):
        static_list.main(static_list.Arguments(pair_folders.target, "x.json", corpus=str(tmp_path / "c.jsonl")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either --answers or --corpus"),
        ({"answers": "a", "corpus": "b"}, "either --answers or --corpus"),
        ({"corpus": "b", "drafter": "d"}, "--drafter counts along --answers"),
    ],
)
def test_static_list_needs_one_source(static_list: Any, options: dict[str, str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        static_list.main(static_list.Arguments("nowhere", "x.json", **options))


def test_batches(run: Callable[..., Any], data: Path, tmp_path: Path) -> None:
    output = tmp_path / "batches.json"
    arguments = ["--data", str(data), "--per-task", "2", "--max-new-tokens", "5", "--sizes", "1,3", "--repeats", "1"]
    run("batches", *arguments, "--output", str(output))
    records = read(output)["records"]
    assert [(record["batch"], record["rows"]) for record in records] == [(1, 4), (3, 3)]
    for record in records:
        assert record["equal_rows"] == record["rows"]
        assert record["new_tokens"] == 5 * record["rows"]
        assert record["tokens_per_second"] > 0


def test_batch_of_more_prompts_than_there_are(run: Callable[..., Any], data: Path) -> None:
    with pytest.raises(SystemExit, match="batch of 9 needs as many prompts, got 4"):
        run("batches", "--data", str(data), "--sizes", "9")
