"""How a text grows: `prefill` reads the prompt, `step` drafts, verifies and learns. The file to read first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from microspec_hf import ops
from microspec_hf.candidate_generator import MicroSpecCandidateGenerator
from microspec_hf.hf import Target
from microspec_hf.state import GenerationState
from microspec_hf.tree import DraftTree
from microspec_hf.verification import TokenRule, verify

HEAD_ROWS = 256
"""Prompt rows that go through the LM head at a time, so that no `[L, V]` tensor ever exists."""


@dataclass(frozen=True)
class Emission:
    """What one pass of the target decided.

    Args:
        tokens: the new tokens, at least one.
        logits: `[len(tokens), V]`, the target's raw fp32 logits, where they were asked for.
        scores: `[len(tokens), V]`, processed scores, likewise.
    """

    tokens: list[int]
    logits: Tensor | None = None
    scores: Tensor | None = None


def prefill(
    target: Target, drafter: MicroSpecCandidateGenerator, prompt: Tensor, rule: TokenRule, chunk: int, record: bool
) -> tuple[GenerationState, Emission]:
    """Run the prompt through the target in chunks, feed the drafter, and decide the first token.

    Args:
        prompt: int64 `[L]`, L >= 1.
        chunk: positions in one target pass.
        record: keep logits and scores.
    """
    cache = target.new_cache()
    cache.reserve(prompt.shape[0] + drafter.tree.num_nodes)
    candidates: list[Tensor] = []
    hidden = prompt.new_empty(0)
    for start in range(0, prompt.shape[0], chunk):
        tokens = prompt[start : start + chunk]
        positions = torch.arange(start, start + tokens.shape[0], device=prompt.device)
        columns = torch.arange(start + tokens.shape[0], device=prompt.device)
        cache.prepare(positions, columns.shape[0])
        hidden = target.forward(tokens, positions, torch.where(columns <= positions[:, None], columns, -1), cache)
        cache.length += tokens.shape[0]
        candidates += _prompt_candidates(target, hidden, drafter.vocabulary.prompt_candidates)
        following = prompt[start + 1 : start + 1 + tokens.shape[0]].to(drafter.device)
        drafter.feed(hidden[: following.shape[0]], following)
    drafter.vocabulary.begin(prompt.to(drafter.device), torch.cat(candidates) if candidates else None)

    logits = _logits(target, hidden[-1:]).to(prompt.device)
    scores = rule.scores(prompt, logits)
    first = rule.choose(scores)
    padding = drafter.tree.num_path_slots - 1
    drafter.expect(
        torch.nn.functional.pad(hidden[-1:], (0, 0, 0, padding)),
        torch.nn.functional.pad(first.to(drafter.device), (0, padding)),
        torch.ones(1, dtype=torch.int64, device=drafter.device),
    )
    state = GenerationState(
        ids=torch.cat([prompt, first]),
        cache=cache,
        length=torch.tensor([prompt.shape[0]], device=prompt.device),
        prompt_length=prompt.shape[0],
    )
    return state, Emission(first.tolist(), *((logits.float(), scores) if record else ()))


def step(
    target: Target, drafter: MicroSpecCandidateGenerator, state: GenerationState, rule: TokenRule, record: bool
) -> Emission:
    """One round: draft a tree, check it in one target pass, keep the path that agrees, learn from it."""
    tree = drafter.draft(state.root.to(drafter.device))
    hidden = _target_pass(target, state, tree)
    logits = _logits(target, hidden)
    candidates = ops.topk_candidates(logits, max(1, drafter.vocabulary.verify_candidates))
    judgement = verify(tree, logits, state.ids, rule, drafter.tree.num_path_slots, best=candidates[:, 0])
    verification = judgement.verification
    ops.compact_kv(state.cache.buffers(), verification.path, state.length)
    drafter.learn(hidden, tree, candidates[:, : drafter.vocabulary.verify_candidates], verification)
    state.length = state.length + verification.num_emitted.to(state.length.device)

    # The one copy from device to host: how many tokens, and which.
    count, *emitted = torch.cat([verification.num_emitted, verification.emitted]).tolist()
    drafter.commit(state.cache.length)
    state.commit(emitted[:count])
    if not record:
        return Emission(emitted[:count])
    raw = logits.index_select(0, verification.path)[:count].to(state.ids.device, torch.float32)
    return Emission(emitted[:count], raw, raw if judgement.scores is None else judgement.scores[:count])


def _target_pass(target: Target, state: GenerationState, tree: DraftTree) -> Tensor:
    """Hidden rows `[N, H]` of the tree's nodes, each seeing the text and its own ancestors."""
    device, num_nodes = state.ids.device, tree.num_nodes
    view = state.cache.length + num_nodes
    columns = torch.arange(view, device=device) - state.length
    depths, ancestors = tree.depths.to(device), tree.ancestor_mask().to(device)
    node = columns.clamp(0, num_nodes - 1)
    in_tree = (columns >= 0) & (columns < num_nodes) & ancestors[:, node]
    visible = torch.where(in_tree, state.length + depths[node], torch.where(columns < 0, columns + state.length, -1))
    state.cache.prepare(state.length + torch.arange(num_nodes, device=device), view)
    return target.forward(tree.tokens.clamp(min=0).to(device), state.length + depths, visible, state.cache)


def _logits(target: Target, hidden: Tensor) -> Tensor:
    """Logits `[T, V]` as `generate` compares them: those of a float64 model in float32, where near ones are equal."""
    logits = target.head(hidden)
    return logits.float() if logits.dtype == torch.float64 else logits


def _prompt_candidates(target: Target, hidden: Tensor, k: int) -> list[Tensor]:
    return [ops.topk_candidates(target.head(rows), k) for rows in hidden.split(HEAD_ROWS)] if k else []
