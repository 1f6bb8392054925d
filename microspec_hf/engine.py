"""How the device part of a round is run: as it is, or captured once in a CUDA graph and replayed.

A round reads and writes the same buffers each time and looks at no value on the host, so that a replay of its kernels
is a round. Only sizes of views change with the length of a text; they go up in steps, and each step is captured anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from microspec_hf import ops

Outcome = TypeVar("Outcome")
Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""Records what a function does on the device without doing it: its result, and a function that does it again."""

STEP = 256
"""Rows by which the views of captured rounds grow: at most one capture for so many tokens."""


class Rounds:
    """Runs every round as it is.

    Args:
        step: sizes of views are multiples of it.
    """

    def __init__(self, step: int = 1):
        self.step = step

    def run(self, key: Hashable, decide: Callable[[], Outcome]) -> Outcome:
        """The result of `decide()`; its device work depends on the contents of buffers and on `key` alone."""
        return decide()


class CapturedRounds(Rounds):
    """Captures the second round of a key, and replays it from then on; the first one warms everything up.

    Args:
        capture: how to capture; by default in a CUDA graph.
        step: as for `Rounds`.
    """

    def __init__(self, capture: Capture | None = None, step: int = STEP):
        super().__init__(step)
        self._capture = capture or CudaCapture()
        self._seen: set[Hashable] = set()
        self._captured: dict[Hashable, tuple[Any, Callable[[], None]]] = {}
        self.num_replays = 0

    def run(self, key: Hashable, decide: Callable[[], Outcome]) -> Outcome:
        if key not in self._seen:
            self._seen.add(key)
            return decide()
        if key not in self._captured:
            self._captured[key] = self._capture(decide)
        outcome: Outcome
        outcome, replay = self._captured[key]
        replay()
        self.num_replays += 1
        return outcome


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


def round_up(size: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-size // step) * step
