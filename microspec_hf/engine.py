"""How the device part of a round is run: as it is, or captured once in a CUDA graph and replayed.

A round reads and writes the same buffers each time and looks at no value on the host, so that a replay of its kernels
is a round, whatever the length of the text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from microspec_hf import ops

logger = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")
Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""Records what a function does on the device without doing it: its result, and a function that does it again."""

MOST_IN_FLIGHT = 2
"""Rounds that are begun and not yet read: while the host reads one, the device is at the next."""
MAX_CAPTURES = 16
"""Captures that are kept; lengths that outgrow their buffers are captured anew."""


class Clock:
    """Measures one stretch of each round, `with clock:`, where it runs.

    Args:
        device: that runs it. What a GPU does is measured there, also in a round that is replayed.
    """

    def __init__(self, device: torch.device):
        self._events: tuple[torch.cuda.Event, ...] = ()
        if device.type == "cuda":  # external: captured in a graph, they are recorded anew by every replay
            self._events = tuple(torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        self._started = self._seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        if self._events:
            self._events[0].record()

    def __exit__(self, *error: object) -> None:
        self._seconds = time.perf_counter() - self._started
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Of the latest round; the device must be done with it."""
        return self._events[0].elapsed_time(self._events[1]) / 1000 if self._events else self._seconds


class Rounds:
    """Runs every round as it is.

    Args:
        clock: measures how long drafting takes.
    """

    is_captured = False

    def __init__(self, clock: Clock | None = None):
        self.clock = clock

    @property
    def run_ahead(self) -> bool:
        """Whether the next round may begin before the host has seen what this one decided."""
        return self.is_captured and self.clock is None

    def run(self, key: Hashable, decide: Callable[[], Outcome], reads: Any = None) -> Outcome:
        """The result of `decide()`; its device work depends on the contents of buffers and on `key` alone.

        Args:
            key, decide: see above.
            reads: what owns tensors that `decide` reads and that nobody else may keep.
        """
        return decide()

    def send(self, news: Tensor) -> Callable[[], list[list[int]]]:
        """Start to bring int64 `[B, P]` to the host; the result waits for it."""
        return news.tolist


class CapturedRounds(Rounds):
    """Captures the second round of a key, and replays it from then on; the first one warms everything up.

    Args:
        capture: how to capture; by default in a CUDA graph.
        clock: see `Rounds`.
    """

    is_captured = True

    def __init__(self, capture: Capture | None = None, clock: Clock | None = None):
        super().__init__(clock)
        self._capture = capture or CudaCapture()
        self.refusal: str | None = None
        self._slots: list[tuple[Tensor, torch.cuda.Event]] = []
        self._seen: set[Hashable] = set()
        self._captured: dict[Hashable, tuple[Any, Callable[[], None], Any]] = {}
        self.num_replays = 0

    def run(self, key: Hashable, decide: Callable[[], Outcome], reads: Any = None) -> Outcome:
        if key not in self._seen:
            self._seen.add(key)
            return decide()
        if self.refusal is not None:
            return decide()
        if key not in self._captured:
            if len(self._captured) == MAX_CAPTURES:
                self._captured.clear()
            try:
                self._captured[key] = (*self._capture(decide), reads)
            except RuntimeError as error:  # an operation of the model that cannot be captured
                self.refusal = str(error).partition("\n")[0]
                logger.warning("Rounds run eagerly from here on, since they cannot be captured: %s", self.refusal)
                return decide()
        outcome: Outcome
        outcome, replay, _ = self._captured[key]
        replay()
        self.num_replays += 1
        return outcome

    def send(self, news: Tensor) -> Callable[[], list[list[int]]]:
        if news.device.type != "cuda":
            return news.clone().tolist  # the next replay writes where this one did
        if not self._slots or self._slots[0][0].shape != news.shape:
            pinned = [torch.empty(news.shape, dtype=news.dtype, pin_memory=True) for _ in range(MOST_IN_FLIGHT)]
            self._slots = [(slot, torch.cuda.Event()) for slot in pinned]
        slot, arrived = self._slots.pop(0)
        self._slots.append((slot, arrived))
        slot.copy_(news, non_blocking=True)
        arrived.record()

        def read() -> list[list[int]]:
            arrived.synchronize()
            return slot.tolist()

        return read


class CudaCapture:
    """Captures in CUDA graphs that share one pool of memory: one of them runs at a time."""

    def __init__(self) -> None:
        ops.load("cuda")  # its self-tests wait for the device, which a capture forbids
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, decide: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outcome = decide()
        return outcome, graph.replay


def can_capture(devices: set[torch.device]) -> bool:
    """Whether work on these devices fits into one CUDA graph."""
    return len(devices) == 1 and next(iter(devices)).type == "cuda"
