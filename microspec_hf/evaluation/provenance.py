"""What a figure was measured with: written beside every result."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import microspec_hf
from microspec_hf.eagle import EagleHead


def provenance(**arguments: Any) -> dict[str, Any]:
    """Where a figure comes from, JSON-ready.

    Args:
        arguments: what the measurement was called with. Paths are written as their last part, so that no
            result carries the folders of a machine. `device` and `dtype`, where given, are also written on
            their own.

    Returns:
        `git_revision` (what MICROSPEC_REVISION names, else that of the checkout; None outside of one) and
        `git_dirty` (tracked files differ from it), `versions` of python, torch, transformers and microspec_hf,
        `device` (the name of the hardware), `threads`, `dtype`, `arguments`, `utc`.
    """
    revision, is_dirty = _git_state(Path(microspec_hf.__file__).resolve().parent.parent)
    dtype = arguments.get("dtype")
    return {
        "git_revision": revision,
        "git_dirty": is_dirty,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "microspec_hf": microspec_hf.__version__,
        },
        "device": device_name(arguments.get("device")),
        "threads": torch.get_num_threads(),
        "dtype": None if dtype is None else _portable(dtype),
        "arguments": _portable(arguments),
        "utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def pair_settings(model: PreTrainedModel, drafter: EagleHead) -> dict[str, Any]:
    """What every text and tree of a pair depends on, JSON-ready: a run that is taken up again must have the same."""
    origin = provenance()
    return {
        "target": Path(str(model.config._name_or_path)).name,
        "drafter": digest([p.detach().flatten()[:1024].tolist() for p in drafter.parameters()]),
        "dtype": str(model.dtype),
        "attention": model.config._attn_implementation,
        "versions": origin["versions"],
        "git_revision": origin["git_revision"],
    }


def digest(value: Any) -> str:
    """A short name of a JSON-ready value, the same for equal ones."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def device_name(device: Any = None) -> str:
    """Name of the hardware behind a device; None: a GPU if there is one, else the CPU."""
    if torch.cuda.is_available() and not str(device).startswith("cpu"):
        index = torch.device(device).index if device is not None and str(device).startswith("cuda") else None
        return torch.cuda.get_device_name(index)
    return _cpu_name()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(models), "") or platform.processor() or platform.machine()


def _git_state(root: Path) -> tuple[str | None, bool | None]:
    """Revision of the checkout at `root`, and whether its tracked files were changed."""
    if revision := os.environ.get("MICROSPEC_REVISION"):  # of a copy that travelled without its history
        return revision, None
    # An installed package may lie inside some other repository, whose revision would mean nothing.
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root:
        return None, None
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return _git(root, "rev-parse", "HEAD"), None if changes is None else bool(changes)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(root), *arguments]
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return finished.stdout.strip()


def _portable(value: Any) -> Any:
    """`value` in JSON's types, without the folders of this machine."""
    if isinstance(value, Mapping):
        return {str(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_portable(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Path) or (isinstance(value, str) and _is_path(value)):
        return Path(value).name
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _is_path(text: str) -> bool:
    """Whether a text names a place on this machine; `organisation/model` does if there is such a folder."""
    if text.startswith(("/", "./", "../", "~", "\\")) or text[1:3] in (":\\", ":/"):
        return True
    try:
        return "/" in text and Path(text).exists()
    except (OSError, ValueError):  # too long or with a null byte: a text, and no path
        return False
