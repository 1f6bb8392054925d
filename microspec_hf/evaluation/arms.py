"""Arms of an evaluation by name: one engine and one drafter, another draft vocabulary or another tree.

    plain, plain-static       the target alone: stock generate(), and with its static cache (compiled on a GPU)
    eagle2                    the whole LM head
    fr-spec-SIZE              the most frequent ids of a corpus, or a released list
    vocabtrim-SIZE            the ids that the target emits most on calibration prompts
    vocabtrim-drafter-SIZE    likewise the ids that the drafter proposes most
    coral-SIZE                a trained router chooses groups of ids for each draft token
    dynaspec-SIZE             a trained router chooses clusters of ids for each pass, beside a core of a quarter of SIZE
    microspec                 the defaults

A SIZE is a number of rows of the LM head, such as 512 or 16k (16,384). Options follow behind colons:
`microspec:max_rows=1024:verify_nodes=path`, `microspec:packed=off`, `eagle2:depth=3:nodes=30`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from microspec_hf.config import MicroSpecConfig, TreeConfig, VocabularyConfig
from microspec_hf.vocabulary import load_token_ids

TREE_OPTIONS = {"depth": "depth", "top_k": "top_k", "nodes": "num_nodes"}
VOCABULARY_OPTIONS = (
    *("max_rows", "prompt_candidates", "verify_candidates", "verify_nodes", "window", "floor"),
    *("prompt", "packed", "overlap"),
)

_OWN_OPTIONS = {"microspec": VOCABULARY_OPTIONS, "coral": ("floor",), "dynaspec": ("floor",)}

SUITES: dict[str, tuple[str, ...]] = {
    "paper": (
        "plain",
        "plain-static",
        "eagle2",
        *(f"{method}-{size}" for method in ("fr-spec", "vocabtrim") for size in ("8k", "16k", "32k")),
        "coral-32k",
        "dynaspec-27k",
        "microspec",
        # The paper's ablation: the prompt only (drafts bring in no new id), the rounds only, both with rows read by
        # their ids, and both with packed rows that are copied on the same stream.
        "microspec:verify_candidates=0",
        "microspec:prompt=off",
        "microspec:packed=off",
        "microspec:overlap=off",
    ),
    "static-sizes": (
        "plain",
        "eagle2",
        *(f"fr-spec-{size}" for size in ("512", "1k", "2k", "4k", "8k", "16k", "32k")),
        "microspec",
    ),
    "window": (
        "microspec",
        *(f"microspec:max_rows={rows}" for rows in (1024, 2048, 4096, 8192)),
        "microspec:window=stream",
    ),
    "candidates": (
        "microspec",
        *(f"microspec:prompt_candidates={k}" for k in (0, 1, 5)),
        *(f"microspec:verify_candidates={k}" for k in (0, 1, 2, 5)),
        "microspec:verify_nodes=path",
    ),
    "floor": ("microspec", "microspec:floor=512", "microspec:floor=2048"),
    "tree": (
        "microspec",
        *(f"microspec:depth={depth}" for depth in (2, 3, 4, 6)),
        *(f"microspec:nodes={nodes}" for nodes in (8, 16, 32, 48)),
    ),
    "smoke": ("plain", "eagle2", "microspec"),
}
"""Arms that belong together; `"paper"` is the paper's Table 1 and its ablation as far as acceptance goes."""


@dataclass(frozen=True)
class Resources:
    """What arms are made of beside target and drafter.

    Args:
        tree: the draft tree of all arms that name no other.
        frequency_list: ids by their frequency in a corpus, for fr-spec, dynaspec's core and floors.
        calibrated_list: ids by how often the target emits them, for vocabtrim.
        drafter_list: ids by how often the drafter proposes them, for vocabtrim-drafter.
        coral, dynaspec: folders of trained routers.
        time_drafts: see `MicroSpecConfig`.
    """

    tree: TreeConfig = dataclasses.field(default_factory=TreeConfig)
    frequency_list: str | None = None
    calibrated_list: str | None = None
    drafter_list: str | None = None
    coral: str | None = None
    dynaspec: str | None = None
    time_drafts: bool = False

    def need(self, name: str, arm: str) -> str:
        """The file or folder behind an option.

        Raises:
            ValueError: it was not given.
        """
        value: str | None = getattr(self, name)
        if value is None:
            raise ValueError(f"The arm {arm} needs --{name} (see examples/README.md for how to make it).")
        return value


@dataclass(frozen=True)
class Arm:
    """One way to answer.

    Args:
        name: as it was asked for.
        config: of the speculative call; None: the target alone.
        is_static: the target alone, with its static cache.
    """

    name: str
    config: MicroSpecConfig | None = None
    is_static: bool = False

    @property
    def file_name(self) -> str:
        """Name of the arm's result file."""
        return self.name.replace(":", "+") + ".jsonl"

    def describe(self) -> dict[str, Any]:
        """JSON-ready: every option, of lists of ids the length only."""
        if self.config is None:
            return {"plain": True, "static_cache": self.is_static}
        described = self.config.to_dict()
        ids = described["vocabulary"]["token_ids"]
        if isinstance(self.config.tree, TreeConfig):  # by the tree, where it is left open
            wanted = self.config.vocabulary.verify_candidates_of(self.config.tree.num_nodes)
            described["vocabulary"]["verify_candidates"] = wanted
        described["vocabulary"]["token_ids"] = None if ids is None else f"{len(ids)} ids"
        return described


