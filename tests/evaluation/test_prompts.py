from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from microspec_hf.evaluation import Prompt, prompt_ids, read_prompts, select_prompts
from tests.cli.conftest import word_tokenizer


def write(file: Path, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    if file.suffix == ".gz":
        with gzip.open(file, "wt", encoding="utf-8") as out:
            out.write("\n".join(lines))
    else:
        file.write_text("\n".join(lines), encoding="utf-8")
    return file


def test_reads_the_fields_and_ignores_others(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "task": "conv", "turns": ["Hello.", "Again."], "source": "x"},
        "",
        {"id": "b", "task": "code", "turns": ["def f"]},
    ]
    assert read_prompts(write(tmp_path / "p.jsonl", *rows)) == [
        Prompt("a", "conv", ("Hello.", "Again.")),
        Prompt("b", "code", ("def f",)),
    ]


def test_reads_the_public_layouts(tmp_path: Path) -> None:
    write(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "More."]},
        {"question_id": 200, "category": "translation", "turns": ["Translate."]},
        {"question_id": 300, "category": "math_reasoning", "turns": ["1+1?"]},
    )
    write(tmp_path / "HumanEval.jsonl.gz", {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "..."})
    assert [(p.id, p.task, p.turns[0]) for p in read_prompts(tmp_path)] == [
        ("81", "conv", "Write."),
        ("200", "mt", "Translate."),
        ("300", "math", "1+1?"),
        ("HumanEval/0", "code", "def f():\n"),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "line 2"),
        ("[1, 2]", "line 2: expected a JSON object, got list"),
        ('{"id": "b", "turns": ["x"]}', 'line 2: expected an "id" and a "task", got the keys id, turns'),
        ('{"task": "qa", "turns": ["x"]}', 'line 2: expected an "id"'),
        ('{"id": "b", "task": "qa", "turns": []}', 'line 2: expected "turns"'),
        ('{"id": "b", "task": "qa", "turns": "x"}', 'line 2: expected "turns"'),
        ('{"id": "b", "task": "qa", "turns": ["x", " "]}', 'line 2: expected "turns"'),
        ('{"id": "a", "task": "qa", "turns": ["x"]}', "line 2: the id 'a' was used before"),
    ],
)
def test_refuses_a_malformed_line_by_its_number(tmp_path: Path, line: str, words: str) -> None:
    file = write(tmp_path / "p.jsonl", {"id": "a", "task": "qa", "turns": ["x"]}, line)
    with pytest.raises(ValueError, match=r"^p\.jsonl, ") as error:
        read_prompts(file)
    assert words in str(error.value)


def test_says_where_the_public_sets_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"hemingkx/Spec-Bench.*openai/human-eval"):
        read_prompts(tmp_path / "nowhere")
    write(tmp_path / "spec_bench.jsonl", {"id": "a", "task": "qa", "turns": ["x"]})
    with pytest.raises(FileNotFoundError, match=r"no HumanEval: none of humaneval\.jsonl"):
        read_prompts(tmp_path)


def test_select_takes_the_first_of_each_task_in_the_order_of_the_set() -> None:
    prompts = [Prompt(str(i), task, ("x",)) for i, task in enumerate(["qa", "mt", "qa", "qa", "mt", "code"])]
    assert [p.id for p in select_prompts(prompts)] == ["0", "1", "2", "3", "4", "5"]
    assert [p.id for p in select_prompts(prompts, per_task=1)] == ["0", "1", "5"]
    assert [p.id for p in select_prompts(prompts, ["mt", "qa"], per_task=2)] == ["0", "1", "2", "4"]
    with pytest.raises(ValueError, match=r"no prompt of the task rag\. Tasks: qa, mt, code"):
        select_prompts(prompts, ["rag", "qa"])
    with pytest.raises(ValueError, match="per_task must be at least 1, got 0"):
        select_prompts(prompts, per_task=0)


def test_prompt_ids_are_the_first_turn_in_the_chat_template() -> None:
    prompt, tokenizer = Prompt("a", "qa", ("w3 w4", "w9")), word_tokenizer()
    ids = prompt_ids(tokenizer, prompt)
    assert ids.dtype == torch.int64
    assert ids.tolist() == [[3, 4, 1]]  # the template ends a message with w1
    tokenizer.chat_template = None
    assert prompt_ids(tokenizer, prompt).tolist() == [[3, 4]]
