"""Prompts to measure on, and their token ids.

A file holds one JSON object a line: `id`, `task` and `turns`, other keys are ignored. The public sets are
read as they are published, too:

- Spec-Bench (https://github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl): `question_id`,
  `category`, `turns`; 480 prompts of the tasks mt, conv, rag, qa, math and summ.
- HumanEval (https://github.com/openai/human-eval, data/HumanEval.jsonl.gz): `task_id`, `prompt`; 164 prompts
  of the task code.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from microspec_hf.conversations import chat_ids, user

TASKS = ("mt", "conv", "rag", "qa", "math", "summ", "code")
"""The tasks of Spec-Bench and HumanEval, in the order of their tables."""

SETS = {
    "Spec-Bench": ("spec_bench.jsonl", "question.jsonl"),
    "HumanEval": ("humaneval.jsonl", "HumanEval.jsonl", "HumanEval.jsonl.gz"),
}
"""Names under which a folder may hold each set: ours, and those of its authors."""

WHERE_TO_FIND = (
    "The public sets are question.jsonl of https://github.com/hemingkx/Spec-Bench (data/spec_bench) and "
    "HumanEval.jsonl.gz of https://github.com/openai/human-eval (data); put both into one folder and name it."
)

_CATEGORIES = {
    "translation": "mt",
    "summarization": "summ",
    "math_reasoning": "math",
    "qa": "qa",
    "rag": "rag",
}


@dataclass(frozen=True)
class Prompt:
    """What a user says, in one or several turns.

    Args:
        id: unique in its set.
        task: what kind of text it asks for, see `TASKS`.
        turns: the user's messages, at least one.
    """

    id: str
    task: str
    turns: tuple[str, ...]


Tokenizer = PreTrainedTokenizerBase | Callable[[Prompt], Tensor]
"""A target's tokenizer, or a function that gives a prompt's ids, int64 `[1, L]`."""


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a JSON-lines file (plain or gzip), or Spec-Bench and HumanEval from a folder, in this order.

    Raises:
        ValueError: a line that is no prompt or repeats an id; the message names the file and the line.
        FileNotFoundError: there is no such file or folder, or the folder lacks one of the two sets.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"No prompts at {path}. {WHERE_TO_FIND}")
    files = [_find_set(path, name) for name in SETS] if path.is_dir() else [path]
    return [prompt for file in files for prompt in _read_file(file)]


def select_prompts(
    prompts: Sequence[Prompt], tasks: Sequence[str] | None = None, per_task: int | None = None
) -> list[Prompt]:
    """The first `per_task` prompts of each of the tasks, in the order of the set (None: all).

    Raises:
        ValueError: a task that none of the prompts belongs to, or `per_task` below 1.
    """
    if per_task is not None and per_task < 1:
        raise ValueError(f"per_task must be at least 1, got {per_task}. Leave it out for all prompts.")
    present = list(dict.fromkeys(prompt.task for prompt in prompts))
    if missing := [task for task in tasks or () if task not in present]:
        raise ValueError(f"There is no prompt of the task {', '.join(missing)}. Tasks: {', '.join(present)}.")
    chosen = {task: [p for p in prompts if p.task == task][:per_task] for task in tasks or present}
    kept = {id(prompt) for members in chosen.values() for prompt in members}
    return [prompt for prompt in prompts if id(prompt) in kept]


def prompt_ids(tokenizer: Tokenizer, prompt: Prompt) -> Tensor:
    """int64 `[1, L]`: the first turn in the chat template, up to where the answer begins.

    A tokenizer without a chat template gets the bare text.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer(prompt)
    return torch.tensor(chat_ids(tokenizer, [[user(prompt.turns[0])]]))


def _find_set(folder: Path, name: str) -> Path:
    for file in SETS[name]:
        if (folder / file).is_file():
            return folder / file
    raise FileNotFoundError(f"{folder} holds no {name}: none of {', '.join(SETS[name])}. {WHERE_TO_FIND}")


def _read_file(file: Path) -> list[Prompt]:
    opener = gzip.open if file.suffix == ".gz" else open
    prompts: dict[str, Prompt] = {}
    with opener(file, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                prompt = _parse(line)
            except ValueError as error:
                raise ValueError(f"{file.name}, line {number}: {error}") from error
            if prompt.id in prompts:
                raise ValueError(f"{file.name}, line {number}: the id {prompt.id!r} was used before.")
            prompts[prompt.id] = prompt
    return list(prompts.values())


def _parse(line: str) -> Prompt:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}.")
    name = next((row[key] for key in ("id", "question_id", "task_id") if key in row), None)
    turns = row.get("turns", [row["prompt"]] if "prompt" in row else None)
    task = _task(row)
    if not isinstance(name, str | int) or not isinstance(task, str):
        raise ValueError(f'expected an "id" and a "task", got the keys {", ".join(map(str, row)) or "none"}.')
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError('expected "turns", a list with at least one text and none empty.')
    return Prompt(id=str(name), task=task, turns=tuple(turns))


def _task(row: Mapping[str, Any]) -> Any:
    if "task" in row:
        return row["task"]
    if "category" in row:
        # The other categories of Spec-Bench are the eight kinds of MT-bench, all conversations.
        return _CATEGORIES.get(str(row["category"]), "conv")
    return "code" if "task_id" in row else None
