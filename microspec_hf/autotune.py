"""`tree="auto"`: the tree that promises the most tokens a second on this machine.

A wide target pass costs more than a narrow one, by how much depends on the machine: on two CPU cores 60 nodes cost
three times one token, and 4 half as much again as 3; on a large GPU 60 cost a fifth more. The costs are measured once
for a target, and with them from which side a product of few rows is faster (`ops.few_rows`); what a tree of each shape
gains is read from the drafter's `expected_acceptance`, which was measured when it was made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from microspec_hf import ops
from microspec_hf.config import TreeConfig, VocabularyConfig
from microspec_hf.eagle import EagleHead
from microspec_hf.hf import Sight, Target, TreeCache, additive_mask, chain_words
from microspec_hf.ops.few_rows import is_for

WIDTHS = (2, 3, 4, 8, 16, 24, 32, 60)
"""Nodes of the trees that are compared. Only measured widths: costs jump where a library changes its algorithm."""
FEW = 4
"""Nodes of the pass that tells how matrix products are computed."""
DEPTHS = (0, 1, 2, 3, 4, 5)
CONTEXT = 128
"""Tokens in the cache while costs are measured."""


@dataclass(frozen=True)
class Choice:
    """A tree, and what a round with it costs.

    Args:
        tree: the tree.
        cost: of a round, in plain steps: so many tokens a round must yield to be worth it.
        few_rows: whether its matrix products are faster from the other side, see `Target.with_few_rows`.
    """

    tree: TreeConfig
    cost: float
    few_rows: bool = False


_chosen: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[EagleHead, Choice]] = WeakKeyDictionary()


def candidate_trees() -> list[TreeConfig]:
    """The trees that `tree="auto"` chooses from: each depth with each width that it can fill and that can fill it.

    A node among the n - 1 best has fewer than n - 1 better siblings, so that a larger top-k would draft in vain.
    """
    shapes = [(depth, min(10, nodes - 1), nodes) for depth in DEPTHS for nodes in WIDTHS if nodes > depth + 1]
    return [TreeConfig(d, k, n) for d, k, n in shapes if n <= k + d * k**2 + 1]


def choose_tree(target: Target, head: EagleHead) -> Choice:
    """Measure once for each pair of target and head, then answer from memory."""
    chosen = _chosen.setdefault(target.model, WeakKeyDictionary())
    if head not in chosen:
        rows = sorted({tree.top_k for tree in candidate_trees()})
        few_rows = _few_rows_are_faster(target)
        target = target.with_few_rows() if few_rows else target
        choice = best_tree(
            target_cost={width: _target_seconds(target, width) for width in (1, *WIDTHS)},
            draft_cost={k: _draft_seconds(target, head, k) for k in rows},
            table=head.config.expected_acceptance,
        )
        chosen[head] = replace(choice, few_rows=few_rows)
    return chosen[head]


def _few_rows_are_faster(target: Target) -> bool:
    """Whether a narrow pass is faster with them by more than what measuring is off by."""
    return is_for(target.head.weight) and _target_seconds(target.with_few_rows(), FEW) < 0.9 * _target_seconds(
        target, FEW
    )


def best_tree(
    target_cost: Mapping[int, float], draft_cost: Mapping[int, float], table: dict[str, dict[str, float]]
) -> Choice:
    """The tree with the most expected tokens a second.

    Args:
        target_cost: seconds of one target pass over so many nodes; one node is a plain step.
        draft_cost: seconds of one drafter pass over so many rows (top-k).
        table: expected acceptance length by depth and nodes, JSON keys; empty: a prior of EAGLE-2's published means.
    """
    trees = [t for t in candidate_trees() if not table or str(t.depth) in table]  # measured and guessed do not compare

    def seconds(tree: TreeConfig) -> float:
        return target_cost[tree.num_nodes] + (tree.depth + 1) * draft_cost[tree.top_k]

    best = max(trees, key=lambda tree: expected_acceptance(tree, table) / seconds(tree))
    return Choice(best, seconds(best) / target_cost[1])


def expected_acceptance(tree: TreeConfig, table: dict[str, dict[str, float]]) -> float:
    """Expected tokens a round, from the drafter's table (linear in the nodes between its columns) or the prior."""
    if row := table.get(str(tree.depth)):
        nodes = sorted(map(int, row))
        return _interpolate(nodes, [row[str(n)] for n in nodes])(tree.num_nodes)
    # EAGLE-2's published means (3.9 tokens at 60 nodes, 3.3 with half of them) as a geometric law over the levels.
    agree = 0.5 + 0.25 * min(1.0, (tree.num_nodes - 1) / 59) ** 0.3
    return float(sum(agree**level for level in range(tree.num_levels + 1)))


def _interpolate(xs: Sequence[int], ys: Sequence[float]) -> Callable[[int], float]:
    def value(x: int) -> float:
        x = min(max(x, xs[0]), xs[-1])
        right = next(i for i, edge in enumerate(xs) if edge >= x)
        if xs[right] == x:
            return ys[right]
        share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
        return ys[right - 1] * (1 - share) + ys[right] * share

    return value


def _target_seconds(target: Target, width: int) -> float:
    device, limit = target.device, target.position_limit
    cache = target.new_cache()
    cache.length = CONTEXT
    depths = torch.arange(width, device=device)[None]
    length = torch.tensor([CONTEXT], device=device)
    sight = Sight(length, chain_words(width, device)[None], depths, torch.zeros_like(length))
    positions = CONTEXT + depths if limit is None else (CONTEXT + depths).clamp(max=limit - 1)
    tokens = torch.zeros_like(depths)

    # A round also looks for the best ids at every node: few for a large tree, many for a small one.
    best = min(VocabularyConfig().verify_candidates_of(width) if width > 1 else 1, target.vocab_size)

    def run() -> None:
        hidden, _ = target.see(tokens, positions, sight, cache)
        ops.topk_candidates(target.head(hidden)[0], best)

    return _seconds(run, device)


def _draft_seconds(target: Target, head: EagleHead, rows: int) -> float:
    device, size = target.head.device, target.hidden_size
    step = target.for_rounds(head)
    cache = TreeCache(num_layers=1)
    positions = torch.arange(CONTEXT, CONTEXT + rows, device=device)
    hidden = torch.zeros(1, rows, size, dtype=target.dtype, device=device)
    visible = torch.arange(CONTEXT + rows, device=device) <= positions[:, None]
    mask = additive_mask(torch.where(visible, 0, -1), positions, None, target.dtype)
    weight = target.head.rows(torch.arange(min(3072, target.vocab_size), device=device))

    def run() -> None:
        cache.prepare(positions[None], CONTEXT + rows)
        output = step(hidden, hidden, positions[None], mask, cache)
        target.head.project(output[0], weight, None).float().log_softmax(-1).topk(rows)

    return _seconds(run, device)


def _seconds(run: Callable[[], None], device: torch.device, repeats: int = 3) -> float:
    """The fastest of a few runs: other work on the machine only ever adds time."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        torch.zeros(1, device=device).item()  # waits for the device
        times.append(time.perf_counter() - started)
    return min(times)
