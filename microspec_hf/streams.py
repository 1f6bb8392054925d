"""A second stream of device work; on a device without streams the same calls run in line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Work that may run beside what the current stream does next.

    `fork()` opens a block whose work starts when everything issued so far is done; `join()` makes the current
    stream wait for it. Between them the current stream goes on. Both are events on the device: the host never
    waits, and the pair can be captured in a CUDA graph (joined before the capture ends).

    Args:
        device: where the work runs.
        is_used: False: the work runs in line, so that what the stream gains can be measured.
    """

    def __init__(self, device: torch.device, is_used: bool = True):
        self._stream = torch.cuda.Stream(device) if is_used and device.type == "cuda" else None
        self._is_forked = False

    @contextmanager
    def fork(self) -> Iterator[None]:
        """The body's work waits for all work that the current stream holds now, and for nothing later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
        self._is_forked = True

    def join(self) -> None:
        """The current stream waits for the blocks opened since the last join."""
        if self._stream is not None and self._is_forked:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._is_forked = False
