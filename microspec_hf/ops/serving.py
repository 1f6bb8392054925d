"""Small programs of a captured round that come in two forms only: Triton on a GPU, plain PyTorch everywhere."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


def in_triton(module: str) -> Callable[[Function], Function]:
    """Let a function of the same name in a module of `microspec_hf.ops` serve tensors on a GPU.

    The decorated function is the definition, and serves every other device, and a GPU where Triton is missing. The
    Triton function may answer None: it does not take these arguments.
    """

    def decorate(plain: Function) -> Function:
        @functools.wraps(plain)
        def serve(first: Any, *arguments: Any, **options: Any) -> Any:
            tensor = first if isinstance(first, torch.Tensor) else first[0]
            if tensor.device.type not in ("cuda", "xpu"):
                return plain(first, *arguments, **options)
            fast = _load(module, plain.__name__)
            if fast is not None and (result := fast(first, *arguments, **options)) is not None:
                return result
            return plain(first, *arguments, **options)

        serve.plain = plain  # type: ignore[attr-defined]
        return serve  # type: ignore[return-value]

    return decorate


@functools.cache
def _load(module: str, name: str) -> Callable[..., Any] | None:
    try:
        return getattr(importlib.import_module(f"microspec_hf.ops.{module}"), name)  # type: ignore[no-any-return]
    except ImportError as error:
        logger.warning("%s runs in PyTorch, since Triton cannot be imported: %s.", name, error)
        return None
