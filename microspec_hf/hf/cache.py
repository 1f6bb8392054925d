"""KV caches: ours, whose rows are written where the loop says, and the ones that `generate` takes and returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput

from microspec_hf import ops

FIRST_ROWS = 1024
"""Rows of the smallest cache that is kept from text to text."""


def cache_argument(forward: Callable[..., Any]) -> str:
    """Name of the KV-cache keyword of a forward: `cache` in newer transformers (5.24), `past_key_values` before."""
    # inspect follows __wrapped__, so the decorator that still accepts the old name does not hide the new one.
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


class TreeCacheLayer(CacheLayerMixin):
    """K and V of one layer in one buffer `[B, heads, capacity, head_dim]`, written at the rows the cache names."""

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
        keys, values = self.write(key_states, value_states)
        return keys[:, :, : self.cache.view], values[:, :, : self.cache.view]

    def write(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Put states `[B, heads, T, head_dim]` into the rows that the cache names; the whole buffers."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        rows = self.cache.rows.to(key_states.device)
        return ops.write_rows((self.keys, self.values), rows, key_states, value_states)

    def allocate(self, keys: Tensor, values: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Buffers for states like these, empty unless there are some; each with the states that it is for."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        assert self.keys is not None
        assert self.values is not None
        return (self.keys, keys), (self.values, values)

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            extra = capacity - self.keys.shape[2]
            self.keys = nn.functional.pad(self.keys, (0, 0, 0, extra))
            self.values = nn.functional.pad(self.values, (0, 0, 0, extra))

    def take(self, keys: Sequence[Tensor | None], values: Sequence[Tensor | None]) -> None:
        """Hold the texts of these buffers, one behind the other; None: a layer that never held any."""
        held = [(k, v) for k, v in zip(keys, values, strict=True) if k is not None and v is not None]
        if held:
            self.keys, self.values = torch.cat([k for k, _ in held]), torch.cat([v for _, v in held])
            self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.view, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return self.cache.capacity


class TreeCache(Cache):
    """A KV cache whose rows are written where the caller says, so that a tree's rows can be kept, moved or left behind.

    It holds the rows of B texts, which need not be equally long.

    Every layer is a full-length buffer, also those of sliding-window layers: a window is a matter of the mask, and a
    row that was overwritten could not be rolled back.

    `prepare(rows, view)` is called before each forward: `rows` int64 `[B, T]` are the buffer rows of each text's T
    tokens (`[1, T]`: of all texts alike), `view` how many rows attention sees. `length` counts the committed rows of
    the longest text, which never change again.

    Args:
        num_layers: of the model.
        capacity: rows that there is room for.
        is_fixed: whether every pass reads the whole buffers, so that nothing has a shape that depends on `length`.
    """

    def __init__(self, num_layers: int, capacity: int = 0, is_fixed: bool = False):
        self.rows_of: list[TreeCacheLayer] = [TreeCacheLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.rows_of))
        self.capacity = capacity
        self.is_fixed = is_fixed
        self.length = 0
        self.view = 0
        self.rows = torch.empty(1, 0, dtype=torch.int64)

    @property
    def shape(self) -> tuple[int, ...]:
        """What the shapes of a pass over this cache depend on."""
        return (self.capacity,) if self.is_fixed else (self.capacity, self.length)

    def prepare(self, rows: Tensor, view: int) -> None:
        self.reserve(view)
        self.rows, self.view = rows, view

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows; growth is by half, so that a long text reallocates a few times only."""
        if capacity > self.capacity:
            self.grow(-(-max(capacity, self.capacity * 3 // 2) // 64) * 64)

    def restart(self, num_rows: int) -> None:
        """Begin another text, with room for so many rows; capacities are powers of two, so that there are few."""
        self.length = 0
        if num_rows > self.capacity:
            self.grow(max(FIRST_ROWS, 1 << (num_rows - 1).bit_length()))

    def grow(self, capacity: int) -> None:
        """Make room for exactly `capacity` rows, at least as many as there are."""
        self.capacity = capacity
        for layer in self.rows_of:
            layer.grow(capacity)

    def buffers(self, text: int = 0) -> list[Tensor]:
        """K and V of one text in all layers that hold any: views `[1, heads, capacity, head_dim]`."""
        held = [buffer for layer in self.rows_of for buffer in (layer.keys, layer.values) if buffer is not None]
        return [buffer[text : text + 1] for buffer in held]

    @classmethod
    def stack(cls, caches: Sequence[TreeCache]) -> TreeCache:
        """The texts of several caches as one batch; a cache that is alone stays itself."""
        if len(caches) == 1:
            return caches[0]
        joint = cls(len(caches[0].rows_of))
        joint.length = max(cache.length for cache in caches)
        joint.capacity = max(cache.capacity for cache in caches)
        for cache in caches:
            cache.grow(joint.capacity)
        for index, layer in enumerate(joint.rows_of):
            parts = [cache.rows_of[index] for cache in caches]
            layer.take([part.keys for part in parts], [part.values for part in parts])
        return joint

    def text(self, text: int) -> TreeCache:
        """A copy of one text's rows."""
        alone = TreeCache(len(self.rows_of), self.capacity)
        alone.length = self.length
        for layer, its in zip(self.rows_of, alone.rows_of, strict=True):
            if layer.keys is not None and layer.values is not None:
                its.take([layer.keys[text : text + 1]], [layer.values[text : text + 1]])
        return alone

    def keep(self, texts: Sequence[int]) -> None:
        """Drop all texts but these, which are renumbered in this order."""
        for layer in self.rows_of:
            if layer.is_initialized:
                assert layer.keys is not None
                assert layer.values is not None
                chosen = torch.tensor(texts, device=layer.keys.device)
                layer.take([layer.keys.index_select(0, chosen)], [layer.values.index_select(0, chosen)])


def cache_field() -> str:
    """Name of the cache in this version's `generate` output."""
    return "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"


def import_cache(source: Cache, cache: TreeCache) -> None:
    """Begin with the tokens that a cache of `generate` holds; see `refuse_cache`."""
    length = int(source.get_seq_length())
    if length == 0:
        return
    cache.reserve(length)
    for index, layer in enumerate(cache.rows_of):
        held: Any = source.layers[index]
        if not held.is_initialized:  # a layer that shares another one's K and V
            continue
        keys: Tensor = held.keys
        # Sliding-window layers keep their latest rows only; the others are outside of every window to come.
        first = length - keys.shape[2] if isinstance(held, DynamicLayer) else 0
        for buffer, rows in layer.allocate(keys, held.values):
            buffer[:, :, first:length] = rows[:, :, : length - first]
    cache.length = length


def export_cache(caches: Sequence[TreeCache], padding: Sequence[int], length: int, target: Cache) -> None:
    """Append the rows of texts, one in each cache, to those that a cache of `generate` holds.

    Args:
        caches: their first texts are the batch.
        padding: for each text, columns of padding on its left, whose rows are zeros: no mask lets them be seen.
        length: rows that `target` then has, the padding included.
        target: is filled.
    """
    first = int(target.get_seq_length())
    if length <= first:
        return

    def joined(buffers: Sequence[Tensor]) -> Tensor:
        rows = [buffer[:1, :, first : length - left] for buffer, left in zip(buffers, padding, strict=True)]
        return torch.cat([nn.functional.pad(r, (0, 0, p, 0)) if p else r for r, p in zip(rows, padding, strict=True)])

    for index, layers in enumerate(zip(*(cache.rows_of for cache in caches), strict=True)):
        keys, values = [layer.keys for layer in layers], [layer.values for layer in layers]
        if keys[0] is not None:
            target.update(joined(cast(list[Tensor], keys)), joined(cast(list[Tensor], values)), index)


def refuse_cache(cache: Cache, num_tokens: int) -> None:
    """Refuse a cache that cannot be read, or that does not hold the beginning of a text of `num_tokens`.

    Raises:
        ValueError: always with the way out.
    """
    if type(cache).__name__ in ("QuantizedCache", "EncoderDecoderCache"):
        raise ValueError(
            f"A {type(cache).__name__} cannot be rolled back after a rejected draft. "
            "Leave the cache out; speculation brings its own."
        )
    length = int(cache.get_seq_length())
    if length == 0:
        return
    if strange := sorted({type(layer).__name__ for layer in cache.layers} - _READABLE):
        raise ValueError(
            f"A cache with layers of type {', '.join(strange)} cannot be read as the beginning of a text. "
            "Pass a DynamicCache, or the whole text as input_ids without a cache."
        )
    if length >= num_tokens:
        raise ValueError(
            f"The cache already holds {length} tokens, but input_ids has only {num_tokens}. Pass the whole text as "
            "input_ids: the cached tokens and at least one more."
        )


_READABLE = {"DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer"}
