"""Many calls in a row leave a target as it was."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from tests.doubles import plain, speculate
from tests.models.families import head_for, make

PROMPT = torch.randint(2, 90, (1, 13), generator=torch.Generator().manual_seed(3))
TREE: dict[str, Any] = {"tree": {"depth": 2, "top_k": 3, "num_nodes": 8}}
HOOKS = [name for name, value in vars(nn.Module()).items() if name.endswith("hooks") and isinstance(value, dict)]


FAMILIES = ["llama", "gemma3_text", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt2", "mixtral", "qwen2_vl"))]


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """All that a call could leave behind: attributes, hooks, buffers, configurations, modes."""
    modules = dict(model.named_modules())
    return {
        "attributes": {name: set(vars(module)) for name, module in modules.items()},
        "hooks": {name: [len(getattr(module, hooks)) for hooks in HOOKS] for name, module in modules.items()},
        "classes": {name: type(module) for name, module in modules.items()},
        "modes": {name: module.training for name, module in modules.items()},
        "tensors": {
            name: (tensor.data_ptr(), tensor.dtype, tensor.requires_grad, tensor.sum().item())
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        },
        "class attributes": set(vars(type(model))),
        "config": copy.deepcopy(model.config.to_dict()),
        "attention": model.config._attn_implementation,
        "generation config": copy.deepcopy(model.generation_config.to_dict()),
    }


def num_tensors() -> int:
    gc.collect()
    return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("family", FAMILIES)
def test_thirty_calls_leave_nothing_behind(family: str) -> None:
    model = make(family, seed=3, attention="eager")
    head = head_for(model)
    plain(model, PROMPT, max_new_tokens=2)  # what transformers itself keeps
    before, text = snapshot(model), plain(model, PROMPT, max_new_tokens=3).tolist()
    calls: list[Callable[[], Any]] = [
        lambda: speculate(model, PROMPT, drafter=head, max_new_tokens=3, microspec=TREE),
        lambda: speculate(model, PROMPT, drafter=head, max_new_tokens=3, microspec=TREE | {"vocabulary": "full"}),
        lambda: speculate(model, PROMPT, drafter=head, max_new_tokens=3, microspec=TREE, do_sample=True, top_k=1),
    ]
    tensors = 0
    for call in range(30):
        assert calls[call % 3]().tolist() == text
        if call == 5:
            tensors = num_tensors()
    assert snapshot(model) == before
    assert num_tensors() <= tensors


def test_failed_calls_leave_nothing_behind() -> None:
    model = make("llama", seed=3)
    head = head_for(model)
    plain(model, PROMPT, max_new_tokens=2)
    before = snapshot(model)

    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of order")

    for layer in model.model.layers:
        hook = layer.register_forward_hook(fail)
        with pytest.raises((RuntimeError, ValueError), match="out of order"):
            speculate(model, PROMPT, drafter=head, max_new_tokens=6)
        hook.remove()
    with pytest.raises(ValueError, match="num_beams"):
        speculate(model, PROMPT, drafter=head, max_new_tokens=6, num_beams=2)
    assert snapshot(model) == before


def test_snapshot_sees_what_is_left_behind() -> None:
    model = make("llama", seed=3)
    before = snapshot(model)
    for leave, undo in (
        (lambda: setattr(model.model, "state", 1), lambda: delattr(model.model, "state")),
        (lambda: setattr(model.config, "tree", 1), lambda: delattr(model.config, "tree")),
        (lambda: model.train(), lambda: model.eval()),
    ):
        leave()
        assert snapshot(model) != before
        undo()
        assert snapshot(model) == before
    hook = model.model.register_forward_hook(lambda *_: None)
    assert snapshot(model) != before
    hook.remove()
