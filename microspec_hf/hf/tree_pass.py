"""The pass of a captured round: a model's own modules, with an attention that reads lengths on the device.

A pass that is captured once must serve every length of the text, so that nothing about the text may be a shape. The
decoder runs in a shadow (`hf.shadow`): its layers get no cache and no mask, and its attention function, known to
transformers by a name of its own, writes the new keys and values where they belong and lets each row see its text and
its own ancestors (`ops.tree_attention`).
"""

from __future__ import annotations

import copy
import inspect
import types
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from microspec_hf import ops
from microspec_hf.hf.cache import TreeCache
from microspec_hf.hf.merged import MergedLinears, mergeable
from microspec_hf.hf.shadow import shadow
from microspec_hf.hf.sight import Sight

ATTENTION = "microspec_tree"


class TreePass:
    """A decoder's shadow that reads and writes a `TreeCache` at places named on the device.

    Args:
        decoder: a target's decoder or an EAGLE head.
        windows: attention window of each layer type, see `Target.windows`.
        compiled: what is compiled with `torch.compile`: `"layers"` of a deep decoder, `"all"` of a shallow one, or
            `"nothing"`. It fuses element-wise work; matrix products and attention stay as they are.

    Raises:
        ValueError: the decoder cannot be shadowed; the message begins with the module.
    """

    def __init__(
        self, decoder: nn.Module, windows: dict[str, int | None], compiled: Literal["nothing", "layers", "all"]
    ):
        modules: Any = shadow(decoder)
        self.decoder = modules
        self._windows = list(windows.values())
        self._masks = {kind: _marker(index, _device(decoder)) for index, kind in enumerate(windows)}
        self._merged: list[MergedLinears] = []
        self._cache: TreeCache | None = None
        self._sight: Sight | None = None
        configs: dict[int, Any] = {}
        for module in modules.modules():
            if hasattr(module, "config"):
                module.config = _with_attention(module.config, configs)
            if hasattr(module, "layer_idx"):
                module.tree_pass = self
                module.forward = _bare_forward(module)
        # One piece of code serves all layers: what differs from layer to layer lies behind the attention function.
        whole = {"nothing": (), "layers": getattr(modules, "layers", ()), "all": (modules,)}[compiled]
        for part in whole:
            part.forward = torch.compile(_bare_forward(part), dynamic=False)

    @property
    def mask(self) -> Any:
        """What stands in for the mask; it tells the attention function a layer's window, and that is all."""
        masks = self._masks
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def merge(self) -> None:
        """Let layers that read the same input share one matrix product. Their weights become views of one tensor."""
        for part, names in list(mergeable(self.decoder)):
            merged = MergedLinears([getattr(part, name) for name in names])
            self._merged.append(merged)
            for name, stand_in in zip(names, merged.parts(), strict=True):
                setattr(part, name, stand_in)

    def release(self) -> None:
        """Give merged weights memory of their own again; the pass is not used after that."""
        for merged in self._merged:
            merged.undo()
        self._merged.clear()

    def over(self, cache: TreeCache, sight: Sight) -> Any:
        """The decoder, whose next call reads and writes this prepared cache, and whose rows see this."""
        self._cache, self._sight = cache, sight
        return self.decoder

    def attend(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float
    ) -> Tensor:
        """The attention of one layer, `[B, T, heads, head_dim]`, after its new keys and values are written."""
        assert self._cache is not None
        assert self._sight is not None
        all_keys, all_values = self._cache.rows_of[layer].write(keys, values)
        window = self._windows[mask.shape[-1] - 1] or 0
        sight = self._sight
        attended: Tensor = ops.tree_attention(
            query,
            all_keys,
            all_values,
            sight.length,
            sight.first,
            sight.ancestors[..., 0],
            sight.depths,
            scale,
            window,
            softcap,
        )
        return attended


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions, for modules of a `TreePass`."""
    tree_pass: Any = module.tree_pass
    layer: Any = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return tree_pass.attend(layer, query, key, value, attention_mask, scale, softcap or 0.0), None


AttentionInterface.register(ATTENTION, tree_attention_forward)


def _bare_forward(module: nn.Module) -> Any:
    """Without wrappers that rename arguments, which `torch.compile` would compile anew for every class."""
    return types.MethodType(inspect.unwrap(type(module).forward), module)


def _with_attention(config: Any, made: dict[int, Any]) -> Any:
    if id(config) not in made:
        made[id(config)] = copy.copy(config)
        made[id(config)]._attn_implementation_internal = ATTENTION
    return made[id(config)]


def _marker(index: int, device: torch.device) -> Tensor:
    """A four-dimensional mask, which transformers hands to the layers as it is; its width names a window."""
    return torch.empty(1, 1, 1, index + 1, device=device)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
