"""Routers: small trained networks that choose parts of the vocabulary, and what CORAL and DynaSpec share.

A router belongs to one target and one drafter. It is trained by `examples/train_router.py` and lies in a folder:
`config.json` says what it is, `router.safetensors` holds its weights and the partition of the vocabulary.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from microspec_hf.config import VocabularyConfig
from microspec_hf.hf import TargetHead
from microspec_hf.tree import DraftTree, Verification
from microspec_hf.vocabulary.base import Counters, VocabularyStatistics, valid_ids

CONFIG, WEIGHTS = "config.json", "router.safetensors"

MAX_CACHED = 4
"""Loaded routers that are kept."""

MAX_PASSES = 16
"""Drafter passes of the deepest tree."""


@dataclass(frozen=True)
class RouterConfig:
    """What a router is.

    Args:
        kind: `"coral"` or `"dynaspec"`, the arm it was trained for.
        hidden_size: H of the target.
        vocab_size: V, rows of the target's LM head.
        num_groups: G, parts of the vocabulary.
        width: units of the hidden layer.
        target: Hub id or name of the target; None: not said.
    """

    kind: Literal["coral", "dynaspec"]
    hidden_size: int
    vocab_size: int
    num_groups: int
    width: int
    target: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("coral", "dynaspec"):
            raise ValueError(f"A router's kind must be 'coral' or 'dynaspec', got {self.kind!r}.")
        for name in ("hidden_size", "vocab_size", "num_groups", "width"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"A router's {name} must be an integer of at least 1, got {value!r}.")
        if self.num_groups > self.vocab_size:
            raise ValueError(f"{self.vocab_size} tokens cannot be parted into {self.num_groups} groups.")


class VocabularyRouter(nn.Module):
    """Two layers that tell from a drafter's hidden row which groups of the vocabulary its next token is in.

    Args:
        config: sizes.
        members: int `[V]`, every token id once: group by group, and in a group the most frequent first.
        sizes: int `[G]`, ids of each group.

    Raises:
        ValueError: the groups are no partition of the vocabulary.
    """

    members: Tensor
    sizes: Tensor

    def __init__(self, config: RouterConfig, members: Tensor, sizes: Tensor):
        super().__init__()
        _check_partition(config, members, sizes)
        self.config = config
        self.enter = nn.Linear(config.hidden_size, config.width)
        self.leave = nn.Linear(config.width, config.num_groups)
        self.register_buffer("members", members.to(torch.int32).clone())
        self.register_buffer("sizes", sizes.to(torch.int32).clone())

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits `[R, G]` over the groups for hidden rows `[R, H]`."""
        logits: Tensor = self.leave(nn.functional.silu(self.enter(hidden)))
        return logits

    @property
    def num_parameters(self) -> int:
        """Trained numbers."""
        return sum(p.numel() for p in self.parameters())

    @property
    def num_bytes(self) -> int:
        """Memory of the trained numbers in their precision; the partition takes another 4 (V + G)."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def group_of(self) -> Tensor:
        """int64 `[V]`, the group of each token id."""
        groups = torch.arange(self.config.num_groups, device=self.sizes.device)
        group_of = torch.empty_like(self.members, dtype=torch.int64)
        numbers = groups.repeat_interleave(self.sizes.long(), output_size=self.config.vocab_size)
        group_of[self.members.long()] = numbers
        return group_of

    def save(self, folder: str | Path) -> None:
        """Write `config.json` (with `num_parameters` and `num_bytes`) and `router.safetensors`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, folder / WEIGHTS)
        described = asdict(self.config) | {"num_parameters": self.num_parameters, "num_bytes": self.num_bytes}
        (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> VocabularyRouter:
        """The router that `save` wrote, frozen, on the CPU.

        Raises:
            FileNotFoundError: the folder lacks one of the two files.
            ValueError: a file holds something else; the message says what.
        """
        folder = Path(folder)
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                raise FileNotFoundError(
                    f"There is no {name} in {folder}. Pass the folder of a router that examples/train_router.py wrote."
                )
        config = _read_config(folder / CONFIG)
        try:
            tensors = load_file(folder / WEIGHTS)
        except SafetensorError as error:
            raise ValueError(f"{folder / WEIGHTS} is no safetensors file: {error}.") from error
        names = {"enter.weight", "enter.bias", "leave.weight", "leave.bias", "members", "sizes"}
        if tensors.keys() != names:
            raise ValueError(
                f"{folder / WEIGHTS} must hold the tensors {', '.join(sorted(names))}, got "
                f"{', '.join(sorted(tensors)) or 'none'}."
            )
        with torch.random.fork_rng(devices=[]):  # construction draws weights, and callers may be sampling
            router = cls(config, tensors["members"], tensors["sizes"])
        try:
            router.load_state_dict(tensors)
        except RuntimeError as error:
            raise ValueError(f"{folder / WEIGHTS} does not have the sizes that {CONFIG} says: {error}") from error
        return router.to(tensors["enter.weight"].dtype).requires_grad_(False).eval()


class RoutedVocabulary:
    """What CORAL and DynaSpec share: a router, ids that are always active, and the count of what was active.

    Always active are the stop ids and the first `floor` of `token_ids`; the router chooses among all others.

    Coverage and active ids are counted by drafter pass: of a token that was emitted at depth d, whether the pass that
    drafted depth d could propose it for any of its rows. A bonus token below the deepest level counts with the last
    pass.

    Args:
        head: the target's LM head.
        config: the router's folder, `max_rows`, and the ids that are always active.
        stop_ids: ids that end a text.
        top_k: children of a node; more than there are active ids is allowed.

    Raises:
        FileNotFoundError: the router's folder lacks its files.
        ValueError: the router is of another kind or for another head, or the floor does not fit.
    """

    prompt_candidates = 0
    verify_candidates = 0

    def __init__(self, head: TargetHead, config: VocabularyConfig, stop_ids: Sequence[int], top_k: int):
        assert config.router is not None
        if config.floor > config.max_rows:
            raise ValueError(
                f"floor={config.floor} keeps more ids active than max_rows={config.max_rows} allows. "
                "Raise max_rows or lower floor."
            )
        self.head, self.top_k = head, top_k
        device, vocab_size = head.device, head.weight.shape[0]
        self.router = load_router(config.router, config.kind, head)
        pinned = valid_ids((*stop_ids, *(config.token_ids or ())[: config.floor]), head)
        self.pinned = torch.tensor(pinned, dtype=torch.int64, device=device)
        self.room = max(0, config.max_rows - len(pinned))  # rows for the router to fill
        # Which ids each pass of the round could propose: a fixed buffer, so that a captured round finds it again.
        self._is_active = torch.zeros(MAX_PASSES, vocab_size, dtype=torch.bool, device=device)
        self._num_passes = 0
        self._counters = Counters(device)

    def begin(self, prompt: Tensor, candidates: Tensor | None) -> None:
        self._counters.reset()

    def prepare(self) -> None:
        """A new round begins."""
        self._num_passes = 0

    def observe(self, tree: DraftTree, candidates: Tensor, verification: Verification) -> None:
        passes, self._num_passes = self._num_passes, 0
        if not passes:
            return  # nothing was drafted in this round, so that no vocabulary was active
        emitted = verification.emitted
        drafted_by = torch.arange(emitted.shape[0], device=emitted.device).clamp(max=passes - 1)
        is_covered = self._is_active[drafted_by, emitted.clamp(min=0)]
        self._counters.add_round(self._is_active[:passes].sum() // passes, emitted, is_covered)

    def statistics(self, drops_last: bool = False) -> VocabularyStatistics:
        return self._counters.read(drops_last)

    def _next_pass(self) -> Tensor:
        """bool `[V]`, to be filled with the ids that the pass which begins can propose."""
        self._num_passes += 1
        return self._is_active[min(self._num_passes, MAX_PASSES) - 1]


def load_router(folder: str | Path, kind: str, head: TargetHead) -> VocabularyRouter:
    """A router on the device and in the dtype of a head, as an earlier call left it or read anew.

    Raises:
        FileNotFoundError: the folder lacks its files.
        ValueError: it is of another kind, or for another head.
    """
    weights = Path(folder) / WEIGHTS
    written = weights.stat().st_mtime_ns if weights.is_file() else 0
    key = (str(folder), written, head.dtype, head.device)
    if key not in _cache:
        _cache[key] = VocabularyRouter.load(folder).to(head.device, head.dtype)
        if len(_cache) > MAX_CACHED:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    router = _cache[key]
    config, (vocab_size, hidden_size) = router.config, head.weight.shape
    if config.kind != kind:
        raise ValueError(f"The router in {folder} was trained for {config.kind}, and the vocabulary is {kind}.")
    if (config.vocab_size, config.hidden_size) != (vocab_size, hidden_size):
        raise ValueError(
            f"The router in {folder} is for an LM head of {config.vocab_size} rows of {config.hidden_size}, and the "
            f"target's has {vocab_size} of {hidden_size}. Train one for this target with examples/train_router.py."
        )
    return router


def clear_routers() -> None:
    """Let go of all loaded routers."""
    _cache.clear()


_cache: OrderedDict[tuple[object, ...], VocabularyRouter] = OrderedDict()


def _read_config(file: Path) -> RouterConfig:
    try:
        values: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold a JSON object, got a {type(values).__name__}.")
    needed = [field.name for field in fields(RouterConfig) if field.name != "target"]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"{file} lacks {', '.join(missing)}; it is not the config.json of a router.")
    return RouterConfig(**{name: values[name] for name in needed}, target=values.get("target"))


def _check_partition(config: RouterConfig, members: Tensor, sizes: Tensor) -> None:
    everyone = torch.arange(config.vocab_size, device=members.device)
    if members.shape != everyone.shape or not torch.equal(members.long().sort().values, everyone):
        raise ValueError(f"members must name each of the {config.vocab_size} token ids once.")
    if sizes.shape != (config.num_groups,) or int(sizes.min()) < 0 or int(sizes.sum()) != config.vocab_size:
        raise ValueError(
            f"sizes must be {config.num_groups} numbers from 0 on with the sum {config.vocab_size}, got "
            f"{tuple(sizes.shape)} with the sum {int(sizes.sum())}."
        )
