"""MicroSpec: the rows that this text has lately made likely (MicroSpec section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from microspec_hf import ops
from microspec_hf.config import VERIFY_CANDIDATES, VocabularyConfig
from microspec_hf.hf import TargetHead
from microspec_hf.streams import SideStream
from microspec_hf.tree import DraftTree, Verification
from microspec_hf.vocabulary.base import Counters, IndexedRows, PackedRows, VocabularyStatistics, valid_ids


class DynamicVocabulary:
    """A window over the ids that the prompt, the drafts and the target's own top ids bring up.

    The stream S is the prompt and the target's top-K_pre ids of its positions; each round appends the ids of
    the draft tree (C_draft) and the target's top-K_ver ids of the verified nodes (C_ver). Active are the ids
    of a window over S and the pinned ids: the stop ids and the first `floor` of `token_ids`. Rows of active
    ids lie side by side in a packed buffer; only rows of ids that were not active before are copied, beside
    the drafter's next pass.

    There are never more than `max_rows` active ids, unless more than that are pinned.

    Args:
        head: the target's LM head.
        config: window, candidates, pinned ids.
        stop_ids: ids that end a text.
        top_k: children of a node; more than there are active ids is allowed.
        verify_candidates: K_ver.

    Raises:
        ValueError: the floor does not fit into the window.
    """

    def __init__(
        self,
        head: TargetHead,
        config: VocabularyConfig,
        stop_ids: Sequence[int],
        top_k: int,
        verify_candidates: int = VERIFY_CANDIDATES,
    ):
        if config.floor > config.max_rows:
            raise ValueError(
                f"floor={config.floor} keeps more ids active than max_rows={config.max_rows} allows. "
                "Raise max_rows or lower floor."
            )
        self.head, self.top_k = head, top_k
        self.knows_prompt, self.is_packed = config.prompt, config.packed
        self.prompt_candidates = min(config.prompt_candidates, head.weight.shape[0]) if config.prompt else 0
        self.verify_candidates = min(verify_candidates, head.weight.shape[0])
        self.verify_nodes, self.is_stream = config.verify_nodes, config.window == "stream"
        device, vocab_size = head.device, head.weight.shape[0]

        pinned = valid_ids((*stop_ids, *(config.token_ids or ())[: config.floor]), head)
        window = max(0, config.max_rows - len(pinned))
        num_slots = min(vocab_size, window + len(pinned))
        self.rows = (PackedRows if config.packed else IndexedRows).empty(head, num_slots, top_k)
        self.token_of = self.rows.token_of[:num_slots]
        self.slot_of = torch.full((vocab_size,), -1, dtype=torch.int32, device=device)
        self.pinned = torch.arange(num_slots, device=device) < len(pinned)
        self.usage = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.ring = torch.full((window if self.is_stream else 0,), -1, dtype=torch.int32, device=device)
        self.clock = torch.zeros(1, dtype=torch.int64, device=device)

        # The rows to copy next; in fixed buffers, so that a captured round finds the last round's.
        self._new_rows = torch.full((num_slots,), -1, dtype=torch.int64, device=device)
        self._new_slots = torch.full((num_slots,), -1, dtype=torch.int64, device=device)
        self._num_new = torch.zeros(1, dtype=torch.int32, device=device)
        self._new_limit = 0  # entries of the two lists that may be in use
        self._used = self.rows
        self._copy = SideStream(device, config.overlap)
        self._counters = Counters(device)
        self._pinned_ids = torch.tensor(pinned, dtype=torch.int32, device=device)
        self._clear()

    def begin(self, prompt: Tensor, candidates: Tensor | None) -> None:
        self._clear()
        if self.knows_prompt:
            self._push(prompt if candidates is None else torch.cat([prompt, candidates.flatten()]))
        # Copied now: a captured round has room for what a round brings, and a prompt brings more.
        self.prepare()
        self._copy.join()
        self._num_new.zero_()

    def prepare(self) -> None:
        if self._new_limit:
            if self.is_packed:
                self._counters.add_gathered(self._num_new)
            with self._copy.fork():
                limit = self._new_limit
                self.rows.gather(self.head, self._new_rows[:limit], self._new_slots[:limit], self._num_new)
            self._new_limit = 0
            self._used = self.rows.first(ops.used_slots(self.token_of), self.top_k)

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.prepare()
        self._copy.join()
        return self._used.topk(self.head, hidden, k)

    def observe(self, tree: DraftTree, candidates: Tensor, verification: Verification) -> None:
        emitted = verification.emitted
        is_covered = self.slot_of[emitted.clamp(min=0)] >= 0
        self._counters.add_round((self.token_of >= 0).sum(), emitted, is_covered)
        self._push(torch.cat([tree.tokens, self._verified(tree, candidates, verification).flatten()]))

    def statistics(self, drops_last: bool = False) -> VocabularyStatistics:
        return self._counters.read(drops_last)

    def _clear(self) -> None:
        """Only the pinned ids are active, and their rows are copied again: the head may have changed since."""
        pinned = self._pinned_ids
        self._counters.reset()
        for ids in (self.token_of, self.slot_of, self.ring):
            ids.fill_(-1)
        self.usage.zero_()
        self.clock.zero_()
        slots = torch.arange(self.token_of.shape[0], device=pinned.device)
        self.token_of[: pinned.shape[0]] = pinned
        self.slot_of[pinned.long()] = slots[: pinned.shape[0]].int()
        self._await_copy(self.token_of.long(), slots, torch.tensor([pinned.shape[0]], device=pinned.device))

    def _verified(self, tree: DraftTree, candidates: Tensor, verification: Verification) -> Tensor:
        """C_ver: the target's top ids at the chosen nodes, in node order; -1 at all others."""
        if self.verify_nodes == "all":
            is_chosen = tree.tokens >= 0
        else:
            candidates = candidates.index_select(0, verification.path)
            slots = torch.arange(verification.path.shape[0], device=candidates.device)
            is_chosen = slots <= verification.num_accepted
        return torch.where(is_chosen[:, None], candidates, -1)

    def _push(self, entries: Tensor) -> None:
        self.prepare()  # what an earlier push brought in and nobody has drafted with
        self._copy.join()
        rows, slots, counts = ops.window_update(
            self.slot_of,
            self.token_of,
            self.usage,
            self.ring,
            self.clock,
            entries,
            self.pinned,
            self.is_stream,
        )
        self._await_copy(rows, slots, counts[:1])
        self._counters.add_evicted(counts[1:])

    def _await_copy(self, rows: Tensor, slots: Tensor, count: Tensor) -> None:
        self._new_limit = min(rows.shape[0], self._new_rows.shape[0])
        self._new_rows[: self._new_limit] = rows[: self._new_limit]
        self._new_slots[: self._new_limit] = slots[: self._new_limit]
        self._num_new.copy_(count)
