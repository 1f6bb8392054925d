"""The active vocabulary in plain Python: slow, obvious, and what every implementation must equal."""

from __future__ import annotations

from collections.abc import Sequence


class NaiveWindow:
    """The stream S as a list, and the active set as the law reads.

    Args:
        token_of: the id in each slot, -1 in a free one; pinned ids only, before the first push.
        room: R, the entries (stream) or the distinct unpinned ids (lru) that the window holds.
        stream: which window.
    """

    def __init__(self, token_of: Sequence[int], vocab_size: int, room: int, stream: bool):
        self.token_of, self.vocab_size, self.room, self.is_stream = list(token_of), vocab_size, room, stream
        self.pinned = {i for i in token_of if i >= 0}
        self.stream: list[int] = []

    def active(self) -> set[int]:
        if self.is_stream:
            return self.pinned | set(self.stream[max(0, len(self.stream) - self.room) :])
        recent = dict.fromkeys(i for i in reversed(self.stream) if i not in self.pinned)
        return self.pinned | set(list(recent)[: self.room])

    def push(self, candidates: Sequence[int]) -> tuple[list[int], list[int], int]:
        """Ids that entered, their slots, and how many ids were evicted."""
        before = self.active()
        entries = [i for i in candidates if 0 <= i < self.vocab_size]
        self.stream += entries
        after = self.active()
        self.token_of = [i if i in after else -1 for i in self.token_of]
        entered = sorted(after - before, key=lambda i: len(entries) - 1 - entries[::-1].index(i))
        slots = [slot for slot, i in enumerate(self.token_of) if i < 0][: len(entered)]
        for slot, i in zip(slots, entered, strict=True):
            self.token_of[slot] = i
        return entered, slots, len(before - after)

    def usage(self) -> list[int]:
        """For each slot: occurrences in the window (stream), or the position of the last sighting (lru)."""
        window = self.stream[max(0, len(self.stream) - self.room) :]
        if self.is_stream:
            return [window.count(i) if i >= 0 else 0 for i in self.token_of]
        last = {i: position for position, i in enumerate(self.stream)}
        return [last.get(i, 0) for i in self.token_of]

    def ring(self) -> list[int]:
        """The last R entries, entry p at `p % R`; -1 where there was none yet."""
        ring = [-1] * self.room
        for position, i in enumerate(self.stream):
            if self.room:
                ring[position % self.room] = i
        return ring
