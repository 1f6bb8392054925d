"""KV caches: ours, whose rows are written where the loop says, and the ones that `generate` takes and returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import GenerateDecoderOnlyOutput


def cache_argument(forward: Callable[..., Any]) -> str:
    """Name of the KV-cache keyword of a forward: `cache` in newer transformers (5.24), `past_key_values` before."""
    # inspect follows __wrapped__, so the decorator that still accepts the old name does not hide the new one.
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


class TreeCacheLayer(CacheLayerMixin):
    """K and V of one layer in one buffer `[1, heads, capacity, head_dim]`, written at the rows the cache names."""

    is_compileable = True
    is_croppable = True
    is_sliding = False

    def __init__(self, cache: TreeCache):
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_zeros(*key_states.shape[:2], self.cache.capacity, key_states.shape[3])
        self.values = value_states.new_zeros(*value_states.shape[:2], self.cache.capacity, value_states.shape[3])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        rows = self.cache.rows.to(key_states.device)
        self.keys.index_copy_(2, rows, key_states)
        self.values.index_copy_(2, rows, value_states)
        return self.keys[:, :, : self.cache.view], self.values[:, :, : self.cache.view]

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            extra = capacity - self.keys.shape[2]
            self.keys = nn.functional.pad(self.keys, (0, 0, 0, extra))
            self.values = nn.functional.pad(self.values, (0, 0, 0, extra))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.view, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return self.cache.capacity


class TreeCache(Cache):
    """A KV cache whose rows are written where the caller says, so that a tree's rows can be kept, moved or left behind.

    Every layer is a full-length buffer, also those of sliding-window layers: a window is a matter of the mask, and a
    row that was overwritten could not be rolled back.

    `prepare(rows, view)` is called before each forward: `rows` int64 `[T]` are the buffer rows of the T tokens, `view`
    how many rows attention sees. `length` counts the committed rows, which never change again.
    """

    def __init__(self, num_layers: int, capacity: int = 0):
        self.rows_of: list[TreeCacheLayer] = [TreeCacheLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.rows_of))
        self.capacity = capacity
        self.length = 0
        self.view = 0
        self.rows = torch.empty(0, dtype=torch.int64)

    def prepare(self, rows: Tensor, view: int) -> None:
        self.reserve(view)
        self.rows, self.view = rows, view

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows; growth is by half, so that a long text reallocates a few times only."""
        if capacity > self.capacity:
            self.capacity = -(-max(capacity, self.capacity * 3 // 2) // 64) * 64
            for layer in self.rows_of:
                layer.grow(self.capacity)

    def buffers(self) -> list[Tensor]:
        """K and V buffers of all layers that hold any, `[1, heads, capacity, head_dim]` each."""
        return [buffer for layer in self.rows_of for buffer in (layer.keys, layer.values) if buffer is not None]


def export_cache(config: Any, cache: TreeCache, length: int) -> dict[str, Cache]:
    """The first `length` rows as the cache that plain `generate` returns, under this version's output field."""
    plain = DynamicCache(config=config)
    for index, layer in enumerate(cache.rows_of):
        if layer.keys is not None and layer.values is not None:
            plain.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), index)
    field = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
    return {field: plain}
