"""Routers learn which part of the vocabulary comes next, and are usable afterwards."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, HfArgumentParser

from microspec_hf import MicroSpecConfig, TreeConfig, VocabularyConfig
from microspec_hf.hf import Target
from microspec_hf.training import router
from microspec_hf.training.router import RouterTrainConfig, group_mass, router_loss, train_router
from microspec_hf.vocabulary import VocabularyRouter, clear_routers
from tests.doubles import controlled_pair, plain, random_prompt, speculate
from tests.vocabulary.heads import hidden_rows, make_head

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_routers() -> None:
    clear_routers()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a target, of a drafter that knows its text, and of answers as a drafter's training leaves them."""
    folder = tmp_path_factory.mktemp("pair")
    model, head = controlled_pair(0.0)
    model.save_pretrained(folder / "target")
    head.save_pretrained(folder / "drafter")
    texts = torch.cat([plain(model, random_prompt(model, 5, seed), max_new_tokens=16) for seed in range(80)])
    (folder / "answers").mkdir()
    answers = {
        "ids": texts.flatten().to(torch.int32),
        "length": torch.full((80,), 21),
        "prompt": torch.full((80,), 5),
        "index": torch.arange(80),
    }
    save_file(answers, folder / "answers" / "0-00000.safetensors")
    return {name: str(folder / name) for name in ("target", "drafter", "answers")}


@pytest.mark.parametrize("kind", ["coral", "dynaspec"])
def test_learns_and_serves(kind: str, pair: dict[str, str], tmp_path: Path) -> None:
    options = {"groups": 10, "width": 32, "unroll": 2, "batch_tokens": 512, "heldout": 0.2, "learning_rate": 0.01}
    config = RouterTrainConfig(kind=kind, **pair, output=str(tmp_path / "router"), epochs=12, **options)
    record = train_router(config, progress=False)
    assert record == json.loads((tmp_path / "router" / "training.json").read_text())
    assert str(tmp_path) not in json.dumps(record)
    assert record["loss"][-1] < record["loss"][0] - 0.3
    recall = record["recall"]
    assert list(recall) == ["1", "2", "4", "8", "10"]
    assert recall["10"] == [1.0, 1.0]
    assert record["heldout_rows"] > 50
    assert recall["4"][0] > 0.6  # chance is 0.4
    assert recall["1"] < recall["4"] < recall["8"]
    loaded = VocabularyRouter.load(tmp_path / "router")
    assert (record["num_parameters"], record["num_bytes"]) == (loaded.num_parameters, loaded.num_bytes)
    assert record["share_of_lm_head"] == loaded.num_parameters / (101 * 48)
    assert loaded.config.target == "target"

    model = AutoModelForCausalLM.from_pretrained(pair["target"]).eval()
    vocabulary = VocabularyConfig(kind=kind, router=str(tmp_path / "router"), max_rows=40)  # type: ignore[arg-type]
    trained = MicroSpecConfig(TreeConfig(2, 3, 8), vocabulary, fallback=False)
    prompt = random_prompt(model)
    arguments: dict[str, Any] = {"max_new_tokens": 24, "return_dict_in_generate": True}
    output = speculate(model, prompt, drafter=pair["drafter"], microspec=trained, **arguments)
    assert torch.equal(output.sequences, plain(model, prompt, max_new_tokens=24))
    assert output.stats[0].coverage > 0.4


def test_is_reproducible(pair: dict[str, str], tmp_path: Path) -> None:
    configs = [RouterTrainConfig("coral", **pair, output=str(tmp_path / n), groups=5, width=8) for n in "ab"]
    records = [train_router(config, progress=False) for config in configs]
    assert records[0]["loss"] == records[1]["loss"]
    a, b = (VocabularyRouter.load(tmp_path / n) for n in "ab")
    assert torch.equal(a.enter.weight, b.enter.weight)


def test_never_trains_on_heldout_prompts(pair: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = router._Run.__init__

    def spy(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        seen.append((set(self.training), set(self.testing), len(self.sequences)))

    monkeypatch.setattr(router._Run, "__init__", spy)
    options = {"groups": 5, "width": 8, "heldout": 0.3}
    train_router(RouterTrainConfig("coral", **pair, output=str(tmp_path / "a"), **options), progress=False)
    train_router(
        RouterTrainConfig("coral", **pair, output=str(tmp_path / "b"), max_answers=5, **options), progress=False
    )
    (training, testing, total), (few, same, _) = seen
    assert min(len(training), len(testing)) > 0
    assert not training & testing
    assert len(training | testing) == total
    assert len(few) == 5
    assert few <= training
    assert same == testing


def test_mass_of_groups() -> None:
    head = make_head(20, bias=True, scale=0.5)
    group_of = torch.arange(20) % 3
    hidden = hidden_rows(4)
    with torch.no_grad():
        mass, top = group_mass(head, hidden, group_of, 3)
        probabilities = head(hidden).softmax(-1)
    for row in range(4):
        for group in range(3):
            assert mass[row, group] == pytest.approx(float(probabilities[row, group::3].sum()), abs=1e-6)
        assert top[row] == probabilities[row].argmax() % 3
    uniform = router_loss(torch.zeros(4, 3), mass)
    assert float(uniform) == pytest.approx(float(torch.tensor(3.0).log()))
    assert router_loss(mass.log(), mass) < uniform


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "static"}, "kind must be one of 'coral', 'dynaspec', got 'static'"),
        ({"groups": 0}, "groups must be at least 1, got 0"),
        ({"max_answers": 0}, "max_answers must be more than 0 or left out, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be more than 0"),
        ({"heldout": 1.0}, "heldout must be a share"),
    ],
)
def test_impossible_options(changes: dict[str, Any], words: str) -> None:
    options = {"kind": "coral", "target": "t", "drafter": "d", "answers": "a", "output": "o"} | changes
    with pytest.raises(ValueError, match=words):
        RouterTrainConfig(**options)


def test_no_answers(pair: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no answers"):
        train_router(RouterTrainConfig("coral", **(pair | {"answers": str(tmp_path)}), output=str(tmp_path / "r")))


def test_the_example(
    pair: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("train_router")
    arguments = [
        "--kind",
        "coral",
        "--output",
        str(tmp_path / "r"),
        "--groups",
        "4",
        "--width",
        "8",
        "--heldout",
        "0.2",
    ]
    pairs = [part for name, value in pair.items() for part in (f"--{name}", value)]
    (config,) = HfArgumentParser(RouterTrainConfig).parse_args_into_dataclasses([*arguments, *pairs])
    example.main(config)
    shown = capsys.readouterr().out
    numbers = Target(AutoModelForCausalLM.from_pretrained(pair["target"])).hidden_size * 8 + 8 + 8 * 4 + 4
    assert f"{numbers} parameters" in shown
    assert "in the best 2 groups" in shown
    assert VocabularyRouter.load(tmp_path / "r").config.num_groups == 4
