"""Shadows, merged layers, and passes that read lengths on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from microspec_hf.hf import Sight, Target, TreePass, chain_words
from microspec_hf.hf.merged import MergedLinears, mergeable
from microspec_hf.hf.shadow import shadow
from tests.tiny import TINY_MODELS, tiny_llama


def test_shadow_shares_weights_and_nothing_else() -> None:
    model = tiny_llama()
    twin = shadow(model)
    ids = torch.arange(5, 12)[None]
    expected = model(ids).logits
    assert torch.equal(twin(ids).logits, expected)
    assert all(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert not {id(module) for module in model.modules()} & {id(module) for module in twin.modules()}

    layer: Any = twin.model.layers[1]
    layer.mlp = nn.Identity()
    twin.lm_head.forward = lambda hidden: hidden * 0
    assert torch.equal(model(ids).logits, expected)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert not model(ids).logits.any()


def test_module_that_occurs_twice_stays_one() -> None:
    shared = nn.Linear(3, 3)
    twin = shadow(nn.ModuleList([shared, nn.Sequential(shared)]))
    assert twin[0] is twin[1][0]  # type: ignore[index]


def test_what_would_run_on_the_original_is_refused() -> None:
    hooked = tiny_llama()
    hooked.model.layers[0].register_forward_hook(lambda *arguments: None)
    with pytest.raises(ValueError, match="LlamaDecoderLayer has forward hooks"):
        shadow(hooked)
    replaced = tiny_llama()
    replaced.model.norm.forward = lambda hidden: hidden
    with pytest.raises(ValueError, match="LlamaRMSNorm has a forward of its own"):
        shadow(replaced)


def test_model_that_was_asked_for_hidden_states_once_is_taken() -> None:
    model = tiny_llama()
    ids = torch.arange(5, 12)[None]
    expected = model(ids, output_hidden_states=True).logits
    twin = shadow(model)
    assert torch.equal(twin(ids).logits, expected)
    assert not any(module._forward_hooks for module in twin.modules())


@pytest.mark.parametrize("bias", [True, False])
def test_merged_layers(bias: bool) -> None:
    linears = [nn.Linear(6, size, bias=bias) for size in (8, 4, 2)]
    hidden = torch.randn(2, 5, 6)
    expected = [linear(hidden) for linear in linears]
    before = [linear.weight.clone() for linear in linears]
    merged = MergedLinears(linears)
    parts = merged.parts()
    for _ in range(2):
        for part, wanted in zip(parts, expected, strict=True):
            torch.testing.assert_close(part(hidden), wanted)
    assert parts[0].group.output is None  # nothing is kept behind the last part
    assert len({linear.weight.untyped_storage().data_ptr() for linear in linears}) == 1
    for linear, wanted in zip(linears, expected, strict=True):
        torch.testing.assert_close(linear(hidden), wanted)
    merged.undo()
    assert len({linear.weight.untyped_storage().data_ptr() for linear in linears}) == 3
    assert all(torch.equal(linear.weight, weight) for linear, weight in zip(linears, before, strict=True))


def test_only_plain_layers_are_merged() -> None:
    model = tiny_llama()
    layers = model.config.num_hidden_layers
    assert len(list(mergeable(model))) == 2 * layers

    class Adapted(nn.Linear):
        pass

    model.model.layers[0].self_attn.k_proj = Adapted(4, 4)
    model.model.layers[0].mlp.up_proj = model.model.layers[0].mlp.up_proj.to(torch.bfloat16)
    assert len(list(mergeable(model))) == 2 * layers - 2


@pytest.mark.parametrize("merges", [True, False], ids=["merged", "as they are"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_pass_equals_masks(name: str, merges: bool) -> None:
    """Over a text longer than any window, for a chain with a branch, in a cache with room behind it."""
    model = TINY_MODELS[name](attn_implementation="eager")
    target = Target(model)
    length, nodes = 60, 4
    ids = torch.randint(3, 90, (1, length + nodes), generator=torch.Generator().manual_seed(1))

    def run(tree_pass: TreePass | None) -> Tensor:
        target.tree_pass = tree_pass
        cache = target.new_cache(is_fixed=True)
        cache.reserve(length + nodes + 30)
        columns = torch.arange(length)
        cache.prepare(columns[None], length)
        visible = torch.where(columns <= columns[:, None], columns, -1)
        target.forward(ids[:, :length], columns[None], visible[None], cache)
        cache.length = length
        words = chain_words(nodes, ids.device)
        words[3] = 0b1001  # the last node is a child of the root
        depths, size = torch.tensor([[0, 1, 2, 1]]), torch.tensor([length])
        sight = Sight(size, words[None], depths, torch.zeros_like(size))
        return target.see(ids[:, length:], length + depths, sight, cache)[0]

    with torch.no_grad():
        expected = run(None)
        tree_pass = TreePass(target.decoder, target.windows, "nothing")
        if merges:
            tree_pass.merge()
        torch.testing.assert_close(run(tree_pass), expected, rtol=1e-4, atol=1e-5)
        tree_pass.release()
        target.tree_pass = None
        torch.testing.assert_close(run(None), expected)
