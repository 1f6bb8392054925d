"""Captured rounds on a GPU: the emulated capture of test_engine.py made real. Run with -m gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import microspec_hf
from microspec_hf import loop, writing
from tests.doubles import plain, random_head, random_prompt, speculate
from tests.tiny import TINY_MODELS, tiny_llama

pytestmark = pytest.mark.gpu

TREE = {"depth": 3, "top_k": 4, "num_nodes": 20}


@pytest.fixture(autouse=True)
def exact() -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_gpu(model: PreTrainedModel) -> PreTrainedModel:
    return model.to("cuda")  # type: ignore[no-any-return, arg-type]


ENGINES = [
    *((name, engine) for name in TINY_MODELS for engine in ("graphs", "eager")),
    *((name, "compiled") for name in ("llama", "gemma2")),  # each takes its time
]


@pytest.mark.parametrize("kind", ["dynamic", "full"])
@pytest.mark.parametrize(("name", "engine"), ENGINES)
def test_text_is_that_of_the_target(name: str, kind: str, engine: str) -> None:
    model = on_gpu(TINY_MODELS[name](attn_implementation="eager"))
    head = random_head(model).to("cuda")
    for length in (5, 60, 3):
        prompt = random_prompt(model, length, length).to("cuda")
        got = speculate(
            model,
            prompt,
            drafter=head,
            max_new_tokens=40,
            microspec={"engine": engine, "vocabulary": kind, "tree": TREE},
            return_dict_in_generate=True,
        )
        assert got.sequences.tolist() == plain(model, prompt, max_new_tokens=40).tolist()
        assert got.stats[0].is_captured == (engine != "eager")


@pytest.mark.parametrize("engine", ["graphs", "eager"])
def test_drafting_is_timed_on_the_device(engine: str) -> None:
    model = on_gpu(tiny_llama())
    ask: dict[str, Any] = {"drafter": random_head(model).to("cuda"), "max_new_tokens": 40}
    prompt = random_prompt(model).to("cuda")
    options = {"engine": engine, "tree": TREE, "time_drafts": True}
    for _ in range(2):
        got = speculate(model, prompt, microspec=options, return_dict_in_generate=True, **ask)
        assert got.sequences.tolist() == plain(model, prompt, max_new_tokens=40).tolist()
        stats = got.stats[0]
        assert 1e-5 * stats.rounds < stats.draft_seconds < stats.decode_seconds


def test_plain_decoding_on_the_engine() -> None:
    model = on_gpu(tiny_llama())
    prompt = random_prompt(model).to("cuda")
    got = plain(model, prompt, max_new_tokens=40, custom_generate="microspec", microspec={"engine": "graphs"})
    assert got.tolist() == plain(model, prompt, max_new_tokens=40).tolist()


def test_sampling_takes_no_token_that_is_cut_off() -> None:
    model = on_gpu(tiny_llama())
    prompt = random_prompt(model).to("cuda")
    arguments: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 1, "top_p": 0.9, "min_p": 0.01}
    got = speculate(model, prompt, max_new_tokens=40, microspec={"engine": "graphs"}, **arguments)
    assert got.tolist() == plain(model, prompt, max_new_tokens=40, **arguments).tolist()


def test_rounds_do_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third round on, nothing in a launch makes the host wait."""
    model = on_gpu(tiny_llama())
    launched: list[int] = []

    def launch(*arguments: Any, **options: Any) -> Any:
        launched.append(1)
        torch.cuda.set_sync_debug_mode("error" if len(launched) > 3 else "default")
        try:
            return loop.launch(*arguments, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(writing, "launch", launch)
    prompt = random_prompt(model).to("cuda")
    speculate(model, prompt, max_new_tokens=60, microspec={"engine": "graphs", "tree": TREE})
    assert len(launched) > 6


def test_memory_stays_flat() -> None:
    """Thirty calls of three lengths; then everything is let go."""
    model, head = on_gpu(tiny_llama()), random_head(tiny_llama()).to("cuda")
    used = []
    for number in range(30):
        prompt = random_prompt(model, (10, 200, 30)[number % 3], number).to("cuda")
        speculate(model, prompt, drafter=head, max_new_tokens=20, microspec={"engine": "graphs", "tree": TREE})
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[-1] <= used[5]
    microspec_hf.release(model)
    assert torch.cuda.memory_allocated() < used[-1]
