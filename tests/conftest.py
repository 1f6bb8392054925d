"""Fixtures for all tests: tiny random targets and the small real model.

The hub is off: a test that would look something up there fails instead of waiting for a network.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read by huggingface_hub when it is imported, hence before the imports below

import functools
import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from microspec_hf import generation, models, pace
from microspec_hf.evaluation import provenance
from tests import tiny


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", help="Write how many tests of each file had which outcome.")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The result file of a run, with where it comes from."""
    if (file := config.getoption("--record")) is None:
        return
    by_file: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped", "xfailed", "xpassed"):
        for report in terminalreporter.getreports(outcome):
            by_file.setdefault(report.nodeid.partition("::")[0], Counter())[outcome] += 1
    total = sum(by_file.values(), Counter())
    record = {"provenance": provenance(command="pytest", markers=config.option.markexpr), "total": total}
    Path(file).write_text(json.dumps(record | {"files": dict(sorted(by_file.items()))}, indent=1) + "\n", "utf-8")


if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(min(2, os.cpu_count() or 1))  # more threads only slow models of this size down


@pytest.fixture(autouse=True)
def timeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No decision of a test depends on measured times: a clock that stands still finds plain steps no faster."""
    monkeypatch.setattr(generation, "Pace", functools.partial(pace.Pace, clock=lambda: 0.0))


class ChatModel(NamedTuple):
    """A target and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def chat(self, question: str) -> torch.Tensor:
        """Token ids `[1, L]` of `question` in the chat template, up to where the answer begins."""
        encoded = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        return encoded["input_ids"]


@pytest.fixture(scope="session")
def tiny_llama() -> PreTrainedModel:
    return tiny.tiny_llama()


@pytest.fixture(scope="session")
def tiny_qwen2() -> PreTrainedModel:
    return tiny.tiny_qwen2()


@pytest.fixture(scope="session")
def tiny_mistral() -> PreTrainedModel:
    return tiny.tiny_mistral()


@pytest.fixture(scope="session")
def tiny_gemma2() -> PreTrainedModel:
    return tiny.tiny_gemma2()


@pytest.fixture(scope="session")
def tiny_gemma3() -> PreTrainedModel:
    return tiny.tiny_gemma3()


@pytest.fixture(params=list(tiny.TINY_MODELS))
def tiny_target(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Each of the tiny targets in turn."""
    return request.getfixturevalue(f"tiny_{request.param}")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of the small real model; the first run on a machine downloads and converts it."""
    try:
        return models.smollm2()
    except ConnectionError as error:
        if "CI" in os.environ:
            raise
        pytest.skip(f"SmolLM2 is not in the cache and could not be downloaded: {error}")


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> ChatModel:
    """SmolLM2-135M-Instruct in float32 with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    return ChatModel(model.eval(), AutoTokenizer.from_pretrained(smollm2_folder))
