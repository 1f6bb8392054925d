"""Batched answers are the answers that `generate` gives to each prompt alone."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from microspec_hf.hf import Target
from microspec_hf.training.decoding import continue_prompts
from tests import tiny


def prompts(vocab_size: int, count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(rng.randrange(1, 30))] for _ in range(count)]


def plain(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    output = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", list(tiny.TINY_MODELS))
def test_greedy_answers_are_those_of_generate(name: str, attention: str) -> None:
    if name == "gemma2" and attention == "sdpa":
        pytest.skip("sdpa does not cap attention scores")
    model = tiny.TINY_MODELS[name](attn_implementation=attention)
    batch = prompts(model.config.vocab_size, 6)
    got = continue_prompts(Target(model), batch, 32, 20, [], None)
    assert got == [plain(model, prompt, 20) for prompt in batch]
    assert model.config._attn_implementation == attention


def test_stop_tokens_end_an_answer_and_belong_to_it(tiny_llama: PreTrainedModel) -> None:
    batch = prompts(101, 6)
    whole = [plain(tiny_llama, prompt, 20) for prompt in batch]
    stops = [whole[0][5], whole[1][0]]
    wanted = []
    for answer in whole:
        end = next((i + 1 for i, token in enumerate(answer) if token in stops), 20)
        wanted.append(answer[:end])
    assert continue_prompts(Target(tiny_llama), batch, 32, 20, stops, None) == wanted
    assert {len(answer) for answer in wanted} > {1, 20}


def test_ends_early_when_all_answers_have(tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    target, calls = Target(tiny_llama), 0
    decoder = target.decoder.forward

    def count(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return decoder(*args, **kwargs)

    monkeypatch.setattr(target.decoder, "forward", count)
    answers = continue_prompts(target, prompts(101, 4), 32, 64, list(range(101)), None)
    assert [len(answer) for answer in answers] == [1] * 4
    assert calls <= 16


def test_sampled_tokens_follow_the_softmax(tiny_llama: PreTrainedModel) -> None:
    prompt, temperature, draws = [5, 17, 3], 1.3, 4000
    torch.manual_seed(0)
    answers = continue_prompts(Target(tiny_llama), [prompt] * draws, 16, 1, [], temperature)
    counts = torch.bincount(torch.tensor(answers)[:, 0], minlength=101)
    with torch.no_grad():
        wanted = (tiny_llama(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
    deviation = (counts / draws - wanted).abs() / (wanted * (1 - wanted) / draws).sqrt().clamp(min=1e-3)
    assert float(deviation.max()) < 4.5
    assert int((counts > 0).sum()) > 1


@pytest.mark.gpu
def test_captured_steps_equal_eager_ones(tiny_llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.tiny_llama().cuda()
    batch = prompts(101, 32)
    captured = continue_prompts(Target(model), batch, 32, 40, [], None)
    assert captured == continue_prompts(Target(tiny_llama), batch, 32, 40, [], None)
