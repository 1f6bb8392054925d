from __future__ import annotations

import json
from pathlib import Path

import pytest

from microspec_hf import TreeConfig
from microspec_hf.cli import options


def test_default_tree_measures_on_a_cpu_and_is_the_papers_elsewhere() -> None:
    assert options.parse_tree(None, "cpu") == "auto"
    assert options.parse_tree(None, "cuda") == TreeConfig(5, 10, 60)


def test_tree_in_words_and_numbers() -> None:
    assert options.parse_tree("auto", "cuda") == "auto"
    assert options.parse_tree("3,4,20") == TreeConfig(depth=3, top_k=4, num_nodes=20)


@pytest.mark.parametrize("text", ["", "5", "5,10", "5,10,60,1", "a,b,c", "5x10x60"])
def test_unreadable_tree_names_the_form(text: str) -> None:
    with pytest.raises(ValueError, match="DEPTH,TOP_K,NODES"):
        options.parse_tree(text)


def test_impossible_tree_is_refused_by_the_configuration() -> None:
    with pytest.raises(ValueError, match="num_nodes=60"):
        options.parse_tree("0,2,60")


def test_vocabularies(tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([7, 3, 5]))
    assert options.speculation("full").vocabulary.kind == "full"
    assert options.speculation("dynamic").vocabulary.kind == "dynamic"
    whole = options.speculation("static", ids).vocabulary
    assert (whole.kind, whole.token_ids, whole.size) == ("static", (7, 3, 5), None)
    assert options.speculation("static:2", ids).vocabulary.size == 2


@pytest.mark.parametrize("text", ["", "fast", "full:3", "static:many", "static:-1"])
def test_unknown_vocabulary_names_the_choices(text: str, tmp_path: Path) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[1]")
    with pytest.raises(ValueError, match="full, dynamic, static"):
        options.speculation(text, ids)


def test_static_without_a_list_says_where_lists_come_from() -> None:
    with pytest.raises(ValueError, match="--static-list FILE"):
        options.speculation("static:8192")


def test_sampling_arguments() -> None:
    greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    assert options.sampling(False, None, None, None) == greedy
    assert options.sampling(True, None, None, None) == {"do_sample": True}
    assert options.sampling(False, 0.7, None, 0.9) == {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    with pytest.raises(ValueError, match="--sample"):
        options.sampling(False, None, 50, None)
