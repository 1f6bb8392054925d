"""The candidate generator drafts what EAGLE-2 defines, from true features only, for our loop and for transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import CandidateGenerator, LogitsProcessorList

from microspec_hf import DraftTree, EagleHead, MicroSpecCandidateGenerator, TreeConfig, VocabularyConfig
from microspec_hf.hf import Target
from microspec_hf.verification import TokenRule
from microspec_hf.vocabulary import FullVocabulary, make_vocabulary
from tests.doubles import (
    begin,
    controlled_pair,
    draft_tree,
    last_branch_right,
    make_drafter,
    nan_head,
    plain,
    random_head,
    random_prompt,
)
from tests.tiny import tiny_llama

GREEDY = TokenRule(LogitsProcessorList(), do_sample=False)
FULL = VocabularyConfig("full")


@torch.no_grad()
def true_features(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Hidden rows `[L, H]` after the final norm, from one plain forward."""
    return model(ids[None], output_hidden_states=True).hidden_states[-1][0]


@torch.no_grad()
def slow_draft(model: PreTrainedModel, head: EagleHead, ids: Tensor, tree: TreeConfig) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree below `ids[-1]`, by the definition: no cache, no masks, one node at a time."""
    embeddings = model.get_input_embeddings()
    features, following = true_features(model, ids[:-1]), ids[1:]

    def extend(path: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        """Output of the last row, and log-probabilities, with the rows of a path behind the true ones."""
        hidden = torch.cat([features, *(state[None] for state, _ in path)])
        tokens = torch.cat([following, following.new_tensor([token for _, token in path])])
        positions = torch.arange(len(tokens))[None]
        output = head(embeddings(tokens)[None], hidden[None], positions)[0, -1]
        return output, model.lm_head(output).float().log_softmax(-1)

    def best(scores: Tensor) -> list[int]:
        return sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))

    k = tree.top_k
    output, log_q = extend([])
    # Candidates in flat order: score, flat id of the parent, token, path of (hidden state, token) rows to expand it.
    candidates = [(float(log_q[t]), -1, t, [(output, t)]) for t in best(log_q)[:k]]
    beam = list(range(k))
    for _ in range(tree.depth):
        first = len(candidates)
        for flat in beam:
            score, _, _, path = candidates[flat]
            output, log_q = extend(path)
            candidates += [(score + float(log_q[t]), flat, t, [*path, (output, t)]) for t in best(log_q)[:k]]
        beam = sorted(range(first, len(candidates)), key=lambda f: (-candidates[f][0], f))[:k]
    chosen = sorted(sorted(range(len(candidates)), key=lambda f: (-candidates[f][0], f))[: tree.num_nodes - 1])
    node_of = {-1: 0} | {flat: node for node, flat in enumerate(chosen, start=1)}
    tokens = [int(ids[-1]), *(candidates[flat][2] for flat in chosen)]
    parents = [-1, *(node_of[candidates[flat][1]] for flat in chosen)]
    return tokens, parents


class Led(MicroSpecCandidateGenerator):
    """Drafts as always and keeps the tree, but may offer one that follows a text, so that drafts are accepted."""

    def __init__(self, *args: Any, text: list[int]):
        super().__init__(*args)
        self.text, self.follow = text, False
        self.drafted: list[DraftTree] = []
        self.position = 0

    def draft(self, root: Tensor) -> DraftTree:
        self.drafted.append(super().draft(root))
        if not self.follow:
            return self.drafted[-1]
        upcoming = self.text[self.position : self.position + self.tree.num_levels]
        return draft_tree(int(root), last_branch_right(upcoming, self.target.vocab_size, 0))


def led(model: PreTrainedModel, head: EagleHead, tree: TreeConfig, text: list[int]) -> tuple[Target, Led]:
    target = Target(model)
    return target, Led(target, head, FullVocabulary(target.head, tree.top_k), tree, text=text)


ROUNDS = (False, True, True, False, True)
"""Which rounds follow the text: after the prompt, after a refusal and after an accepted path, all of them."""


@pytest.mark.parametrize("tree", [TreeConfig(2, 3, 12), TreeConfig(0, 4, 4), TreeConfig(4, 2, 15)], ids=str)
@pytest.mark.parametrize("length", [1, 6])
@torch.no_grad()
def test_tree_is_that_of_the_definition(tree: TreeConfig, length: int) -> None:
    model = tiny_llama(dtype=torch.float64)
    head = random_head(model, seed=3, dtype=torch.float64)
    prompt = random_prompt(model, length)
    target, drafter = led(model, head, tree, plain(model, prompt, max_new_tokens=30)[0].tolist())
    alone, _ = begin(target, drafter, prompt[0], GREEDY, chunk=4)
    num_accepted = []
    for drafter.follow in ROUNDS:
        drafter.position = len(alone.state.ids)
        expected = slow_draft(model, head, alone.state.ids, tree)
        num_accepted.append(len(alone.step().tokens) - 1)
        assert (drafter.drafted[-1].tokens.tolist(), drafter.drafted[-1].parents.tolist()) == expected
    assert [n for n, follow in zip(num_accepted, ROUNDS, strict=True) if follow] == [tree.num_levels] * 3


@torch.no_grad()
def test_cache_holds_rows_of_true_features_only() -> None:
    model = tiny_llama(dtype=torch.float64)
    head = random_head(model, dtype=torch.float64)
    prompt = random_prompt(model, 6)
    target, drafter = led(model, head, TreeConfig(2, 3, 12), plain(model, prompt, max_new_tokens=30)[0].tolist())
    alone, _ = begin(target, drafter, prompt[0], GREEDY, chunk=4)
    for drafter.follow in ROUNDS:
        drafter.position = len(alone.state.ids)
        num_decided = len(alone.state.ids)
        alone.step()

        # One row for each decided token but the last: the pair of its hidden state and the token behind it.
        assert int(drafter.num_rows) == num_decided - 1
        ids = alone.state.ids[:num_decided]
        _, afresh = led(model, head, drafter.tree, [])
        afresh.feed(true_features(model, ids[:-1]), ids[1:])
        for ours, theirs in zip(drafter.cache.buffers(), afresh.cache.buffers(), strict=True):
            rows = num_decided - 1
            torch.testing.assert_close(ours[:, :, :rows], theirs[:, :, :rows], rtol=0, atol=1e-9)


@torch.no_grad()
def test_feeding_in_pieces_is_feeding_at_once() -> None:
    model = tiny_llama(dtype=torch.float64)
    head = random_head(model, dtype=torch.float64)
    ids = random_prompt(model, 12)[0]
    features = true_features(model, ids)
    trees = []
    for sizes in ([11], [1, 4, 6], [0, 11]):
        _, drafter = led(model, head, TreeConfig(2, 3, 12), [])
        start = 0
        for size in sizes:
            drafter.feed(features[start : start + size], ids[start + 1 : start + size + 1])
            start += size
        slots = drafter.tree.num_path_slots
        last = torch.nn.functional.pad(features[-1:], (0, 0, 0, slots - 1), value=9.0)  # padding must not matter
        drafter.expect(last, torch.nn.functional.pad(torch.tensor([5]), (0, slots - 1), value=7), torch.tensor([1]))
        drafter.commit(12, 1)
        trees.append(drafter.draft(torch.tensor([5])))
    for tree in trees[1:]:
        assert torch.equal(tree.tokens, trees[0].tokens)
        assert torch.equal(tree.parents, trees[0].parents)


@torch.no_grad()
def test_rows_before_a_late_start_are_never_seen() -> None:
    model = tiny_llama(dtype=torch.float64)
    head = random_head(model, dtype=torch.float64)
    ids = random_prompt(model, 12)[0]
    features = true_features(model, ids)
    trees = []
    for rubbish in (0.0, 1e3):
        _, drafter = led(model, head, TreeConfig(2, 3, 12), [])
        drafter.start_at(6)
        drafter.cache.reserve(64)
        drafter.feed(features[6:11], ids[7:])
        for buffer in drafter.cache.buffers():
            buffer[:, :, :6] = rubbish
        slots = drafter.tree.num_path_slots
        drafter.expect(
            torch.nn.functional.pad(features[-1:], (0, 0, 0, slots - 1)),
            torch.nn.functional.pad(torch.tensor([5]), (0, slots - 1)),
            torch.tensor([1]),
        )
        trees.append(drafter.draft(torch.tensor([5])))
    assert torch.equal(trees[0].tokens, trees[1].tokens)

    # Rows are where they would be with an early start: a key depends on its own pair and position alone.
    _, early = led(model, head, TreeConfig(2, 3, 12), [])
    early.feed(features[:11], ids[1:])
    for ours, theirs in zip(drafter.cache.buffers(), early.cache.buffers(), strict=True):
        torch.testing.assert_close(ours[:, :, 6:11], theirs[:, :, 6:11], rtol=0, atol=1e-9)


@torch.no_grad()
def test_held_rows_are_fed_before_the_next_draft() -> None:
    """Plain steps between two drafts: the next tree is that of a drafter that drafted every time."""
    model = tiny_llama(dtype=torch.float64)
    head = random_head(model, dtype=torch.float64)
    prompt = random_prompt(model, 6)
    text = plain(model, prompt, max_new_tokens=30)[0].tolist()
    trees = []
    for draft in (True, False):
        target, drafter = led(model, head, TreeConfig(2, 3, 12), text)
        alone, _ = begin(target, drafter, prompt[0], GREEDY)
        drafter.follow = False
        for drafts in (True, draft, draft, True):
            drafter.position = len(alone.state.ids)
            assert len(alone.step(draft=drafts).tokens) == 1
        trees.append(drafter.drafted[-1])
        assert int(drafter.num_rows) == len(alone.state.ids) - 2
    assert torch.equal(trees[0].tokens, trees[1].tokens)


@torch.no_grad()
def test_siblings_differ_and_parents_come_first() -> None:
    model, head = controlled_pair(scale=0.1)
    prompt = random_prompt(model)
    for tree in (TreeConfig(), TreeConfig(5, 10, 64), TreeConfig(15, 2, 60)):
        for config in (FULL, VocabularyConfig(max_rows=12)):
            target, drafter = make_drafter(model, head, config, tree)
            alone, _ = begin(target, drafter, prompt[0], GREEDY, chunk=512)
            drafted = drafter.draft(alone.state.root)
            pairs = list(zip(drafted.parents.tolist(), drafted.tokens.tolist(), strict=True))
            assert all(parent < node for node, (parent, _) in enumerate(pairs))
            real = [pair for pair in pairs if pair[1] >= 0]
            assert len(set(real)) == len(real)
            again = DraftTree.from_parents(drafted.tokens, drafted.parents)
            assert torch.equal(again.depths, drafted.depths)
            assert torch.equal(again.ancestors, drafted.ancestors)
            assert int(drafted.depths.max()) <= tree.num_levels


@torch.no_grad()
def test_nan_is_no_candidate() -> None:
    model = tiny_llama()
    target, drafter = make_drafter(model, nan_head(model), FULL, TreeConfig())
    alone, first = begin(target, drafter, random_prompt(model)[0], GREEDY, chunk=512)
    tree = drafter.draft(alone.state.root)
    assert tree.tokens.tolist() == [first.tokens[0], *[-1] * 59]


@torch.no_grad()
def test_only_active_ids_are_drafted() -> None:
    model, head = controlled_pair(scale=0.1)
    listed = tuple(range(0, 101, 3))
    target, drafter = make_drafter(model, head, VocabularyConfig("static", token_ids=listed), TreeConfig())
    alone, _ = begin(target, drafter, random_prompt(model)[0], GREEDY, chunk=512)
    assert {*drafter.draft(alone.state.root).tokens[1:].tolist()} <= {*listed}


# transformers' own loop --------------------------------------------------------------------------------------------


def assisted(model: PreTrainedModel, prompt: Tensor, generator: CandidateGenerator, **arguments: Any) -> Any:
    """transformers' assisted decoding with our candidate generator in place of its prompt lookup."""
    model._get_candidate_generator = lambda **kwargs: generator
    try:
        return plain(model, prompt, prompt_lookup_num_tokens=2, **arguments)
    finally:
        del model._get_candidate_generator


