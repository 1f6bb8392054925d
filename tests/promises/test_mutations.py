"""Faults that are put in on purpose: each makes a named check of this suite fail, so that the suite can see its kind.

A fault is a patch of one function, and is in force for one test. A check is a test of the suite, called here with
arguments that reach the fault; without it every check passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from microspec_hf import DraftTree, MicroSpecCandidateGenerator, generation, ops, verification
from microspec_hf.hf import Sight, Target, TreeCache, chain_words
from microspec_hf.hf import target as hf_target
from microspec_hf.stopping import Stops
from microspec_hf.verification import TokenRule
from microspec_hf.writing import Progress
from tests import test_generation as texts
from tests import test_sampling_law as sampling
from tests.doubles import SCRIPTS, perfect
from tests.promises import test_interrupts as interrupts
from tests.promises import test_processors as processors
from tests.promises import test_streams as streams
from tests.promises.support import setting

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

Patch = pytest.MonkeyPatch
Check = Callable[[], None]

CHECKS: dict[str, Check] = {
    "text of a random tree": lambda: texts.test_text_is_that_of_the_target("llama", "eager", "full", "random_tree"),
    "text of a last branch": lambda: texts.test_text_is_that_of_the_target(
        "llama", "eager", "full", "last_branch_right"
    ),
    "text within a window": lambda: texts.test_text_is_that_of_the_target("mistral", "sdpa", "full", "random_tree"),
    "text in two kinds of layers": lambda: texts.test_text_is_that_of_the_target(
        "gemma3", "sdpa", "full", "random_tree"
    ),
    "acceptance of a head that knows": lambda: texts.test_a_head_that_knows_the_target_is_accepted("full"),
    "length": lambda: texts.test_max_new_tokens(5, perfect),
    "end token in a block": lambda: texts.test_end_token_at_every_index_of_a_block(3, perfect),
    "criterion": lambda: processors.test_criterion_is_asked_once_for_each_token_and_not_behind_the_stop(5, "perfect"),
    "prefixes": lambda: processors.test_processor_sees_true_prefixes_in_order_and_each_position_once("random_tree"),
    "no repeated n-gram": lambda: processors.test_processor("NoRepeatNGramLogitsProcessor", False, "llama"),
    "sampled top_p": lambda: processors.test_processor("TopPLogitsWarper", True, "llama"),
    "stream": lambda: streams.test_single_tokens_in_order("random_tree", "microspec"),
    "returned cache": lambda: texts.test_returned_cache_serves_a_next_plain_call("llama"),
    "batch": lambda: texts.test_batch_of_unequal_prompts("llama", texts.BATCH_ARGUMENTS["end_token"]),
    "law of a round": lambda: sampling.test_law_of_a_round("two levels", "temperature 2"),
    "temperature": lambda: sampling.test_temperature_has_an_effect(),
    "seed": interrupts.test_seed_repeats_the_text,
    "random state": lambda: interrupts.test_greedy_leaves_the_random_state_untouched({}),
}


@dataclass(frozen=True)
class Fault:
    """One thing done wrong.

    Args:
        inject: puts it in.
        caught_by: names of checks that fail, every one of them.
        keeps: names of checks that pass all the same: what the fault must not touch.
    """

    inject: Callable[[Patch], None]
    caught_by: tuple[str, ...]
    keeps: tuple[str, ...] = ()


def _tree_pass(patch: Patch, change: Callable[[Tensor, Sight], tuple[Tensor, Sight]]) -> None:
    """Change the positions `[B, N]` of every tree, and what its nodes see, before the target does."""
    original = Target.see

    def changed(self: Target, tokens: Tensor, positions: Tensor, sight: Sight, *others: Any) -> Any:
        return original(self, tokens, *change(positions, sight), *others)

    patch.setattr(Target, "see", changed)


def mask_off_by_one(patch: Patch) -> None:
    """A node sees the neighbours of its ancestors."""
    _tree_pass(patch, lambda positions, sight: (positions, replace(sight, ancestors=sight.ancestors << 1)))


def siblings_visible(patch: Patch) -> None:
    """A node sees all nodes before it, as in a chain."""

    def change(positions: Tensor, sight: Sight) -> tuple[Tensor, Sight]:
        chain = chain_words(positions.shape[1], positions.device)
        return positions, replace(sight, ancestors=chain.expand_as(sight.ancestors))

    _tree_pass(patch, change)


def positions_off_by_one(patch: Patch) -> None:
    _tree_pass(patch, lambda positions, sight: (positions + 1, sight))


def positions_by_row(patch: Patch) -> None:
    """A node's position is its row in the cache, not its depth."""
    _tree_pass(patch, lambda positions, sight: (sight.length[:, None] + torch.arange(positions.shape[1]), sight))


