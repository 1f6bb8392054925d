"""`tree="auto"`: the best tree for given costs, measured once for each target."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from microspec_hf import TreeConfig, autotune
from microspec_hf.autotune import FEW, WIDTHS, best_tree, candidate_trees, choose_tree, expected_acceptance
from microspec_hf.hf import Target
from tests.doubles import random_head
from tests.tiny import tiny_llama

TABLE = {
    "1": {"4": 1.6, "60": 1.8},
    "3": {"4": 2.0, "60": 3.0},
    "5": {"8": 2.1, "60": 3.6},
}


def linear(base: float, per_node: float) -> dict[int, float]:
    return {width: base + per_node * width for width in (1, *WIDTHS)}


def drafts(cost: float) -> dict[int, float]:
    return dict.fromkeys({tree.top_k for tree in candidate_trees()}, cost)


def test_candidate_trees_can_be_filled_and_fill_themselves() -> None:
    trees = candidate_trees()
    assert len(set(trees)) == len(trees)
    for tree in trees:
        assert tree.num_path_slots <= tree.num_nodes <= tree.num_candidates + 1
        assert tree.top_k <= tree.num_nodes - 1


def test_free_width_and_drafts_take_the_largest_tree() -> None:
    assert best_tree(linear(1.0, 0.0), drafts(0.0), TABLE).tree == TreeConfig(5, 10, 60)


def test_dear_drafts_take_a_shallow_tree() -> None:
    assert best_tree(linear(1.0, 0.0), drafts(2.0), TABLE).tree.depth == 1


def test_dear_width_takes_a_narrow_tree() -> None:
    wide = best_tree(linear(1.0, 0.0), drafts(0.01), TABLE).tree
    narrow = best_tree(linear(1.0, 0.5), drafts(0.01), TABLE).tree
    assert narrow.num_nodes < 12 < wide.num_nodes


def test_cost_of_a_round_is_in_plain_steps() -> None:
    costs = {width: 0.5 if width == 1 else 1.0 for width in (1, *WIDTHS)}
    chosen = best_tree(costs, drafts(0.1), {"1": {"60": 2.0}})
    assert chosen.cost == pytest.approx((1.0 + 2 * 0.1) / 0.5)


def test_a_cost_that_jumps_is_not_smoothed_over() -> None:
    """A library that changes its algorithm at four rows: three nodes are the bargain, as on two CPU cores."""
    costs = {width: 1.0 if width < 4 else 2.0 for width in (1, *WIDTHS)}
    assert best_tree(costs, drafts(0.03), {}).tree.num_nodes == 3


@pytest.mark.parametrize("table", [TABLE, {}], ids=["measured", "prior"])
def test_best_tree_is_the_best_of_all(table: dict[str, dict[str, float]]) -> None:
    for per_node, draft_cost in ((0.0, 0.05), (0.02, 0.05), (0.1, 0.3)):
        cost = linear(1.0, per_node)
        chosen = best_tree(cost, drafts(draft_cost), table).tree

        def rate(tree: TreeConfig, cost: dict[int, float] = cost, draft_cost: float = draft_cost) -> float:
            return expected_acceptance(tree, table) / (cost[tree.num_nodes] + (tree.depth + 1) * draft_cost)

        others = [tree for tree in candidate_trees() if not table or str(tree.depth) in table]
        assert rate(chosen) == max(map(rate, others))


def test_expected_acceptance_is_linear_between_columns() -> None:
    assert expected_acceptance(TreeConfig(3, 10, 4), TABLE) == 2.0
    assert expected_acceptance(TreeConfig(3, 10, 60), TABLE) == 3.0
    assert expected_acceptance(TreeConfig(3, 10, 32), TABLE) == pytest.approx(2.5)
    assert expected_acceptance(TreeConfig(5, 10, 4), TABLE) == 2.1  # the nearest column


def test_prior_grows_with_depth_and_nodes() -> None:
    values = [[expected_acceptance(TreeConfig(d, 10, n), {}) for n in (8, 24, 60)] for d in (1, 3, 5)]
    assert all(row == sorted(row) for row in values)
    assert all(list(column) == sorted(column) for column in zip(*values, strict=True))
    assert 3.0 < values[2][2] < 4.5
    assert all(1 < v <= d + 2 for row, d in zip(values, (1, 3, 5), strict=True) for v in row)


def test_measured_and_guessed_gains_are_not_compared() -> None:
    """Depths that the table lacks are not chosen, however good the prior says they are."""
    for per_node, draft_cost in ((0.0, 2.0), (0.0, 0.3), (0.02, 0.05)):
        assert best_tree(linear(1.0, per_node), drafts(draft_cost), {"3": {"4": 1.1, "60": 1.2}}).tree.depth == 3


def test_another_head_has_a_tree_of_its_own() -> None:
    target = Target(tiny_llama())
    for depth in ("2", "4"):
        head = random_head(target.model)
        head.config.expected_acceptance = {depth: {"8": 2.0, "60": 3.0}}
        assert choose_tree(target, head).tree.depth == int(depth)


def test_pair_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    head = random_head(model)
    widths: list[int] = []
    measure: Callable[[Target, int], float] = autotune._target_seconds

    def counted(target: Target, width: int) -> float:
        widths.append(width)
        return measure(target, width)

    monkeypatch.setattr(autotune, "_target_seconds", counted)
    first = choose_tree(Target(model), head)
    assert widths == [FEW, FEW, 1, *WIDTHS]
    assert choose_tree(Target(model), head) == first
    assert widths == [FEW, FEW, 1, *WIDTHS]


def test_measured_seconds_grow_with_the_work() -> None:
    target = Target(tiny_llama())
    assert 0 < autotune._target_seconds(target, 2) < autotune._target_seconds(target, 60) * 3
    assert autotune._draft_seconds(target, random_head(target.model), 10) > 0


def test_costs_are_measured_where_positions_end_early() -> None:
    config = GPT2Config(
        vocab_size=101, n_embd=48, n_layer=1, n_head=4, n_positions=20, bos_token_id=None, eos_token_id=None
    )
    assert autotune._target_seconds(Target(GPT2LMHeadModel(config).eval()), 60) > 0
