"""Triton kernels that are set up while the one before them in the stream still runs. Importing this needs Triton."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]


@functools.cache
def started_early(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch whose kernel calls `wait_for_earlier`: none where the device starts kernels one by one."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (9, 0):
        return {}
    return {"EARLY": True, "launch_pdl": True} if hasattr(tl.extra.cuda, "gdc_wait") else {}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def wait_for_earlier(EARLY: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]
    """Before a kernel reads or writes: all earlier work is done. The next kernel is set up from here on, no sooner."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