def parse_arms(names: Sequence[str], suites: Sequence[str], resources: Resources) -> list[Arm]:
    """The arms of some suites and some names, each once, in this order.

    Raises:
        ValueError: an unknown name, an impossible option, or a resource that was not given.
    """
    if unknown := [suite for suite in suites if suite not in SUITES]:
        raise ValueError(f"There is no suite {', '.join(unknown)}. Suites: {', '.join(SUITES)}.")
    wanted = dict.fromkeys([*(name for suite in suites for name in SUITES[suite]), *names])
    if not wanted:
        raise ValueError("There is nothing to evaluate: name a suite or some arms.")
    return [parse_arm(name, resources) for name in wanted]


def parse_arm(name: str, resources: Resources) -> Arm:
    """The arm that a name means; see the module's head.

    Raises:
        ValueError: as `parse_arms`.
    """
    base, *options = name.split(":")
    tree, vocabulary = _options(name, options)
    if base in ("plain", "plain-static"):
        if options:
            raise ValueError(f"The arm {base} is the target alone and has no options, got {name!r}.")
        return Arm(name, is_static=base == "plain-static")
    method, size = _method(name, base)
    if foreign := [option for option in vocabulary if option not in _OWN_OPTIONS.get(method, ())]:
        raise ValueError(f"The arm {name!r} has no option {', '.join(foreign)}; only its tree can be changed.")
    chosen = _vocabulary(name, method, size, vocabulary, resources)
    # Every pass drafts: arms that fall back to plain steps could not be compared.
    shape = dataclasses.replace(resources.tree, **tree)
    return Arm(name, MicroSpecConfig(shape, chosen, fallback=False, time_drafts=resources.time_drafts))


def _vocabulary(
    name: str, method: str, size: int | None, options: dict[str, Any], resources: Resources
) -> VocabularyConfig:
    if method == "eagle2":
        return VocabularyConfig("full", **options)
    if method in ("coral", "dynaspec"):
        options = {"max_rows": size, "router": resources.need(method, name)} | options
        if method == "dynaspec":
            options.setdefault("floor", options["max_rows"] // 4)
    if options.get("floor"):
        options["token_ids"] = load_token_ids(resources.need("frequency_list", name))[: options["floor"]]
    if method == "microspec":
        return VocabularyConfig(**options)
    if method in ("coral", "dynaspec"):
        return VocabularyConfig("coral" if method == "coral" else "dynaspec", **options)
    source = {"fr-spec": "frequency_list", "vocabtrim": "calibrated_list", "vocabtrim-drafter": "drafter_list"}[method]
    ids = load_token_ids(resources.need(source, name))
    if size is not None and size > len(ids):
        raise ValueError(f"The arm {name} asks for {size} ids, but its list holds only {len(ids)}.")
    return VocabularyConfig("static", token_ids=ids[:size], **options)


def _method(name: str, base: str) -> tuple[str, int | None]:
    if base in ("eagle2", "microspec"):
        return base, None
    if (sized := sized_method(base)) is None or sized[1] == 0:
        raise ValueError(
            f"There is no arm {name!r}. Arms are plain, plain-static, eagle2, fr-spec-SIZE, vocabtrim-SIZE, "
            "vocabtrim-drafter-SIZE, coral-SIZE, dynaspec-SIZE and microspec, with a SIZE such as 512 or 16k."
        )
    return sized


def sized_method(base: str) -> tuple[str, int] | None:
    """The method and size that a name such as `fr-spec-16k` says; None: it says none."""
    match = re.fullmatch(r"(fr-spec|vocabtrim|vocabtrim-drafter|coral|dynaspec)-(\d+)(k?)", base)
    return None if match is None else (match[1], int(match[2]) * (1024 if match[3] else 1))


def _options(name: str, options: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the tree and of the vocabulary."""
    tree: dict[str, Any] = {}
    vocabulary: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key not in (*TREE_OPTIONS, *VOCABULARY_OPTIONS):
            known = ", ".join((*TREE_OPTIONS, *VOCABULARY_OPTIONS))
            raise ValueError(f"{option!r} in the arm {name!r} is no OPTION=VALUE of these options: {known}.")
        if key in TREE_OPTIONS:
            tree[TREE_OPTIONS[key]] = _value(value)
        else:
            vocabulary[key] = _value(value)
    return tree, vocabulary


def _value(text: str) -> int | bool | str:
    if text in ("on", "off"):
        return text == "on"
    return int(text) if text.isdigit() else text
