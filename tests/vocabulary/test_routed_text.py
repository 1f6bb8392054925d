"""With a router that chooses at random the text is the target's own all the same, also sampled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import PreTrainedModel

from microspec_hf import MicroSpecConfig, TreeConfig
from microspec_hf.hf import Target
from microspec_hf.vocabulary import clear_routers, coral, make_vocabulary
from tests import tiny
from tests.doubles import controlled_pair, nan_head, plain, random_head, random_prompt, speculate
from tests.test_loop import Reads
from tests.vocabulary.heads import hidden_rows, make_head, make_tree, make_verification
from tests.vocabulary.routers import make_router, routed

TREE = TreeConfig(depth=3, top_k=4, num_nodes=20)
Kind = Literal["coral", "dynaspec"]


@pytest.fixture(autouse=True)
def _no_routers() -> None:
    clear_routers()


def configuration(
    model: PreTrainedModel, kind: Kind, folder: Path, max_rows: int, num_groups: int = 8
) -> MicroSpecConfig:
    router = make_router(Target(model).head, kind, num_groups)
    return MicroSpecConfig(
        TREE, routed(folder, router, max_rows=max_rows, token_ids=(3, 4, 5), floor=3), fallback=False
    )


@pytest.mark.parametrize("kind", ["coral", "dynaspec"])
def test_text_is_the_targets(kind: Kind, tiny_target: PreTrainedModel, tmp_path: Path) -> None:
    prompt = random_prompt(tiny_target)
    config = configuration(tiny_target, kind, tmp_path, max_rows=40)
    output = speculate(tiny_target, prompt, max_new_tokens=24, microspec=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain(tiny_target, prompt, max_new_tokens=24))
    assert 3 < output.stats[0].mean_active_vocabulary < tiny_target.config.vocab_size


@pytest.mark.parametrize("kind", ["coral", "dynaspec"])
def test_coverage_decides_acceptance(kind: Kind, tmp_path: Path) -> None:
    """A drafter that knows the target: everything active is accepted, and nothing else."""
    model, head = controlled_pair(0.0)
    prompt = random_prompt(model)
    answers: list[Any] = []
    for rows in (20, 50, 120):
        config = configuration(model, kind, tmp_path / str(rows), max_rows=rows, num_groups=10)
        answers.append(
            speculate(model, prompt, drafter=head, max_new_tokens=60, microspec=config, return_dict_in_generate=True)
        )
    stats = [answer.stats[0] for answer in answers]
    for answer in answers:
        assert torch.equal(answer.sequences, plain(model, prompt, max_new_tokens=60))
    assert stats[0].coverage < stats[1].coverage < stats[2].coverage == 1.0
    assert stats[0].acceptance_length < stats[1].acceptance_length < stats[2].acceptance_length
    full = speculate(
        model,
        prompt,
        drafter=head,
        max_new_tokens=60,
        microspec=MicroSpecConfig(TREE, "full", fallback=False),
        return_dict_in_generate=True,
    ).stats[0]
    assert stats[2].emitted == full.emitted
    assert stats[2].mean_active_vocabulary == 101


@pytest.mark.parametrize("kind", ["coral", "dynaspec"])
def test_sampling_is_reproducible_from_the_first_call_on(
    kind: Kind, tiny_llama: PreTrainedModel, tmp_path: Path
) -> None:
    """The first call reads the router from its file, which must not move the random state."""
    prompt = random_prompt(tiny_llama)
    config = configuration(tiny_llama, kind, tmp_path, max_rows=40)
    texts = []
    for _ in range(2):
        torch.manual_seed(5)
        texts.append(speculate(tiny_llama, prompt, max_new_tokens=16, microspec=config, do_sample=True))
    assert torch.equal(*texts)


@pytest.mark.parametrize("kind", ["coral", "dynaspec"])
def test_a_head_of_nan_changes_nothing(kind: Kind, tiny_llama: PreTrainedModel, tmp_path: Path) -> None:
    prompt = random_prompt(tiny_llama)
    config = configuration(tiny_llama, kind, tmp_path, max_rows=40)
    written = speculate(tiny_llama, prompt, drafter=nan_head(tiny_llama), max_new_tokens=9, microspec=config)
    assert torch.equal(written, plain(tiny_llama, prompt, max_new_tokens=9))


@pytest.mark.parametrize("kind", ["coral", "dynaspec"])
def test_float64_and_bfloat16_heads(kind: Kind, tmp_path: Path) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        model = tiny.tiny_llama(dtype=dtype)
        config = configuration(model, kind, tmp_path / str(dtype), max_rows=40)
        head = random_head(model, dtype=dtype)
        output = speculate(model, random_prompt(model), drafter=head, max_new_tokens=9, microspec=config)
        assert output.shape[1] == 7 + 9


@torch.no_grad()
@pytest.mark.parametrize("kind", ["coral", "dynaspec"])
def test_a_round_reads_nothing_back(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the look at a CPU tensor in `ops/`, which other devices do without."""
    monkeypatch.setattr(coral, "chosen_groups", lambda is_chosen: None)
    head = make_head(60)
    router = make_router(head, kind, 6)
    vocabulary = make_vocabulary(routed(tmp_path, router, max_rows=20, token_ids=(7,), floor=1), head, [3], top_k=4)
    vocabulary.begin(torch.tensor([1]), None)
    shapes = []
    with Reads() as reads:
        for rows in (hidden_rows(4), -hidden_rows(4)):
            vocabulary.prepare()
            scores, tokens = vocabulary.topk(rows, 4)
            vocabulary.observe(make_tree([3, 7]), torch.empty(2, 0), make_verification([0, 1], [7, 5], num_slots=4))
            shapes.append((scores.shape, tokens.shape))
    assert reads.where == []
    assert shapes[0] == shapes[1]


class Stored:
    """Rows that are kept otherwise than as a plain matrix."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, weight: torch.Tensor):
        self.weight = weight

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, ids)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["coral", "dynaspec"])
def test_rows_of_a_quantised_head_are_read_as_it_reads_them(kind: Kind, tmp_path: Path) -> None:
    plain_head = make_head(60, bias=True)
    damaged = torch.full_like(plain_head.weight, torch.nan)  # what nobody may take for the head's rows
    head = dataclasses.replace(plain_head, weight=damaged, stored=Stored(plain_head.weight))  # type: ignore[arg-type]
    config = routed(tmp_path, make_router(plain_head, kind, 6), max_rows=30, token_ids=(7,), floor=1)
    answers = []
    for each in (plain_head, head):
        vocabulary = make_vocabulary(config, each, [3], top_k=4)
        vocabulary.begin(torch.tensor([1]), None)
        vocabulary.prepare()
        answers.append(vocabulary.topk(hidden_rows(4), 4))
    assert torch.equal(answers[0][1], answers[1][1])
    torch.testing.assert_close(answers[0][0], answers[1][0])
