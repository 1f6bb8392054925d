"""Every option of a speculative call, checked where it is made.

`MicroSpecConfig` joins a `TreeConfig` (what is drafted) and a `VocabularyConfig` (over which rows of the LM head it
is drafted). All three are frozen; an impossible value is refused at construction. This module knows nothing of torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

MAX_NODES = 64
"""Ancestor masks are 64-bit words: one bit for each node of the tree, the root included."""

VERIFY_CANDIDATES = 3
"""K_ver of the paper, for its 60 nodes (MicroSpec section 5.1)."""
MOST_VERIFY_CANDIDATES = 64
"""The kernels' largest top-k."""


@dataclass(frozen=True)
class TreeConfig:
    """The shape of an EAGLE-2 draft tree (EAGLE-2 section 4; MicroSpec section 5.1: depth 5, 60 draft tokens).

    Args:
        depth: expansion passes after the prefix pass. Depth 5 gives 6 levels below the root, so at most 6 accepted
            drafts and 7 emitted tokens a round. SGLang and FR-Spec call `depth + 1` steps.
        top_k: children of each expanded node, and nodes expanded in each pass.
        num_nodes: nodes checked by the target in one pass, root included (EAGLE's `total_token`).
    """

    depth: int = 5
    top_k: int = 10
    num_nodes: int = 60

    def __post_init__(self) -> None:
        _require_int(self, "depth", low=0, high=15)
        _require_int(self, "top_k", low=1, high=64)
        _require_int(self, "num_nodes", low=1, high=MAX_NODES)
        if self.num_nodes - 1 > self.num_candidates:
            raise ValueError(
                f"num_nodes={self.num_nodes} asks for {self.num_nodes - 1} drafted nodes, but depth={self.depth} and "
                f"top_k={self.top_k} give only top_k + depth * top_k**2 = {self.num_candidates} candidates. "
                f"Lower num_nodes to at most {self.num_candidates + 1}, or raise depth or top_k."
            )

    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @property
    def num_levels(self) -> int:
        """Levels below the root: the most drafts that one round can accept."""
        return self.depth + 1

    @property
    def num_candidates(self) -> int:
        """Candidates from which the tree is chosen: the first level's and every expansion's."""
        return self.top_k + self.depth * self.top_k**2

    @property
    def num_path_slots(self) -> int:
        """Nodes on the longest path, root included: the most tokens that one round can emit."""
        return self.num_levels + 1


