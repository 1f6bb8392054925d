"""Routers on disk: there and back, what is refused, and what of them is reported."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from microspec_hf.config import MicroSpecConfig, VocabularyConfig
from microspec_hf.vocabulary import RouterConfig, VocabularyRouter, clear_routers, make_vocabulary
from microspec_hf.vocabulary.router import MAX_CACHED, _cache, load_router
from tests.vocabulary.heads import HIDDEN, hidden_rows, make_head
from tests.vocabulary.routers import groups_of, make_router, routed


@pytest.fixture(autouse=True)
def _no_routers() -> None:
    clear_routers()


def test_there_and_back(tmp_path: Path) -> None:
    router = make_router(make_head(60), "dynaspec", 3, sizes=[10, 0, 50])
    router.save(tmp_path / "a" / "router")
    before = torch.random.get_rng_state()
    loaded = VocabularyRouter.load(tmp_path / "a" / "router")
    assert torch.equal(torch.random.get_rng_state(), before)  # loading happens within a call that may be sampling
    assert loaded.config == router.config
    assert torch.equal(loaded(hidden_rows(4)), router(hidden_rows(4)))
    assert groups_of(loaded) == groups_of(router)
    assert not any(p.requires_grad for p in loaded.parameters())
    for group, ids in enumerate(groups_of(loaded)):
        assert all(loaded.group_of()[i] == group for i in ids)


def test_size_is_reported(tmp_path: Path) -> None:
    router = make_router(make_head(60), "coral", 5)
    numbers = HIDDEN * 16 + 16 + 16 * 5 + 5
    assert (router.num_parameters, router.num_bytes) == (numbers, 4 * numbers)
    assert router.bfloat16().num_bytes == 2 * numbers
    router.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_parameters"], config["num_bytes"]) == (numbers, 2 * numbers)
    assert VocabularyRouter.load(tmp_path).enter.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["config.json", "router.safetensors"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    make_router(make_head(60), "coral", 5).save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"no {name} in .*train_router"):
        VocabularyRouter.load(tmp_path)


def test_broken_files(tmp_path: Path) -> None:
    make_router(make_head(60), "coral", 5).save(tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "router.safetensors"
    right = config.read_text()
    for text, words in [
        ("{", "not valid JSON"),
        ("[]", "JSON object, got a list"),
        ("{}", "lacks kind, hidden_size, vocab_size, num_groups, width"),
        (right.replace('"num_groups": 5', '"num_groups": 0'), "num_groups must be an integer of at least 1, got 0"),
        (right.replace("coral", "choral"), "'choral'"),
        (right.replace('"num_groups": 5', '"num_groups": 4'), r"4 numbers .*sum 60, got \(5,\) with the sum 60"),
        (right.replace('"width": 16', '"width": 8'), "does not have the sizes that config.json says"),
    ]:
        config.write_text(text)
        with pytest.raises(ValueError, match=words):
            VocabularyRouter.load(tmp_path)
    config.write_text(right)
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if name != "sizes"}, weights)
    with pytest.raises(ValueError, match=r"must hold the tensors .*sizes, got enter\.bias"):
        VocabularyRouter.load(tmp_path)
    weights.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no safetensors file"):
        VocabularyRouter.load(tmp_path)


def test_a_partition_names_every_id_once() -> None:
    config = RouterConfig("dynaspec", hidden_size=4, vocab_size=6, num_groups=2, width=3)
    with pytest.raises(ValueError, match="each of the 6 token ids once"):
        VocabularyRouter(config, torch.tensor([0, 1, 2, 3, 4, 4]), torch.tensor([3, 3]))
    with pytest.raises(ValueError, match=r"sum 6, got \(2,\) with the sum 5"):
        VocabularyRouter(config, torch.arange(6), torch.tensor([3, 2]))
    with pytest.raises(ValueError, match="6 tokens cannot be parted into 7"):
        RouterConfig("dynaspec", hidden_size=4, vocab_size=6, num_groups=7, width=3)


def test_a_router_of_another_kind_or_head_is_refused(tmp_path: Path) -> None:
    head = make_head(60)
    routed(tmp_path, make_router(head, "coral", 5))
    with pytest.raises(ValueError, match="trained for coral, and the vocabulary is dynaspec"):
        make_vocabulary(VocabularyConfig(kind="dynaspec", router=str(tmp_path)), head, [], top_k=2)
    with pytest.raises(ValueError, match=f"60 rows of {HIDDEN}, and the target's has 61"):
        make_vocabulary(VocabularyConfig(kind="coral", router=str(tmp_path)), make_head(61), [], top_k=2)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        make_vocabulary(VocabularyConfig(kind="coral", router=str(tmp_path / "x")), head, [], top_k=2)


@pytest.mark.parametrize("kind", ["coral", "dynaspec"])
def test_configuration(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"A {kind} vocabulary needs router, .*train_router.py wrote, got None"):
        VocabularyConfig(kind=kind)  # type: ignore[arg-type]
    config = MicroSpecConfig(vocabulary=VocabularyConfig(kind=kind, router="folder"))  # type: ignore[arg-type]
    assert MicroSpecConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    head = make_head(60)
    ids = tuple(range(20))
    options = routed(tmp_path, make_router(head, kind, 5), token_ids=ids, floor=20, max_rows=19)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="floor=20 keeps more ids active than max_rows=19"):
        make_vocabulary(options, head, [], top_k=2)


def test_loaded_routers_are_kept_and_follow_the_file(tmp_path: Path) -> None:
    head = make_head(60)
    routers = [make_router(head, "coral", 5, seed=seed) for seed in range(MAX_CACHED + 2)]
    for number, router in enumerate(routers):
        router.save(tmp_path / str(number))
        loaded = load_router(tmp_path / str(number), "coral", head)
        assert load_router(tmp_path / str(number), "coral", head) is loaded
    assert len(_cache) == MAX_CACHED
    weights = tmp_path / "0" / "router.safetensors"
    first = load_router(tmp_path / "0", "coral", head)
    routers[1].save(tmp_path / "0")
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 10**9))
    second = load_router(tmp_path / "0", "coral", head)
    assert not torch.equal(first.enter.weight, second.enter.weight)
