"""What `docs/lossless.md` says can be done can be done, and what it says of half precision is so."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from microspec_hf.cli import app
from microspec_hf.evaluation import Prompt
from tests.doubles import controlled_pair, plain, random_prompt
from tests.tiny import tiny_llama

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "lossless.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def test_library_call(capsys: pytest.CaptureFixture[str]) -> None:
    model, head = controlled_pair(scale=0.1)
    [code] = blocks("python")
    known: dict[str, Any] = {
        "model": model,
        "drafter": head,
        "tokenizer": lambda prompt: random_prompt(model, seed=len(prompt.id)),
        "prompts": [Prompt(id="a", task="t", turns=["x"]), Prompt(id="bb", task="t", turns=["y"])],
    }
    exec(compile(code, "docs/lossless.md", "exec"), known)
    assert capsys.readouterr().out == "identical\n"
    assert known["report"].num_prompts == 2


def test_command() -> None:
    [command] = blocks("bash")
    assert command.startswith("microspec check ")
    group = typer.main.get_command(app)
    known = {option for parameter in group.commands["check"].params for option in parameter.opts}  # type: ignore[attr-defined]
    named = re.findall(r"--[a-z-]+", command)
    assert len(named) >= 8
    assert {*named} - known == set()


def test_files_that_are_named_exist() -> None:
    named = re.findall(r"`((?:tests|microspec_hf)/[\w/]+\.py)`", PAGE)
    assert len(named) >= 6
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_plain_generate_differs_from_itself_in_half_precision(dtype: torch.dtype) -> None:
    model = tiny_llama(dtype=dtype)
    ask: dict[str, Any] = {"max_new_tokens": 24, "return_dict_in_generate": True, "output_logits": True}
    differences = []
    for seed, other in product(range(4), ({"prefill_chunk_size": 3}, {"cache_implementation": "static"})):
        prompt = random_prompt(model, 12, seed)
        one, two = plain(model, prompt, **ask), plain(model, prompt, **ask, **other)
        same = int((one.sequences == two.sequences).long().cumprod(1).sum()) - 12  # new tokens of a common beginning
        differences += [float((a - b).abs().max()) for a, b in zip(one.logits[:same], two.logits[:same], strict=True)]
    assert max(differences) > 0


def test_no_figure_is_typed_by_hand() -> None:
    prose = re.sub(r"```.*?```|`[^`]*`|\[[^]]*\]\([^)]*\)", "", PAGE, flags=re.DOTALL)
    figures = {*re.findall(r"\d+(?:\.\d+)?", prose)}
    assert figures <= {"1", "32", "64", "16"}, figures  # the exit code, and the names of precisions
