"""Names of arms: what each means, and what is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from microspec_hf import TreeConfig
from microspec_hf.evaluation.arms import SUITES, Arm, Resources, parse_arm, parse_arms

TREE = TreeConfig(depth=2, top_k=3, num_nodes=6)


@pytest.fixture
def resources(tmp_path: Path) -> Resources:
    """Lists of 40,000 ids that tell their origin by their first id."""
    for first, name in enumerate(("frequency", "calibrated", "drafter")):
        ids = [first, *(i for i in range(40_000) if i != first)]
        (tmp_path / f"{name}.json").write_text(json.dumps(ids))
    lists = {f"{name}_list": str(tmp_path / f"{name}.json") for name in ("frequency", "calibrated", "drafter")}
    return Resources(TREE, **lists, coral="routers/coral", dynaspec="routers/dynaspec")


def test_plain_arms_have_no_configuration() -> None:
    assert parse_arm("plain", Resources()) == Arm("plain")
    assert parse_arm("plain-static", Resources()) == Arm("plain-static", is_static=True)


@pytest.mark.parametrize(
    ("name", "kind", "first", "length"),
    [
        ("fr-spec-16k", "static", 0, 16384),
        ("fr-spec-512", "static", 0, 512),
        ("vocabtrim-8k", "static", 1, 8192),
        ("vocabtrim-drafter-1k", "static", 2, 1024),
    ],
)
def test_lists(resources: Resources, name: str, kind: str, first: int, length: int) -> None:
    config = parse_arm(name, resources).config
    assert config is not None
    assert config.vocabulary.kind == kind
    assert config.vocabulary.token_ids is not None
    assert (config.vocabulary.token_ids[0], len(config.vocabulary.token_ids)) == (first, length)
    assert (config.tree, config.fallback) == (TREE, False)


def test_routers(resources: Resources) -> None:
    coral, dynaspec = (parse_arm(name, resources).config for name in ("coral-32k", "dynaspec-27k"))
    assert coral is not None
    assert dynaspec is not None
    assert (coral.vocabulary.kind, coral.vocabulary.max_rows) == ("coral", 32768)
    assert (coral.vocabulary.router, coral.vocabulary.floor) == ("routers/coral", 0)
    core = dynaspec.vocabulary.token_ids
    assert (dynaspec.vocabulary.kind, dynaspec.vocabulary.max_rows) == ("dynaspec", 27 * 1024)
    assert core is not None
    assert dynaspec.vocabulary.floor == len(core) == 27 * 256
    bare = parse_arm("dynaspec-1k:floor=0", Resources(dynaspec="d")).config
    assert bare is not None
    assert (bare.vocabulary.floor, bare.vocabulary.token_ids) == (0, None)


def test_options(resources: Resources) -> None:
    name = "microspec:max_rows=1024:verify_nodes=path:floor=9:depth=1:nodes=5:top_k=2"
    arm = parse_arm(name, resources)
    assert arm.config is not None
    assert arm.config.tree == TreeConfig(depth=1, top_k=2, num_nodes=5)
    vocabulary = arm.config.vocabulary
    assert (vocabulary.kind, vocabulary.max_rows, vocabulary.verify_nodes) == ("dynamic", 1024, "path")
    assert vocabulary.token_ids == (0, 1, 2, 3, 4, 5, 6, 7, 8)
    assert arm.file_name == name.replace(":", "+") + ".jsonl"
    described = json.loads(json.dumps(arm.describe()))["vocabulary"]
    assert described["token_ids"] == "9 ids"
    assert described["verify_candidates"] == 36  # the defaults' for five nodes


def test_ablations(resources: Resources) -> None:
    options = ("prompt", "packed", "overlap")
    for option in options:
        arm = parse_arm(f"microspec:{option}=off", resources)
        assert arm.config is not None
        assert [name for name in options if not getattr(arm.config.vocabulary, name)] == [option]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("medusa", "There is no arm 'medusa'"),
        ("fr-spec", "There is no arm 'fr-spec'.*SIZE such as 512 or 16k"),
        ("fr-spec-0k", "There is no arm"),
        ("fr-spec-16m", "There is no arm"),
        ("fr-spec-99k", "asks for 101376 ids, but its list holds only 40000"),
        ("fr-spec-8k:max_rows=5", "has no option max_rows"),
        ("eagle2:window=lru", "has no option window"),
        ("plain:depth=3", "has no options"),
        ("microspec:width=3", "'width=3' in the arm .* these options: depth, top_k, nodes, max_rows"),
        ("microspec:depth", "no OPTION=VALUE"),
        ("microspec:window=fifo", "window must be one of"),
        ("microspec:packed=3", "packed must be one of True, False"),
        ("eagle2:packed=off", "has no option packed"),
        ("microspec:depth=99", "depth must be an integer from 0 to 15"),
    ],
)
def test_impossible_arms(resources: Resources, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_arm(name, resources)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("fr-spec-8k", "frequency_list"),
        ("vocabtrim-8k", "calibrated_list"),
        ("vocabtrim-drafter-8k", "drafter_list"),
        ("coral-8k", "coral"),
        ("dynaspec-8k", "dynaspec"),
        ("microspec:floor=5", "frequency_list"),
    ],
)
def test_a_missing_resource_is_named(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"The arm {name} needs --{option}"):
        parse_arm(name, Resources())


def test_suites(resources: Resources) -> None:
    resources = dataclasses.replace(resources, tree=TreeConfig())
    for suite in SUITES:
        arms = parse_arms([], [suite], resources)
        assert [arm.name for arm in arms] == list(SUITES[suite])
        assert len({arm.file_name for arm in arms}) == len(arms)
        configs = [json.dumps(arm.config and arm.config.to_dict()) for arm in arms]
        assert len(set(configs)) == len(arms) - ("plain-static" in SUITES[suite])  # no arm is another's twin
    both = parse_arms(["eagle2", "plain"], ["smoke", "window"], resources)
    assert [arm.name for arm in both] == list(dict.fromkeys([*SUITES["smoke"], *SUITES["window"]]))
    with pytest.raises(ValueError, match=r"no suite tables\. Suites: paper, "):
        parse_arms([], ["tables"], resources)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        parse_arms([], [], resources)
