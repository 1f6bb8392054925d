"""A small tree against plain forwards: no architecture is trusted unseen."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from microspec_hf.hf.sight import Sight
from microspec_hf.hf.target import Target

_checked: WeakKeyDictionary[PreTrainedModel, tuple[str, torch.dtype]] = WeakKeyDictionary()


@torch.no_grad()
def check_tree_pass(target: Target) -> None:
    """Compare a small tree with plain forwards, once for each model, so that no architecture is trusted unseen.

    A decoder may ignore the mask, take positions from the row numbers or keep a window of its own; a model may do more
    between decoder and logits than its head. Each of them would change the text without an error.

    Raises:
        ValueError: the tree's logits are not those of plain forwards.
    """
    kind = target.config._attn_implementation, target.dtype
    is_known = target.tree_pass is None and _checked.get(target.model) == kind
    if is_known or target.model.training:  # dropout: nothing could be compared
        return
    try:
        ours, plain = _tree_logits(target), _plain_logits(target)
        error = float((ours - plain).norm(dim=-1).div(plain.norm(dim=-1)).amax())
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as reason:
        raise ValueError(
            f"{target.model.__class__.__name__} cannot take a tree of drafts ({type(reason).__name__}: {reason}). "
            "Call generate without custom_generate."
        ) from reason
    if not error <= (1e-2 if torch.finfo(target.dtype).eps < 1e-6 else 0.3):  # TF32; experts chosen in half precision
        raise ValueError(
            f"{target.model.__class__.__name__} computes other logits for a tree of drafts than for the same texts one "
            f"by one (relative error {error:.1e}), so that speculation would change the text. "
            "Call generate without custom_generate."
        )
    if target.tree_pass is None:
        _checked[target.model] = kind


# The tree of the check, behind a prompt of four tokens: a root, its two children, and a child of the second one.
_PROMPT, _NODES, _PATHS = [1, 2, 3, 4], [5, 6, 7, 8], [[5], [5, 6], [5, 7], [5, 7, 8]]
_DEPTHS, _ANCESTORS = [0, 1, 1, 2], [0b0001, 0b0011, 0b0101, 0b1101]


def _tree_logits(target: Target) -> Tensor:
    cache, device = target.new_cache(is_fixed=True), target.device
    prompt, nodes = (_ordinary_tokens(target, ids) for ids in (_PROMPT, _NODES))
    count = len(_PROMPT)
    columns = torch.arange(count, device=device)
    cache.reserve(count + len(_NODES))
    cache.prepare(columns[None], count)
    causal = torch.where(columns <= columns[:, None], columns, -1)
    target.forward(prompt, columns[None], causal[None], cache)
    cache.length = count

    length, depths = torch.tensor([count], device=device), torch.tensor([_DEPTHS], device=device)
    ancestors = torch.tensor(_ANCESTORS, device=device)[None, :, None]
    sight = Sight(length, ancestors, depths, torch.zeros_like(length))
    return target.head(target.see(nodes, length + depths, sight, cache)[0][0]).float()


def _ordinary_tokens(target: Target, numbers: list[int]) -> Tensor:
    """int64 `[1, T]`, ids from the middle of the vocabulary: on control tokens at its edges some models are so
    sensitive that two orders of one sum give unlike logits in half precision."""
    ids = torch.tensor([numbers], device=target.device)
    return (ids + target.vocab_size // 3) % target.vocab_size


def _plain_logits(target: Target) -> Tensor:
    first, second = (
        target.model(input_ids=_ordinary_tokens(target, _PROMPT + path), use_cache=False).logits[0, len(_PROMPT) :]
        for path in (_PATHS[1], _PATHS[3])  # the two leaves: their texts hold those of the inner nodes
    )
    return torch.stack([first[0], first[1], second[1], second[2]]).float().to(target.head.device)
