"""How texts grow: `prefill` reads a prompt, `step` drafts, verifies and learns. The file to read first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from microspec_hf import ops
from microspec_hf.candidate_generator import MicroSpecCandidateGenerator
from microspec_hf.engine import Clock, Rounds
from microspec_hf.hf import Sight, Target, TreeCache
from microspec_hf.plain import NoDrafter
from microspec_hf.state import GenerationState
from microspec_hf.tree import DraftTree
from microspec_hf.verification import Ends, Judgement, TokenRule, verify

HEAD_ROWS = 256
"""Prompt rows that go through the LM head at a time, so that no `[L, V]` tensor ever exists."""


@dataclass(frozen=True)
class Record:
    """What is kept of every token beside its id.

    Args:
        scores: the target's raw logits and the processed scores.
        hidden_states: the output of the embeddings and of every layer.
    """

    scores: bool = False
    hidden_states: bool = False


Drafter = MicroSpecCandidateGenerator | NoDrafter

NOTHING = Record()
AS_THEY_ARE = Rounds()


@dataclass(frozen=True)
class Emission:
    """What one pass of the target decided about one text.

    Args:
        tokens: the new tokens, at least one.
        logits: `[len(tokens), V]`, the target's raw fp32 logits, where they were asked for.
        scores: `[len(tokens), V]`, processed scores, likewise.
        hidden_states: for the embeddings and each layer `[len(tokens), H]`, likewise; `[L, H]` behind a prompt.
        ended: whether the text ends with the last token, where `Text.ends` was asked.
    """

    tokens: list[int]
    logits: Tensor | None = None
    scores: Tensor | None = None
    hidden_states: tuple[Tensor, ...] = ()
    ended: bool | None = None


@dataclass
class Text:
    """A text that is being written.

    Args:
        drafter: proposes its trees.
        rule: chooses its tokens.
        state: how far it is.
        ends: see `verification.verify`.
    """

    drafter: Drafter
    rule: TokenRule
    state: GenerationState
    ends: Ends | None = None


def prefill(target: Target, text: Text, prompt: Tensor, cache: TreeCache, chunk: int, record: Record) -> Emission:
    """Begin a text: run its prompt through the target in chunks, feed the drafter, and decide the first token.

    Args:
        prompt: int64 `[L]`, L >= 1.
        cache: gets the rows of the prompt. Where it holds the first ones already, the drafter starts behind them.
        chunk: positions in one target pass.
    """
    drafter, rule = text.drafter, text.rule
    begin, length = cache.length, prompt.shape[0]
    if target.position_limit is not None and length > target.position_limit:
        chunk = length  # the angles of all positions are those of the longest: one pass
    cache.reserve(length + drafter.tree.num_nodes)
    drafter.start_at(begin)
    candidates: list[Tensor] = []
    layers: list[tuple[Tensor, ...]] = []
    hidden = prompt.new_empty(0)
    for start in range(begin, length, chunk):
        hidden, every_layer = read(target, prompt[start : start + chunk], cache, record.hidden_states)
        end = cache.length
        layers.append(every_layer)
        candidates += _prompt_candidates(target, hidden, drafter.vocabulary.prompt_candidates)
        following = prompt[start + 1 : end + 1].to(drafter.device)
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
    text.state.begin(prompt, first)
    return Emission(
        tokens=first.tolist(),
        logits=logits.float() if record.scores else None,
        scores=scores if record.scores else None,
        hidden_states=tuple(torch.cat(parts, dim=1)[0] for parts in zip(*layers, strict=True)),
    )


def read(
    target: Target, tokens: Tensor, cache: TreeCache, every_layer: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Let the target read int64 `[T]` behind the text in a cache: hidden rows `[T, H]`, and of every layer if asked."""
    start, end = cache.length, cache.length + tokens.shape[0]
    columns = torch.arange(end, device=tokens.device)
    positions = columns[start:]
    visible = torch.where(columns <= positions[:, None], columns, -1)
    cache.prepare(positions[None], end)
    rows, layers = target.forward(tokens[None], positions[None], visible[None], cache, every_layer)
    cache.length = end
    return rows[0], layers


@dataclass(frozen=True)
class Launched:
    """A round on its way.

    Args:
        texts: in the order of the cache.
        decided: what it leaves on the device.
        news: waits for the device and gives, for each text, the number of new tokens and the tokens.
    """

    texts: Sequence[Text]
    decided: _Decided
    news: Callable[[], list[list[int]]]


def step(
    target: Target,
    texts: Sequence[Text],
    cache: TreeCache,
    record: Record = NOTHING,
    draft: bool = True,
    rounds: Rounds = AS_THEY_ARE,
) -> list[Emission]:
    """One round of each text: draft a tree, check all in one target pass, keep the paths that agree, learn from them.

    Args:
        texts: in the order of the cache.
        draft: False: the trees are their roots, and each text gets one token, as from plain decoding.
        rounds: how the device part is run.
    """
    return collect(launch(target, texts, cache, record, draft, rounds), cache, record)


