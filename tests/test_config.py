"""Options: the paper's values, impossible ones refused where they are made, JSON there and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from microspec_hf import MicroSpecConfig, TreeConfig, VocabularyConfig


def test_defaults_are_the_papers() -> None:
    """MicroSpec section 5.1: depth 5, 60 draft tokens, W_max = 3072, K_pre = K_ver = 3."""
    config = MicroSpecConfig()
    assert config.tree == TreeConfig(depth=5, top_k=10, num_nodes=60)
    assert config.vocabulary.kind == "dynamic"
    assert config.vocabulary.max_rows == 3072
    assert (config.vocabulary.prompt_candidates, config.vocabulary.verify_candidates_of(60)) == (3, 3)


def test_numbers_of_the_papers_tree() -> None:
    """EAGLE's depth 5 is 6 levels: at most 6 accepted drafts and 7 tokens a round, out of 510 candidates."""
    tree = TreeConfig()
    assert (tree.num_levels, tree.num_path_slots, tree.num_candidates) == (6, 7, 510)
    shallow = TreeConfig(depth=0, top_k=4, num_nodes=5)
    assert (shallow.num_levels, shallow.num_path_slots, shallow.num_candidates) == (1, 2, 4)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"depth": 1, "top_k": 2, "num_nodes": 8}, ["num_nodes=8", "7 drafted", "= 6 candidates", "at most 7"]),
        ({"depth": -1}, ["depth", "from 0 to 15", "-1"]),
        ({"depth": 16}, ["depth", "16"]),
        ({"depth": 2.0}, ["depth", "integer", "2.0"]),
        ({"depth": True}, ["depth", "True"]),
        ({"top_k": 0}, ["top_k", "from 1 to 64", "0"]),
        ({"top_k": "10"}, ["top_k", "'10'"]),
        ({"num_nodes": 0}, ["num_nodes", "from 1 to 64", "0"]),
        ({"num_nodes": 65}, ["num_nodes", "65"]),
    ],
    ids=str,
)
def test_impossible_trees(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"must|asks for") as error:
        TreeConfig(**values)
    assert all(word in str(error.value) for word in words)


def test_largest_tree_of_each_shape_is_possible() -> None:
    for depth, top_k in [(0, 1), (0, 4), (1, 1), (1, 2), (3, 2), (15, 1)]:
        num_nodes = min(64, top_k + depth * top_k**2 + 1)
        assert TreeConfig(depth, top_k, num_nodes).num_nodes == num_nodes


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "pruned"}, ["kind", "'full', 'static', 'dynamic'", "'pruned'"]),
        ({"kind": "static"}, ["static", "token_ids", "load_token_ids"]),
        ({"kind": "static", "token_ids": ()}, ["static", "token_ids"]),
        ({"kind": "static", "token_ids": (1, 2), "size": 3}, ["size", "from 1 to 2", "3"]),
        ({"kind": "static", "token_ids": (1, 2), "size": 0}, ["size", "0"]),
        ({"max_rows": 0}, ["max_rows", "at least 1", "0"]),
        ({"max_rows": None}, ["max_rows", "None"]),
        ({"prompt_candidates": -1}, ["prompt_candidates", "-1"]),
        ({"verify_candidates": 1.5}, ["verify_candidates", "1.5"]),
        ({"verify_nodes": "some"}, ["verify_nodes", "'all', 'path'", "'some'"]),
        ({"window": "fifo"}, ["window", "'lru', 'stream'", "'fifo'"]),
        ({"floor": 3, "token_ids": (1, 2)}, ["floor=3", "2", "token_ids"]),
        ({"floor": 1}, ["floor=1", "token_ids"]),
    ],
    ids=str,
)
def test_impossible_vocabularies(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\.$") as error:
        VocabularyConfig(**values)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prefill_chunk": 0}, ["prefill_chunk", "at least 1"]),
        ({"tree": "deep"}, ["tree", '"auto"', "'deep'"]),
        ({"tree": 5}, ["tree", "5"]),
        ({"tree": {"width": 3}}, ["TreeConfig", "width", "depth, top_k, num_nodes"]),
        ({"vocabulary": 3072}, ["vocabulary", "3072"]),
        ({"vocabulary": "tiny"}, ["kind", "'tiny'"]),
        ({"vocabulary": {"rows": 3}}, ["VocabularyConfig", "rows", "max_rows"]),
    ],
    ids=str,
)
def test_impossible_configurations(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"\.$") as error:
        MicroSpecConfig(**values)
    assert all(word in str(error.value) for word in words)


def test_short_forms() -> None:
    assert MicroSpecConfig(vocabulary="full").vocabulary == VocabularyConfig(kind="full")  # type: ignore[arg-type]
    assert MicroSpecConfig(tree={"depth": 2}).tree == TreeConfig(depth=2)  # type: ignore[arg-type]
    assert MicroSpecConfig(tree="auto").tree == "auto"
    assert VocabularyConfig(kind="static", token_ids=[3, 1]).token_ids == (3, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config",
    [
        MicroSpecConfig(),
        MicroSpecConfig(tree="auto", prefill_chunk=64),
        MicroSpecConfig(TreeConfig(2, 4, 20), VocabularyConfig("static", token_ids=(5, 3, 9), size=2)),
        MicroSpecConfig(vocabulary=VocabularyConfig(window="stream", verify_nodes="path", floor=1, token_ids=(7,))),
    ],
)
def test_json_there_and_back(config: MicroSpecConfig) -> None:
    assert MicroSpecConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="MicroSpecConfig has no option threshold") as error:
        MicroSpecConfig.from_dict({"threshold": 1})
    assert "tree, vocabulary, prefill_chunk" in str(error.value)


def test_what_the_argument_of_generate_accepts() -> None:
    config = MicroSpecConfig(prefill_chunk=7)
    assert MicroSpecConfig.coerce(None) == MicroSpecConfig()
    assert MicroSpecConfig.coerce(config) is config
    assert MicroSpecConfig.coerce({"prefill_chunk": 7}) == config
    with pytest.raises(ValueError, match="MicroSpecConfig, a dict or None, got str"):
        MicroSpecConfig.coerce("full")  # type: ignore[arg-type]


def test_configurations_do_not_change() -> None:
    for config, field in ((MicroSpecConfig(), "tree"), (TreeConfig(), "depth"), (VocabularyConfig(), "kind")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field, None)
