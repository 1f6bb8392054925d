"""What the target says about a draft tree: its token at every node, and the path that agrees with it.

One rule serves greedy decoding and sampling: the target decides one token at each node, and the walk goes on while a
child carries that token. Children are chosen deterministically, so drawing from the target's own distribution and
stopping where no child matches is exact for any tree and any draft vocabulary; the drafter's probabilities are never
used (EAGLE-2 section 4.2 in its simplest form; no rejection sampling).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from microspec_hf import ops
from microspec_hf.tree import DraftTree, Verification

HISTORY_FREE = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
"""Processors that look at the scores of a row and at nothing else; exact types, since a subclass may look further."""


@dataclass(frozen=True)
class TokenRule:
    """How a token is chosen from the target's logits: `generate`'s processors, then argmax or one draw.

    Args:
        processors: what `generate` assembled from its flags and the caller's list.
        do_sample: draw from the softmax instead of taking the highest score.
        padding: int64 `[P]`, what a batch put before a shorter prompt. The target does not see it, but `generate`
            shows it to the processors, some of which count ids.
    """

    processors: LogitsProcessorList
    do_sample: bool
    padding: Tensor | None = None

    @property
    def is_plain_greedy(self) -> bool:
        return not self.do_sample and not self.processors

    @cached_property
    def key(self) -> Hashable:
        """Equal for rules that choose alike; one of its own where that cannot be told. Made once: it may wait."""
        return self.do_sample, tuple(_fingerprint(processor) for processor in self.processors)

    @property
    def is_history_free(self) -> bool:
        """True when the processors may see all nodes of a tree at once, since they ignore the preceding ids."""
        return all(type(processor) in HISTORY_FREE for processor in self.processors)

    def scores(self, prefix: Tensor, logits: Tensor) -> Tensor:
        """Processed fp32 scores `[T, V]` of T rows of logits that follow the ids `prefix` `[L]`."""
        ids = prefix if self.padding is None else torch.cat([self.padding, prefix])
        rows: Any = ids.expand(len(logits), -1)
        return self.processors(rows, logits.to(torch.float32, copy=True))

    def choose(self, scores: Tensor) -> Tensor:
        """One token for each row of scores `[T, V]`: int64 `[T]`. Greedy choice leaves the random state alone."""
        if self.do_sample:
            return torch.multinomial(scores.softmax(dim=-1), num_samples=1)[:, 0]
        return scores.argmax(dim=-1)


def _fingerprint(processor: Any) -> Hashable:
    options = {name: v.tolist() if isinstance(v, Tensor) else v for name, v in vars(processor).items()}
    return type(processor), repr(sorted(options.items())) if type(processor) in HISTORY_FREE else id(processor)


@dataclass(frozen=True)
class Judgement:
    """What a round decided.

    Args:
        verification: the accepted path.
        scores: `[P, V]`, the processed scores at its nodes; None: the logits are the scores.
        ended: whether the text ends with the last token of the path; None: nobody was asked.
    """

    verification: Verification
    scores: Tensor | None = None
    ended: bool | None = None


Ends = Callable[[Tensor, int, Tensor], bool]
"""Whether a text ends: from its ids `[L]`, the last of them, and the scores `[1, V]` that it was chosen by."""


def verify(
    tree: DraftTree,
    logits: Tensor,
    prefix: Tensor,
    rule: TokenRule,
    num_slots: int,
    best: Tensor | None = None,
    ends: Ends | None = None,
) -> Judgement:
    """Decide the target's tokens on a tree and accept the path that agrees.

    Args:
        tree: N nodes.
        logits: the target's logits at the nodes, `[N, V]`.
        prefix: int64 `[L]`, all decided ids, the root last.
        rule: how tokens are chosen.
        num_slots: P, the slots of the path.
        best: int64 `[N]`, the argmax of each row of logits where the caller has it already.
        ends: asked after each token where processors look at the text, so that none sees a token behind the end.
    """
    if rule.is_plain_greedy:
        return Judgement(accept(tree, logits.argmax(dim=-1) if best is None else best, num_slots), None)
    if rule.is_history_free:
        scores = rule.scores(prefix, logits)
        verification = accept(tree, rule.choose(scores), num_slots)
        return Judgement(verification, scores.index_select(0, verification.path))
    return _walk(tree, logits, prefix, rule, num_slots, ends)


def accept(tree: DraftTree, chosen: Tensor, num_slots: int) -> Verification:
    """The deepest path whose every token is the target's choice at its parent, without a host read.

    Args:
        tree: N nodes; siblings carry distinct tokens, so that at most one child matches.
        chosen: int64 `[N]`, the target's token at each node.
        num_slots: P, at least the depth of the tree plus one.
    """
    return Verification(*ops.accept_path(tree.tokens, tree.parents, tree.depths, tree.ancestors, chosen, num_slots))


def _walk(
    tree: DraftTree, logits: Tensor, prefix: Tensor, rule: TokenRule, num_slots: int, ends: Ends | None
) -> Judgement:
    """Node by node from the root, so that each processor sees true prefixes only, in order, each position once."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    path, emitted, rows = [0], [], []
    ended = None
    while True:
        row = rule.scores(prefix, logits[path[-1] : path[-1] + 1])
        token = rule.choose(row)
        rows.append(row)
        emitted.append(int(token))
        prefix = torch.cat([prefix, token])
        ended = None if ends is None else ends(prefix, emitted[-1], row)
        children = [n for n, parent in enumerate(parents) if parent == path[-1] and tokens[n] == emitted[-1]]
        if ended or not children:
            break
        path.append(children[0])
    padding = num_slots - len(path)
    device = tree.tokens.device
    verification = Verification(
        path=torch.tensor(path + path[-1:] * padding, device=device),
        emitted=torch.tensor(emitted + [-1] * padding, device=device),
        num_accepted=torch.tensor([len(path) - 1], device=device),
    )
    return Judgement(verification, torch.cat(rows + rows[-1:] * padding), ended)
