"""FR-Spec and VocabTrim: a fixed list of frequent ids may be drafted."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from microspec_hf.hf import TargetHead
from microspec_hf.tree import DraftTree, Verification
from microspec_hf.vocabulary.base import Counters, PackedRows, VocabularyStatistics, valid_ids

MAX_CACHED = 4
"""Lists whose rows are kept for each LM head."""


class StaticVocabulary:
    """The rows of listed ids, as FR-Spec (frequency in a corpus) and VocabTrim (in emitted text) choose them.

    The stop ids are always added. The gathered rows are kept for as long as the LM head lives, so that the
    next text with the same list starts at once; `clear_cache` lets them go.

    Args:
        head: the target's LM head.
        token_ids: the ids; duplicates are dropped, and so are ids that the head has no row for, with a
            warning.
        stop_ids: ids that end a text.
        top_k: children of a node; more than there are listed ids is allowed.

    Raises:
        ValueError: no id of the list is a row of the head.
    """

    prompt_candidates = 0
    verify_candidates = 0

    def __init__(self, head: TargetHead, token_ids: Sequence[int], stop_ids: Sequence[int], top_k: int):
        _check_list(token_ids, head)
        self.head, self.top_k = head, top_k
        self._counters = Counters(head.device)
        self._list, num_gathered = _listed_rows(head, valid_ids((*token_ids, *stop_ids), head), top_k)
        self._counters.add_gathered(torch.tensor([num_gathered], device=head.device))
        self._is_used = False

    def begin(self, prompt: Tensor, candidates: Tensor | None) -> None:
        if self._is_used:  # what the first text gathered is counted with it
            self._counters.reset()
        self._is_used = True

    def prepare(self) -> None:
        """Nothing to copy."""

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return self._list.rows.topk(self.head, hidden, k)

    def observe(self, tree: DraftTree, candidates: Tensor, verification: Verification) -> None:
        emitted = verification.emitted
        is_listed = self._list.is_listed
        self._counters.add_round(is_listed.sum(), emitted, is_listed[emitted.clamp(min=0)])

    def statistics(self, drops_last: bool = False) -> VocabularyStatistics:
        return self._counters.read(drops_last)


def clear_cache() -> None:
    """Let go of the gathered rows of all lists of all LM heads."""
    _cache.clear()


@dataclass(frozen=True)
class _ListedRows:
    """The rows of a list and, bool `[V]`, which ids are on it."""

    rows: PackedRows
    is_listed: Tensor


# For each head weight: the lists used last, the most recent one at the end.
_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _listed_rows(head: TargetHead, ids: tuple[int, ...], top_k: int) -> tuple[_ListedRows, int]:
    """The rows of a list, and how many had to be gathered for it now."""
    if head.stored is not None:  # adapters may be switched between calls
        return _gather(head, ids, top_k), len(ids)
    lists = _cache.setdefault(head.weight, OrderedDict())
    key = (ids, max(len(ids), top_k), _state(head.weight), _state(head.bias))
    if key in lists:
        lists.move_to_end(key)
        return lists[key], 0
    lists[key] = _gather(head, ids, top_k)
    if len(lists) > MAX_CACHED:
        lists.popitem(last=False)
    return lists[key], len(ids)


def _gather(head: TargetHead, ids: tuple[int, ...], top_k: int) -> _ListedRows:
    device = head.device
    tokens = torch.tensor(ids, device=device)
    slots = torch.arange(len(ids), device=device)
    rows = PackedRows.empty(head, len(ids), top_k)
    rows.gather(head, tokens, slots, torch.tensor([len(ids)], dtype=torch.int32, device=device))
    rows.token_of[: len(ids)] = tokens
    is_listed = torch.zeros(head.weight.shape[0], dtype=torch.bool, device=device)
    is_listed[tokens] = True
    return _ListedRows(rows, is_listed)


def _state(tensor: Tensor | None) -> tuple[object, ...]:
    """What changes when a tensor is written to or moved, so that rows of old weights are not used again."""
    if tensor is None:
        return ()
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.dtype, tensor.device, version


def _check_list(token_ids: Sequence[int], head: TargetHead) -> None:
    vocab_size, num_ids = head.weight.shape[0], len(token_ids)
    strange = [i for i in token_ids if not 0 <= i < vocab_size]
    if len(strange) == num_ids:
        raise ValueError(
            f"None of the {num_ids} token_ids of the static vocabulary is a row of the target's LM head, "
            f"which has {vocab_size}. Pass a list that was made with this target's tokenizer."
        )
    if strange:
        warnings.warn(
            f"{len(strange)} of the {num_ids} token_ids of the static vocabulary are left out, since they "
            f"are not among the {vocab_size} rows of the target's LM head (the first is {strange[0]}). "
            "Was the list made with this target's tokenizer?",
            stacklevel=3,
        )
