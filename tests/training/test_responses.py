"""Answers on disk: who is asked, what is kept, and what a rerun does."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from microspec_hf.conversations import chat_ids, user
from microspec_hf.hf import Target
from microspec_hf.training import TrainConfig, generate_responses, load_responses, read_prompts, responses
from tests.training.conftest import EOS


@pytest.fixture
def target(target_folder: Path) -> Target:
    return Target(AutoModelForCausalLM.from_pretrained(target_folder).eval())


@pytest.fixture
def tokenizer(target_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(target_folder)


@pytest.fixture
def config(target_folder: Path, prompts_file: Path) -> TrainConfig:
    return make_config(target_folder, prompts_file)


def make_config(target_folder: Path, prompts_file: Path, **changes: Any) -> TrainConfig:
    options: dict[str, Any] = {"max_new_tokens": 12, "answer_tokens": 300} | changes
    return TrainConfig(target=str(target_folder), prompts=str(prompts_file), output="unused", **options)


def split(answers: dict[str, torch.Tensor]) -> list[tuple[int, list[int], list[int]]]:
    """(number, prompt, answer) of every sequence."""
    rows = zip(*(answers[n].tolist() for n in ("index", "prompt", "length")), strict=True)
    parts = answers["ids"].split(answers["length"].tolist())
    return [(i, ids[:n].tolist(), ids[n:].tolist()) for ids, (i, n, _) in zip(parts, rows, strict=True)]


def test_answers_are_the_targets_own(
    target: Target, tokenizer: PreTrainedTokenizerBase, config: TrainConfig, tmp_path: Path
) -> None:
    generate_responses(Accelerator(), target, tokenizer, config, tmp_path)
    rows = split(load_responses(tmp_path))
    texts = read_prompts(config.prompts)
    assert sorted(i for i, _, _ in rows) == sorted(list(range(40)) * 2)  # a greedy and a sampled answer each
    greedy: dict[int, list[int]] = {}
    for file in sorted(tmp_path.glob("0-*.safetensors")):
        assert file.stat().st_size > 0
    seen: set[int] = set()
    for index, prompt, answer in rows:
        assert prompt == chat_ids(tokenizer, [[user(texts[index])]])[0]
        assert EOS not in answer[:-1]
        assert len(answer) == 12 or answer[-1] == EOS
        if index not in seen:  # files of greedy answers come first
            greedy[index] = answer
            seen.add(index)
    for index in (0, 7, 33):
        prompt = torch.tensor([chat_ids(tokenizer, [[user(texts[index])]])[0]])
        wanted = target.model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :].tolist()
        assert greedy[index] == wanted
    assert any(greedy[i] != a for i, _, a in rows)


def test_filters(target_folder: Path, prompts_file: Path, target: Target, tokenizer: Any, tmp_path: Path) -> None:
    config = make_config(target_folder, prompts_file, languages=["en"], max_prompts=20, max_prompt_tokens=25, sampled=0)
    generate_responses(Accelerator(), target, tokenizer, config, tmp_path)
    answers = load_responses(tmp_path)
    assert len(read_prompts(prompts_file, ["en"])) == 30
    assert 5 < len(answers["index"]) < 20
    assert int(answers["prompt"].max()) <= 25


def test_a_rerun_goes_on_and_other_options_are_refused(
    target_folder: Path,
    prompts_file: Path,
    target: Target,
    tokenizer: Any,
    config: TrainConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generate_responses(Accelerator(), target, tokenizer, config, tmp_path)
    before = load_responses(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    files[2].unlink()
    asked: list[int] = []
    real = responses.continue_prompts

    def count(*args: Any) -> Any:
        asked.append(len(args[1]))
        return real(*args)

    monkeypatch.setattr(responses, "continue_prompts", count)
    generate_responses(Accelerator(), target, tokenizer, config, tmp_path)
    assert len(asked) == 1
    for name, tensor in load_responses(tmp_path).items():
        assert torch.equal(tensor, before[name])
    changed = make_config(target_folder, prompts_file, temperature=1.5)
    with pytest.raises(ValueError, match=r"temperature=0\.8 \(now 1\.5\)"):
        generate_responses(Accelerator(), target, tokenizer, changed, tmp_path)


def test_a_time_limit_stops_between_batches(
    target_folder: Path, prompts_file: Path, target: Target, tokenizer: Any, tmp_path: Path
) -> None:
    config = make_config(target_folder, prompts_file, answer_seconds=1e-9)
    generate_responses(Accelerator(), target, tokenizer, config, tmp_path)
    with pytest.raises(ValueError, match="holds no answers"):
        load_responses(tmp_path)


def test_prompts_may_be_compressed(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl.gz"
    with gzip.open(file, "wt", encoding="utf-8") as out:
        out.write('{"prompt": "a", "lang": "en"}\n{"prompt": "ä"}\n')
    assert read_prompts(file) == ["a", "ä"]
    assert read_prompts(file, ["en"]) == ["a"]
    with pytest.raises(ValueError, match="has no prompt in fr"):
        read_prompts(file, ["fr"])


@pytest.mark.parametrize("line", ['{"text": "a"}', "[1]", "{", '"prompt"'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "a"}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(file)