def launch(
    target: Target,
    texts: Sequence[Text],
    cache: TreeCache,
    record: Record,
    draft: bool,
    rounds: Rounds,
    in_flight: int = 0,
) -> Launched:
    """Begin a round, see `step`.

    Args:
        in_flight: rounds that were begun before and are not collected; only where `rounds.run_ahead`.
    """
    slack = in_flight * max(text.drafter.tree.num_path_slots for text in texts)
    for text in texts:
        text.drafter.reserve(slack)
    cache.reserve(cache.length + slack + max(text.drafter.tree.num_nodes for text in texts))
    key = draft, record, cache.shape, *((text.drafter.size, text.rule.key) for text in texts)
    if not all(text.drafter.can_be_captured(draft) for text in texts):
        rounds = Rounds(rounds.clock)
    decided = rounds.run(
        key, lambda: _decide(target, texts, cache, record, draft, rounds.clock), [text.rule for text in texts]
    )
    return Launched(texts, decided, rounds.send(decided.news))


def collect(launched: Launched, cache: TreeCache, record: Record) -> list[Emission]:
    """Take what a round decided to the host."""
    texts, decided = launched.texts, launched.decided
    emissions = []
    for row, (count, *emitted) in enumerate(launched.news()):
        text, judgement = texts[row], decided.judgements[row]
        text.state.commit(emitted[:count])
        text.drafter.commit(text.state.num_cached, count)
        raw = scores = None
        kept: list[Tensor] = []
        if record != NOTHING:
            path = judgement.verification.path[:count]
            kept = [layer[row].index_select(0, path.to(layer.device)) for layer in decided.layers]
        if record.scores:
            raw = decided.logits[row].index_select(0, path).to(text.state.ids.device, torch.float32)
            scores = raw if judgement.scores is None else judgement.scores[:count].clone()
        emissions.append(Emission(emitted[:count], raw, scores, tuple(kept), judgement.ended))
    cache.length = max(text.state.num_cached for text in texts)
    return emissions


@dataclass(frozen=True)
class _Decided:
    """What a round left on the device, for B texts: `news` int64 `[B, P + 1]`, number of new tokens and tokens."""

    news: Tensor
    judgements: list[Judgement]
    logits: Tensor
    layers: tuple[Tensor, ...]


def _decide(
    target: Target,
    texts: Sequence[Text],
    cache: TreeCache,
    record: Record,
    draft: bool,
    clock: Clock | None = None,
) -> _Decided:
    """The device part of a round; every buffer that the next one starts from is written in its place."""
    with clock or nullcontext():
        trees = [_draft(text, draft, target.position_limit) for text in texts]
    hidden, layers = _target_pass(target, texts, trees, cache, record)
    logits = _logits(target, hidden)
    most = max(max(1, text.drafter.vocabulary.verify_candidates) for text in texts)
    best = ops.topk_candidates(logits.flatten(0, 1), most).view(*logits.shape[:2], -1)
    judgements, news = [], []
    for row, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        drafter, state, nodes = text.drafter, text.state, tree.num_nodes
        own = best[row, :nodes]
        judgement = verify(
            tree, logits[row, :nodes], state.ids, text.rule, drafter.tree.num_path_slots, own[:, 0], text.ends
        )
        verification = judgement.verification
        ops.compact_kv(cache.buffers(row), verification.path, state.length)
        drafter.learn(hidden[row, :nodes], tree, own[:, : drafter.vocabulary.verify_candidates], verification)
        state.advance(verification.emitted, verification.num_accepted)
        judgements.append(judgement)
        news.append(torch.cat([verification.num_emitted, verification.emitted]))
    return _Decided(_stacked(news), judgements, logits, layers)


def _draft(text: Text, draft: bool, limit: int | None) -> DraftTree:
    root = text.state.root.to(text.drafter.device)
    if not draft:
        return text.drafter.hold(root)
    tree = text.drafter.draft(root)
    return tree if limit is None else tree.cut(text.state.length.to(tree.tokens.device), limit)


def _target_pass(
    target: Target, texts: Sequence[Text], trees: Sequence[DraftTree], cache: TreeCache, record: Record = NOTHING
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Hidden rows `[B, N, H]` of the nodes of all trees, each seeing its text and its own ancestors.

    N is the size of the largest tree; rows behind a smaller one are padding, which sees the text and is seen by none.
    Also the rows of every layer, where they are recorded.
    """
    num_nodes = max(tree.num_nodes for tree in trees)
    device = target.device
    parts = [tree.padded(num_nodes) for tree in trees]
    tokens, depths, ancestors = (_stacked([part[i] for part in parts]).to(device) for i in range(3))
    length = _stacked([text.state.length for text in texts])[:, 0]
    positions = length[:, None] + depths
    if target.position_limit is not None:  # nodes that were cut off stand on the last position that there is
        last = target.position_limit - 1
        positions = torch.where(positions[:, :1] > last, positions, positions.clamp(max=last))
    sight = Sight(length, ancestors[..., None], positions - length[:, None], torch.zeros_like(length))
    return target.see(tokens, positions, sight, cache, record.hidden_states)


def _stacked(rows: list[Tensor]) -> Tensor:
    """`torch.stack`, without a copy of a row that is alone."""
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def _logits(target: Target, hidden: Tensor) -> Tensor:
    """Logits `[..., V]` as `generate` compares them: those of a float64 model in float32, where near ones are equal."""
    logits = target.head(hidden)
    return logits.float() if logits.dtype == torch.float64 else logits


def _prompt_candidates(target: Target, hidden: Tensor, k: int) -> list[Tensor]:
    return [ops.topk_candidates(target.head(rows), k) for rows in hidden.split(HEAD_ROWS)] if k else []
