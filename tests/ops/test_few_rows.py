"""Matrix products of a few rows from the other side: the same numbers, and no others are touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from microspec_hf import TreeConfig, autotune, generation
from microspec_hf.autotune import Choice, choose_tree
from microspec_hf.hf import Target
from microspec_hf.ops import few_rows
from microspec_hf.ops.few_rows import FewRowsLinear
from tests.doubles import plain, random_head, random_prompt, speculate
from tests.tiny import TINY_MODELS, tiny_llama


@pytest.fixture
def changed_over(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes `[rows, V]` of the products that were computed from the other side."""
    shapes: list[tuple[int, ...]] = []
    original = torch.mm

    def counted(left: Tensor, right: Tensor) -> Tensor:
        shapes.append((right.shape[1], left.shape[0]))
        return original(left, right)

    monkeypatch.setattr(torch, "mm", counted)
    return shapes


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(2, 24), (1, 3, 24), (2, 5, 24), (64, 24)], ids=str)
def test_it_is_linear(shape: tuple[int, ...], bias: bool, changed_over: list[tuple[int, ...]]) -> None:
    layer, rows = FewRowsLinear(24, 40, bias=bias), torch.randn(shape)
    got = layer(rows)
    expected = nn.functional.linear(rows, layer.weight, layer.bias)
    assert changed_over == [(rows.shape[:-1].numel(), 40)]
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected)


class Own(Tensor):
    """A weight that multiplies itself, as quantised ones do."""


@pytest.mark.parametrize(
    ("rows", "weight"),
    [
        (torch.randn(1, 24), torch.randn(40, 24)),
        (torch.randn(65, 24), torch.randn(40, 24)),
        (torch.randn(0, 24), torch.randn(40, 24)),
        (torch.randn(4, 24).double(), torch.randn(40, 24).double()),
        (torch.randn(4, 24).bfloat16(), torch.randn(40, 24).bfloat16()),
        (torch.randn(4, 24), torch.randn(40, 24).as_subclass(Own)),
    ],
    ids=["one row", "many rows", "no rows", "float64", "bfloat16", "subclass"],
)
def test_other_products_are_left_alone(rows: Tensor, weight: Tensor, changed_over: list[tuple[int, ...]]) -> None:
    expected = nn.functional.linear(rows, weight)
    got = few_rows.linear(rows, weight)
    assert changed_over == []
    assert torch.equal(torch.Tensor(got.float()), torch.Tensor(expected.float()))


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_texts_are_the_same(
    name: str, is_on: bool, changed_over: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TINY_MODELS[name](attn_implementation="eager")
    choice = Choice(TreeConfig(depth=2, top_k=3, num_nodes=9), cost=1.2, few_rows=is_on)
    monkeypatch.setattr(generation, "choose_tree", lambda *_: choice)
    prompt = random_prompt(model)
    got = speculate(model, prompt, drafter=random_head(model), max_new_tokens=30, microspec={"tree": "auto"})
    assert got.tolist() == plain(model, prompt, max_new_tokens=30).tolist()
    assert bool(changed_over) == is_on


@pytest.mark.parametrize(("seconds", "is_on"), [(0.5, True), (0.95, False), (1.5, False)])
def test_what_is_faster_is_chosen(seconds: float, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[bool] = []

    def measured(target: Target, width: int) -> float:
        modes.append(target.head.linear is few_rows.linear)
        return width * (seconds if modes[-1] else 1.0)

    monkeypatch.setattr(autotune, "_target_seconds", measured)
    target = Target(tiny_llama())
    assert choose_tree(target, random_head(target.model)).few_rows == is_on
    assert set(modes[2:]) == {is_on}  # the trees are compared as they will run
    assert target.head.linear is nn.functional.linear  # the caller's is left as it was


def test_only_the_rounds_are_changed() -> None:
    model = tiny_llama()
    target = Target(model).with_few_rows()
    assert not any(isinstance(part, FewRowsLinear) for part in model.modules())
    assert target.decoder is model.get_decoder()  # reads prompts, and gives hidden states
    assert target.head.module.weight is model.lm_head.weight


def test_what_has_a_forward_of_its_own_stays_itself() -> None:
    model = tiny_llama()
    model.model.layers[0].mlp.forward = model.model.layers[0].mlp.forward
    target = Target(model)
    assert target.with_few_rows().for_rounds(target.decoder) is target.decoder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_where_it_cannot_serve_nothing_is_measured(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    monkeypatch.setattr(autotune, "_target_seconds", lambda target, width: widths.append(width) or 1.0)
    monkeypatch.setattr(autotune, "_draft_seconds", lambda *_: 1.0)
    target = Target(tiny_llama().to(dtype))
    assert not choose_tree(target, random_head(target.model)).few_rows
    assert widths == [1, *autotune.WIDTHS]