def latest_row_forgotten(patch: Patch) -> None:
    """The tree does not see the last token before its root."""
    original = Sight.positions

    def changed(self: Sight, view: int) -> Tensor:
        is_latest = torch.arange(view) == self.length[:, None, None] - 1
        return original(self, view).masked_fill(is_latest, -1)

    patch.setattr(Sight, "positions", changed)


def wrong_row_compacted(patch: Patch) -> None:
    """The keys of an accepted node are those of its neighbour."""
    original = ops.compact_kv

    def changed(buffers: Any, path: Tensor, length: Tensor) -> None:
        slots = torch.arange(path.shape[0])
        original(buffers, torch.where(slots > 0, (path - 1).clamp(min=0), path), length)

    patch.setattr(ops, "compact_kv", changed)


def nothing_compacted(patch: Patch) -> None:
    patch.setattr(ops, "compact_kv", lambda buffers, path, length: None)


def window_ignored(patch: Patch) -> None:
    original = hf_target.additive_mask
    patch.setattr(hf_target, "additive_mask", lambda v, positions, window, dtype: original(v, positions, None, dtype))


def window_off_by_one(patch: Patch) -> None:
    original = hf_target.additive_mask

    def changed(visible: Tensor, positions: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
        return original(visible, positions, None if window is None else window + 1, dtype)

    patch.setattr(hf_target, "additive_mask", changed)


def stop_one_token_late(patch: Patch) -> None:
    original = Stops.__call__
    patch.setattr(Stops, "__call__", lambda self, ids, token, scores: original(self, ids[:-1], int(ids[-2]), scores))


def stop_at_the_end_of_a_block(patch: Patch) -> None:
    """What stops a text is asked of the last token of a round only."""

    def changed(self: Progress, emission: Any) -> tuple[int, bool]:
        count = len(emission.tokens)
        return count, self.ends(self.text.state.ids[: self.length + count], emission.tokens[-1], None)

    patch.setattr(Progress, "_cut", changed)


def stream_in_blocks(patch: Patch) -> None:
    original = Progress._cut

    def changed(self: Progress, emission: Any) -> tuple[int, bool]:
        if self.streamer is None:
            return original(self, emission)
        self.streamer.put(torch.tensor(emission.tokens))
        streamer, self.streamer = self.streamer, None
        kept = original(self, emission)
        self.streamer = streamer
        return kept

    patch.setattr(Progress, "_cut", changed)


def _scores(patch: Patch, change: Callable[[Tensor], Tensor]) -> None:
    """Change the prefix that processors see."""
    original = TokenRule.scores
    patch.setattr(TokenRule, "scores", lambda self, prefix, logits: original(self, change(prefix), logits))


def prefix_without_its_end(patch: Patch) -> None:
    _scores(patch, lambda prefix: prefix[:-1])


def one_prefix_for_all_nodes(patch: Patch) -> None:
    """Processors that look back are run on all nodes at once, with the text before the tree."""
    patch.setattr(TokenRule, "is_history_free", property(lambda self: True))


def processors_forgotten(patch: Patch) -> None:
    patch.setattr(TokenRule, "scores", lambda self, prefix, logits: logits.float())


def _accept(patch: Patch, change: Callable[..., Any]) -> None:
    original = verification.accept
    patch.setattr(
        verification, "accept", lambda tree, chosen, slots: change(original(tree, chosen, slots), tree, chosen)
    )


def bonus_token_of_the_root(patch: Patch) -> None:
    """The last token of a round is what the target says at the root."""

    def change(judged: Any, tree: DraftTree, chosen: Tensor) -> Any:
        last = torch.arange(judged.emitted.shape[0]) == judged.num_accepted
        return verification.Verification(
            path=judged.path, emitted=torch.where(last, chosen[0], judged.emitted), num_accepted=judged.num_accepted
        )

    _accept(patch, change)


def first_child_accepted(patch: Patch) -> None:
    """A draft is accepted because it was the drafter's first choice."""
    original = verification.accept

    def changed(tree: DraftTree, chosen: Tensor, slots: int) -> Any:
        children = [n for n, parent in enumerate(tree.parents.tolist()) if parent == 0]
        if children:
            chosen = chosen.clone()
            chosen[0] = tree.tokens[children[0]].clamp(min=0)
        return original(tree, chosen, slots)

    patch.setattr(verification, "accept", changed)


def sampling_takes_the_best(patch: Patch) -> None:
    patch.setattr(TokenRule, "choose", lambda self, scores: scores.argmax(dim=-1))


def sampling_is_flattened(patch: Patch) -> None:
    original = TokenRule.choose
    patch.setattr(TokenRule, "choose", lambda self, scores: original(self, scores / 1.3))


def greedy_draws(patch: Patch) -> None:
    """Greedy decoding takes a random number that it does not need."""
    original = TokenRule.choose

    def changed(self: TokenRule, scores: Tensor) -> Tensor:
        torch.rand(1)
        return original(self, scores)

    patch.setattr(TokenRule, "choose", changed)


def unseeded_draws(patch: Patch) -> None:
    """Draws come from a generator of their own."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)

    def changed(self: TokenRule, scores: Tensor) -> Tensor:
        return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]

    patch.setattr(TokenRule, "choose", changed)


def cache_with_rejected_rows(patch: Patch) -> None:
    """The returned cache holds a row behind the end of the text."""
    original = generation.export_cache

    def changed(caches: Any, padding: Any, length: int, target: Any) -> None:
        original(caches, padding, length + 1, target)

    patch.setattr(generation, "export_cache", changed)


def batch_confuses_rows(patch: Patch) -> None:
    """When a row of a batch ends, each of the others goes on with the cache of its neighbour."""
    original = TreeCache.keep

    def changed(self: TreeCache, rows: Any) -> None:
        keys = self.rows_of[0].keys
        assert keys is not None
        original(self, [(row + 1) % keys.shape[0] for row in rows])

    patch.setattr(TreeCache, "keep", changed)


def stale_drafter_row(patch: Patch) -> None:
    """The drafter starts each round from the tokens that the round before emitted."""
    original = MicroSpecCandidateGenerator.expect
    latest: dict[int, Tensor] = {}

    def changed(self: MicroSpecCandidateGenerator, hidden: Tensor, next_tokens: Tensor, count: Tensor) -> None:
        stale = latest.get(id(self), next_tokens)
        latest[id(self)] = next_tokens
        original(self, hidden, stale, count)

    patch.setattr(MicroSpecCandidateGenerator, "expect", changed)


def drafter_forgets(patch: Patch) -> None:
    """The drafter's own cache is not filled by the prompt."""
    patch.setattr(MicroSpecCandidateGenerator, "feed", lambda self, hidden, next_tokens: None)


TEXT = ("text of a random tree", "text of a last branch")
FAULTS: dict[str, Fault] = {
    "tree mask off by one": Fault(mask_off_by_one, TEXT),
    "siblings visible": Fault(siblings_visible, TEXT),
    "positions off by one": Fault(positions_off_by_one, TEXT),
    "positions by row": Fault(positions_by_row, TEXT),
    "latest row forgotten": Fault(latest_row_forgotten, TEXT),
    "wrong row compacted": Fault(wrong_row_compacted, TEXT),
    "nothing compacted": Fault(nothing_compacted, TEXT),
    "window ignored": Fault(window_ignored, ("text within a window", "text in two kinds of layers"), TEXT),
    "window off by one": Fault(window_off_by_one, ("text within a window", "text in two kinds of layers"), TEXT),
    "stop one token late": Fault(stop_one_token_late, ("length", "end token in a block", "criterion")),
    "stop at the end of a block": Fault(stop_at_the_end_of_a_block, ("length", "end token in a block", "criterion")),
    "stream in blocks": Fault(stream_in_blocks, ("stream",), TEXT),
    "prefix without its end": Fault(prefix_without_its_end, ("prefixes", "no repeated n-gram"), TEXT),
    "one prefix for all nodes": Fault(one_prefix_for_all_nodes, ("prefixes", "no repeated n-gram"), TEXT),
    "processors forgotten": Fault(processors_forgotten, ("prefixes", "no repeated n-gram", "sampled top_p"), TEXT),
    "bonus token of the root": Fault(bonus_token_of_the_root, TEXT),
    "first child accepted": Fault(first_child_accepted, TEXT),
    "sampling takes the best": Fault(sampling_takes_the_best, ("law of a round", "temperature"), TEXT),
    "sampling is flattened": Fault(sampling_is_flattened, ("law of a round", "sampled top_p"), TEXT),
    "greedy draws": Fault(greedy_draws, ("random state",), TEXT),
    "unseeded draws": Fault(unseeded_draws, ("seed",), ("law of a round",)),
    "cache with rejected rows": Fault(cache_with_rejected_rows, ("returned cache",), TEXT),
    "batch confuses rows": Fault(batch_confuses_rows, ("batch",), TEXT),
    "stale drafter row": Fault(stale_drafter_row, ("acceptance of a head that knows",), TEXT),
    "drafter forgets": Fault(drafter_forgets, ("acceptance of a head that knows",), TEXT),
}


@pytest.mark.parametrize("name", CHECKS)
def test_check_passes_without_a_fault(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize(
    ("fault", "check"),
    [pytest.param(fault, check, id=f"{name}: {check}") for name, fault in FAULTS.items() for check in fault.caught_by],
)
def test_fault_is_caught(fault: Fault, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _ = setting()  # made, and found fit for trees, before anything is broken
    fault.inject(monkeypatch)
    with pytest.raises(AssertionError):
        CHECKS[check]()


@pytest.mark.parametrize(
    ("fault", "check"),
    [pytest.param(fault, check, id=f"{name}: {check}") for name, fault in FAULTS.items() for check in fault.keeps],
)
def test_fault_changes_nothing_else(fault: Fault, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.inject(monkeypatch)
    CHECKS[check]()


def test_every_check_catches_something() -> None:
    assert {*CHECKS} == {check for fault in FAULTS.values() for check in fault.caught_by}
    assert {"perfect", "random_tree", "last_branch_right"} <= {*SCRIPTS}


def test_acceptance_falls_where_only_the_drafter_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not change the text must show in the statistics."""
    model, head = texts.controlled_pair(scale=0.1)
    ask: dict[str, Any] = {"drafter": head, "max_new_tokens": 30, "return_dict_in_generate": True}
    ask["microspec"] = {"vocabulary": "full"}
    sound = texts.speculate(model, texts.prompt_of(model), **ask)
    stale_drafter_row(monkeypatch)
    broken = texts.speculate(model, texts.prompt_of(model), **ask)
    assert broken.sequences.tolist() == sound.sequences.tolist()
    assert broken.stats[0].acceptance_length < 0.8 * sound.stats[0].acceptance_length