@dataclass(frozen=True)
class VocabularyConfig:
    """Over which rows of the target's LM head the drafter's scores are computed.

    Args:
        kind: `"full"` (EAGLE-2), `"static"` (FR-Spec, VocabTrim: the ids in `token_ids`), `"dynamic"` (MicroSpec),
            `"coral"` or `"dynaspec"` (a trained router chooses).
        token_ids: the ids of a static vocabulary, most frequent first; see `microspec_hf.vocabulary.load_token_ids`.
        size: static: how many of `token_ids` to keep (None: all).
        max_rows: dynamic: W_max, the most rows ever active ("W_max = 3072", MicroSpec section 5.1); coral: the most
            rows for one draft token, in whole groups and at least one; dynaspec: the rows of one drafter pass.
        prompt_candidates: dynamic: K_pre, the target's top ids kept for each prompt position (paper: 3).
        verify_candidates: dynamic: K_ver, the target's top ids kept for each verified node (paper: 3). None: as many
            as bring in what the paper's 60 nodes do; with the 3 of a small tree, the vocabulary would starve.
        verify_nodes: dynamic: which verified nodes feed C_ver. The paper's formula reads `"path"`; `"all"` measured
            96 % coverage against 87 % on real text, at equal cost.
        window: dynamic: `"stream"` is the formula, Unique(last W_max entries); `"lru"` keeps the W_max most recently
            seen distinct ids, so that repetitions do not push ids out.
        floor: dynamic, coral, dynaspec: how many of `token_ids` never leave (DynaSpec's static core), besides the stop
            ids, which never do.
        router: coral, dynaspec: folder of the trained router, see `examples/train_router.py`.
        overlap: dynamic: copy new rows on a side stream, beside the drafter's first pass (MicroSpec section 4.2).
        packed: dynamic: keep active rows side by side and copy only those that enter. Off, each drafter pass reads all
            of them from the LM head by their ids, as in the paper's ablation.
        prompt: dynamic: begin with the prompt's ids and the target's top ids of its positions. Off, the paper's
            ablation in which only drafts and verified nodes bring ids in.
    """

    kind: Literal["full", "static", "dynamic", "coral", "dynaspec"] = "dynamic"
    token_ids: tuple[int, ...] | None = None
    size: int | None = None
    max_rows: int = 3072
    prompt_candidates: int = 3
    verify_candidates: int | None = None
    verify_nodes: Literal["all", "path"] = "all"
    window: Literal["lru", "stream"] = "lru"
    floor: int = 0
    router: str | None = None
    overlap: bool = True
    packed: bool = True
    prompt: bool = True

    def __post_init__(self) -> None:
        _require_choice(self, "kind", ("full", "static", "dynamic", "coral", "dynaspec"))
        _require_choice(self, "verify_nodes", ("all", "path"))
        _require_choice(self, "window", ("lru", "stream"))
        _require_int(self, "max_rows", low=1)
        _require_int(self, "prompt_candidates", low=0)
        if self.verify_candidates is not None:
            _require_int(self, "verify_candidates", low=0)
        _require_int(self, "floor", low=0)
        for name in ("overlap", "packed", "prompt"):
            _require_choice(self, name, (True, False))
        if isinstance(self.token_ids, Iterable):  # a JSON list as well
            object.__setattr__(self, "token_ids", tuple(int(i) for i in self.token_ids))
        if self.kind == "static" and not self.token_ids:
            raise ValueError(
                "A static vocabulary needs token_ids, got none. Read a released list with "
                "microspec_hf.vocabulary.load_token_ids(path), or count one with count_token_ids(...)."
            )
        if self.kind in ("coral", "dynaspec") and not isinstance(self.router, str):
            raise ValueError(
                f"A {self.kind} vocabulary needs router, the folder that examples/train_router.py wrote, got "
                f"{self.router!r}."
            )
        if self.size is not None:
            _require_int(self, "size", low=1, high=len(self.token_ids or ()) or None)
        if self.floor and len(self.token_ids or ()) < self.floor:
            raise ValueError(
                f"floor={self.floor} keeps the {self.floor} most frequent ids active, but token_ids names only "
                f"{len(self.token_ids or ())}. Pass token_ids, most frequent first, or lower floor."
            )

    def verify_candidates_of(self, num_nodes: int) -> int:
        """K_ver for a tree of so many nodes."""
        if self.verify_candidates is not None:
            return self.verify_candidates
        return min(MOST_VERIFY_CANDIDATES, -(-VERIFY_CANDIDATES * TreeConfig.num_nodes // num_nodes))


@dataclass(frozen=True)
class MicroSpecConfig:
    """Options of one call: `model.generate(..., custom_generate="microspec", microspec=MicroSpecConfig(...))`.

    Args:
        tree: the draft tree, or `"auto"`: the target's cost by width is measured once and the tree that promises the
            most tokens a second on this machine is taken.
        vocabulary: the draft vocabulary, or just its kind (`"full"`, `"dynamic"`).
        prefill_chunk: prompt positions in one target pass (bounds the memory of a long prompt).
        engine: how rounds are run. `"eager"`: as they are. `"graphs"`: captured in CUDA graphs and replayed, where all
            of the model is on one GPU and the processors look at scores only; elsewhere eagerly. `"compiled"`:
            likewise, with the element-wise work of the layers compiled, which the first call waits for. `"auto"`:
            `"compiled"` on a GPU.
        fallback: measure whether drafting pays, and take plain steps where it does not (see `stats.switches`); never
            while sampling, where a seed must repeat the text. False: every pass drafts, so that acceptance lengths can
            be compared.
        time_drafts: measure how long drafting takes (`stats.draft_seconds`). Captured rounds then wait for each other.
    """

    tree: TreeConfig | Literal["auto"] = field(default_factory=TreeConfig)
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    prefill_chunk: int = 2048
    engine: Literal["auto", "eager", "graphs", "compiled"] = "auto"
    fallback: bool = True
    time_drafts: bool = False

    def __post_init__(self) -> None:
        tree: Any = self.tree
        if isinstance(tree, Mapping):
            object.__setattr__(self, "tree", _from_dict(TreeConfig, tree))
        elif not isinstance(tree, TreeConfig) and tree != "auto":
            raise ValueError(f'tree must be a TreeConfig, a dict of its fields or "auto", got {tree!r}.')
        vocabulary: Any = self.vocabulary
        if isinstance(vocabulary, str):
            object.__setattr__(self, "vocabulary", _from_dict(VocabularyConfig, {"kind": vocabulary}))
        elif isinstance(vocabulary, Mapping):
            object.__setattr__(self, "vocabulary", _from_dict(VocabularyConfig, vocabulary))
        elif not isinstance(vocabulary, VocabularyConfig):
            raise ValueError(
                f"vocabulary must be a VocabularyConfig, a dict of its fields or a kind, got {vocabulary!r}."
            )
        _require_int(self, "prefill_chunk", low=1)
        _require_choice(self, "engine", ("auto", "eager", "graphs", "compiled"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MicroSpecConfig:
        """The configuration that `to_dict` wrote; unknown keys are refused by name."""
        return cast(MicroSpecConfig, _from_dict(cls, values))

    @classmethod
    def coerce(cls, value: MicroSpecConfig | Mapping[str, Any] | None) -> MicroSpecConfig:
        """What the `microspec=` argument of `generate` accepts: a configuration, its dict, or None for the defaults."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise ValueError(f"microspec must be a MicroSpecConfig, a dict or None, got {type(value).__name__}.")

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict, nested like the configuration."""
        return dataclasses.asdict(self)


def _from_dict(cls: type[Any], values: Mapping[str, Any]) -> Any:
    known = [f.name for f in dataclasses.fields(cls)]
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"{cls.__name__} has no option {', '.join(unknown)}. Its options are: {', '.join(known)}.")
    return cls(**values)


def _require_int(config: object, name: str, low: int, high: int | None = None) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be an integer {bounds}, got {value!r}.")


def _require_choice(config: object, name: str, choices: tuple[str | bool, ...]) -> None:
    value = getattr(config, name)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