class Counting(MicroSpecCandidateGenerator):
    """Notes what transformers' loop tells it."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.matches: list[int] = []

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        super().update_candidate_strategy(input_ids, scores, num_matches)
        self.matches.append(int(num_matches))


@pytest.mark.parametrize("vocabulary", [FULL, VocabularyConfig(), VocabularyConfig(max_rows=5, verify_nodes="path")])
@pytest.mark.parametrize("length", [1, 9])
def test_transformers_assisted_decoding(length: int, vocabulary: VocabularyConfig) -> None:
    model, head = controlled_pair(scale=0.1)
    prompt = random_prompt(model, length)
    target = Target(model)
    tree = TreeConfig()
    generator = Counting(target, head, make_vocabulary(vocabulary, target.head, [], tree.top_k), tree)
    assert isinstance(generator, CandidateGenerator)
    got = assisted(model, prompt, generator, max_new_tokens=30)
    assert got.tolist() == plain(model, prompt, max_new_tokens=30).tolist()
    assert sum(generator.matches) + len(generator.matches) == 30
    if vocabulary is FULL:
        assert sum(generator.matches) / len(generator.matches) > 1
    assert generator.vocabulary.statistics().rounds >= len(generator.matches) - 2


def test_transformers_assisted_decoding_feeds_true_features() -> None:
    """In transformers' loop, too, the head's cache is the one that the whole text gives at once."""
    model, head = controlled_pair(scale=0.1)
    prompt = random_prompt(model, 9)
    _, drafter = make_drafter(model, head, FULL, TreeConfig())
    text = assisted(model, prompt, drafter, max_new_tokens=25)[0]
    rows = int(drafter.num_rows)
    assert rows > 25
    _, afresh = make_drafter(model, head, FULL, TreeConfig())
    with torch.no_grad():
        afresh.feed(true_features(model, text[:rows]), text[1 : rows + 1])
    for ours, theirs in zip(drafter.cache.buffers(), afresh.cache.buffers(), strict=True):
        torch.testing.assert_close(ours[:, :, :rows], theirs[:, :, :rows], rtol=0, atol=1e-4)


def test_transformers_assisted_decoding_with_a_random_head() -> None:
    model = tiny_llama()
    prompt = random_prompt(model)
    _, drafter = make_drafter(model, random_head(model), FULL, TreeConfig())
    got = assisted(model, prompt, drafter, max_new_tokens=20)
    assert got.tolist() == plain(model, prompt, max_new_tokens=20).tolist()
