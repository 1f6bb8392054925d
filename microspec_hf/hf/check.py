"""A small tree against plain forwards: no architecture is trusted unseen."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

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
    if _checked.get(target.model) == kind or target.model.training:  # dropout: nothing could be compared
        return
    try:
        ours, plain = _tree_logits(target), _plain_logits(target)
        error = float((ours - plain).norm(dim=-1).div(plain.norm(dim=-1)).amax())
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as reason:
        raise ValueError(
            f"{type(target.model).__name__} cannot take a tree of drafts ({type(reason).__name__}: {reason}). "
            "Call generate without custom_generate."
        ) from reason
    if not error <= (1e-2 if torch.finfo(target.dtype).eps < 1e-6 else 0.3):  # TF32; experts chosen in half precision
        raise ValueError(
            f"{type(target.model).__name__} computes other logits for a tree of drafts than for the same texts one by "
            f"one (relative error {error:.1e}), so that speculation would change the text. "
            "Call generate without custom_generate."
        )
    _checked[target.model] = kind


# The tree of the check, behind a prompt of four tokens: a root, its two children, and a child of the second one.
_PROMPT, _NODES, _PATHS = [1, 2, 3, 4], [5, 6, 7, 8], [[5], [5, 6], [5, 7], [5, 7, 8]]


def _tree_logits(target: Target) -> Tensor:
    cache, device = target.new_cache(), target.device
    length, columns = len(_PROMPT), torch.arange(8, device=device)
    cache.prepare(columns[None, :length], length)
    causal = torch.where(columns[:length] <= columns[:length, None], columns[:length], -1)
    prompt, nodes = (torch.tensor([ids], device=device) % target.vocab_size for ids in (_PROMPT, _NODES))
    target.forward(prompt, columns[None, :length], causal[None], cache)
    cache.length = length

    positions = torch.tensor([4, 5, 5, 6], device=device)
    visible = columns.repeat(4, 1)
    for node, (path, position) in enumerate(zip(_PATHS, positions.tolist(), strict=True)):
        for other, token in enumerate(_NODES):
            visible[node, length + other] = positions[other] if token in path and positions[other] <= position else -1
    cache.prepare(columns[None, length:], 8)
    return target.head(target.forward(nodes, positions[None], visible[None], cache)[0][0]).float()


def _plain_logits(target: Target) -> Tensor:
    first, second = (
        target.model(
            input_ids=torch.tensor([_PROMPT + path], device=target.device) % target.vocab_size, use_cache=False
        ).logits[0, len(_PROMPT) :]
        for path in (_PATHS[1], _PATHS[3])  # the two leaves: their texts hold those of the inner nodes
    )
    return torch.stack([first[0], first[1], second[1], second[2]]).float().to(target.head.device)
