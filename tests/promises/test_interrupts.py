"""Nothing is left behind: not by an error in the middle of a call, not by another thread, not by many calls."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from microspec_hf import generation
from microspec_hf.pace import Pace
from tests.doubles import controlled_pair, random_prompt, scripted
from tests.promises.support import Setting, call, failing_pass, setting, speculate
from tests.tiny import tiny_llama, tiny_mistral

SMALL = {"tree": {"depth": 2, "top_k": 3, "num_nodes": 8}}


def traces(where: Setting) -> dict[str, Any]:
    """All that a call could leave on a model."""
    model = where.model
    return {
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()},
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
        "training": model.training,
        "weights": sum(float(p.detach().double().sum()) for p in model.parameters()),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "random state": torch.random.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("number", [1, 2, 5], ids=lambda n: f"pass {n}")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("full")], ids=["interrupt", "memory"])
def test_call_after_a_broken_one(error: BaseException, number: int) -> None:
    where = setting()
    expected = call(where).sequences.tolist()
    speculate(where, microspec=SMALL)  # what is found out about a model once is known
    before = traces(where)
    cache = DynamicCache(config=where.model.config)
    with failing_pass(where.model, number, error), pytest.raises(type(error)):
        speculate(where, microspec=SMALL, **{where.cache_name: cache})
    assert traces(where) == before
    assert cache.get_seq_length() == 0  # a caller's cache is filled by a call that ends, or not at all
    assert speculate(where, microspec=SMALL).sequences.tolist() == expected
    assert call(where).sequences.tolist() == expected


def test_first_call_of_a_model_broken_in_its_check() -> None:
    model = tiny_llama(seed=5)
    prompt = random_prompt(model)
    where = Setting(model, prompt, ())
    with failing_pass(model, 1, torch.OutOfMemoryError("full")), pytest.raises(torch.OutOfMemoryError):
        speculate(where, microspec=SMALL)
    assert speculate(where, microspec=SMALL).sequences.tolist() == call(where).sequences.tolist()


def test_broken_call_keeps_no_tensors() -> None:
    where = setting()
    counts = []
    for _ in range(4):
        with failing_pass(where.model, 3, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            speculate(where, microspec=SMALL)
        counts.append(live_tensors())
    assert counts[1:] == counts[1:2] * 3


# Threads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [{}, {"repetition_penalty": 1.5, "output_scores": True}], ids=["plain", "processed"])
def test_two_threads_on_one_model(ask: dict[str, Any]) -> None:
    model, head = controlled_pair(scale=0.1)
    questions = [Setting(model, random_prompt(model, 5 + seed, seed), ()) for seed in range(6)]
    expected = [call(where, max_new_tokens=20, **ask).sequences.tolist() for where in questions]
    with ThreadPoolExecutor(max_workers=2) as pool:
        got = list(pool.map(lambda w: speculate(w, drafter=head, max_new_tokens=20, **ask), questions))
    assert [output.sequences.tolist() for output in got] == expected
    assert max(max(output.stats[0].emitted) for output in got) > 1


def test_two_threads_on_two_models() -> None:
    questions = [
        Setting(model, random_prompt(model, seed=seed), ())
        for seed in range(3)
        for model in (tiny_llama(seed=1), tiny_mistral(seed=1))
    ]
    expected = [call(where).sequences.tolist() for where in questions]
    with ThreadPoolExecutor(max_workers=2) as pool:
        got = list(pool.map(lambda where: speculate(where, microspec=SMALL).sequences.tolist(), questions))
    assert got == expected


def test_plain_and_speculative_calls_at_once() -> None:
    where = setting()
    expected = call(where).sequences.tolist()
    ways: list[Callable[..., Any]] = [call, lambda w: speculate(w, microspec=SMALL)] * 3
    with ThreadPoolExecutor(max_workers=2) as pool:
        got = list(pool.map(lambda decode: decode(where).sequences.tolist(), ways))
    assert got == [expected] * 6


# Many calls ---------------------------------------------------------------------------------------------------------


def live_tensors() -> tuple[int, int]:
    """How many tensors are alive, and how many bytes they hold."""
    gc.collect()
    alive = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
    return len(alive), sum(t.untyped_storage().nbytes() for t in alive if not t.is_meta)


def test_memory_is_flat_over_200_calls() -> None:
    model, head = controlled_pair(scale=0.1)
    where = Setting(model, random_prompt(model), ())
    lengths = [6, 2, 9]

    def calls(number: int) -> None:
        for i in range(number):
            prompt = random_prompt(model, length=4 + i % 9, seed=i % 5)
            speculate(Setting(model, prompt, ()), drafter=head, max_new_tokens=lengths[i % 3], microspec=SMALL)

    expected = call(where).sequences.tolist()
    calls(20)
    tensors, blocks = live_tensors(), sys.getallocatedblocks()
    calls(180)
    assert live_tensors() == tensors
    assert sys.getallocatedblocks() - blocks < 900  # five of Python's own objects a call would be more
    assert speculate(where, drafter=head, microspec=SMALL).sequences.tolist() == expected


def test_a_leak_would_be_noticed() -> None:
    tensors, blocks = live_tensors(), sys.getallocatedblocks()
    kept = [torch.zeros(3) for _ in range(180)]
    assert live_tensors() == (tensors[0] + 180, tensors[1] + 180 * 12)
    kept = [[object() for _ in range(6)] for _ in range(180)]
    assert sys.getallocatedblocks() - blocks > 900
    assert kept


# Seeds --------------------------------------------------------------------------------------------------------------


class Never(Pace):
    """Always drafts."""

    def record(self, tokens: float) -> None: ...


class Sometimes(Pace):
    """Every third step is a plain one."""

    def record(self, tokens: float) -> None:
        self._tokens += 1
        self.drafts = self._tokens % 3 != 0


def sampled(where: Setting, head: Any, seed: int, **ask: Any) -> list[list[int]]:
    torch.manual_seed(seed)
    output = speculate(where, drafter=head, do_sample=True, temperature=2.0, max_new_tokens=40, **ask)
    return output.sequences.tolist()


def test_seed_repeats_the_text() -> None:
    model, head = controlled_pair(scale=0.1)
    where = Setting(model, random_prompt(model), ())
    assert sampled(where, head, 1, microspec=SMALL) == sampled(where, head, 1, microspec=SMALL)
    assert sampled(where, head, 1, microspec=SMALL) != sampled(where, head, 2, microspec=SMALL)


def test_seed_repeats_the_text_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model, head = controlled_pair(scale=0.1)
    where = Setting(model, random_prompt(model), ())
    texts = []
    for pace in (Never, Sometimes):
        monkeypatch.setattr(generation, "Pace", pace)
        texts.append(sampled(where, head, 1, microspec=SMALL))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("ask", [{}, {"repetition_penalty": 1.3}, {"guidance_scale": 1.5}], ids=str)
def test_greedy_leaves_the_random_state_untouched(ask: dict[str, Any]) -> None:
    where = setting()
    torch.manual_seed(11)
    state = torch.random.get_rng_state()
    speculate(where, **ask)
    assert torch.equal(torch.random.get_rng_state(), state)
    with scripted(lambda upcoming, vocab_size, round_number: []):
        speculate(where, **ask)
    assert torch.equal(torch.random.get_rng_state(), state)
