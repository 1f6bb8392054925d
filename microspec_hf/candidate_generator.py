"""Who drafts: an EAGLE head paired with a target and a draft vocabulary (EAGLE-2 section 4.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import CandidateGenerator

from microspec_hf import ops
from microspec_hf.config import TreeConfig
from microspec_hf.eagle import EagleHead
from microspec_hf.hf import WORD, Sight, Target, TreeCache, TreePass, additive_mask, bit_words, chain_words
from microspec_hf.tree import DraftTree, Verification
from microspec_hf.vocabulary import DraftVocabulary


class MicroSpecCandidateGenerator(CandidateGenerator):
    """Drafts a token tree from the target's hidden states; one object for one text.

    `feed` takes the prompt's hidden rows, `draft` gives a `DraftTree` to our own loop, `learn` takes what the target
    made of it. `get_candidates` and `update_candidate_strategy` give the tree's best chain to transformers' assisted
    decoding, so that this class is a candidate generator like any other.

    The head's cache keeps rows of true target features only. Row j holds the pair (hidden state at j, token at j + 1)
    at RoPE position j, so it is one row shorter than the text. Where the target was given a cache that holds the first
    tokens already, no hidden states of those exist, and their rows stay invisible.

    Args:
        target: the model that decides.
        head: the EAGLE head, on the device and in the dtype of the target's LM head.
        vocabulary: over which rows of the LM head the head's scores are computed.
        tree: shape of the draft tree.
        tree_pass: of a `DraftStep`, for rounds that are captured.
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict[str, Any] = {"output_hidden_states": True}  # noqa: RUF012 (transformers' own field)

    def __init__(
        self,
        target: Target,
        head: EagleHead,
        vocabulary: DraftVocabulary,
        tree: TreeConfig,
        tree_pass: TreePass | None = None,
    ):
        self.target, self.head, self.vocabulary, self.tree = target, head, vocabulary, tree
        self._step = target.for_rounds(DraftStep(target.embeddings, head))
        self.tree_pass = tree_pass
        self.device = target.head.device
        self.cache = TreeCache(num_layers=1, is_fixed=tree_pass is not None)
        self.num_rows = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.pending_hidden = torch.zeros(
            tree.num_path_slots, target.hidden_size, dtype=target.dtype, device=self.device
        )
        self.pending_tokens = torch.zeros(tree.num_path_slots, dtype=torch.int64, device=self.device)
        self.num_pending = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._first_row = torch.zeros_like(self.num_rows)
        # One more level than there are passes: the last beam is not expanded.
        self._own_bits = bit_words((tree.depth + 1) * tree.top_k, self.device)[:, : _num_words(tree)]
        self._chain = chain_words(tree.num_path_slots, self.device)
        self._columns = torch.arange((tree.depth + 1) * tree.top_k, device=self.device)
        self._levels = self._columns // tree.top_k
        self._root_row = torch.zeros(tree.top_k, dtype=torch.int64, device=self.device)
        self._nowhere = torch.zeros(1, _num_words(tree) * WORD, dtype=torch.int64, device=self.device)
        self._path_columns = torch.arange(tree.num_path_slots, device=self.device)
        self._candidates = (
            torch.zeros(tree.num_candidates, device=self.device),
            torch.zeros(tree.num_candidates, dtype=torch.int64, device=self.device),
            torch.full((tree.num_candidates,), -1, dtype=torch.int64, device=self.device),
        )
        self._num_expected = 1  # as num_pending, on the host
        self._held: list[tuple[Tensor, Tensor]] = []
        self._offered: Tensor | None = None

    def start_at(self, position: int) -> None:
        """The first features to come are those of this position; rows before it are never seen."""
        self._held.clear()
        self.cache.length = position
        self._first_row.fill_(position)
        self.num_rows.fill_(position)

    def feed(self, hidden: Tensor, next_tokens: Tensor) -> None:
        """Run the head over true features whose next token is known, and keep its KV.

        Args:
            hidden: `[T, H]`, the target's hidden rows, in order after those fed before.
            next_tokens: int64 `[T]`, the token that follows each row.
        """
        count = hidden.shape[0]
        if count == 0:
            return
        positions = self.num_rows + torch.arange(count, device=self.device)
        columns = torch.arange(self.cache.length + count, device=self.device)
        visible = (columns <= positions[:, None]) & (columns >= self._first_row)
        self.cache.prepare(positions[None], columns.shape[0])
        each = columns[:count]
        self._run(next_tokens, hidden, each, positions, torch.where(visible, columns, -1))
        self.cache.length += count
        self.num_rows += count

    def expect(self, hidden: Tensor, next_tokens: Tensor, count: Tensor) -> None:
        """The rows that the next draft starts from: `count` `[1]` of the P rows `[P, H]`, `[P]` are valid."""
        self.pending_hidden.copy_(hidden)
        self.pending_tokens.copy_(next_tokens)
        self.num_pending.copy_(count)

    @property
    def size(self) -> tuple[int, ...]:
        """What the shapes of a draft depend on."""
        return self.cache.shape

    def can_be_captured(self, drafts: bool) -> bool:
        """Whether a round that drafts, or does not, depends on nothing that the host keeps: what `hold` does."""
        return drafts and not self._held

    def restart(self, num_rows: int) -> None:
        """Begin another text, with room for so many rows."""
        self.cache.restart(num_rows)

    def reserve(self, slack: int) -> None:
        """Make room for the rows of a draft, and for `slack` rows that the host does not know of yet."""
        self.cache.reserve(self._view() + slack)

    def _view(self) -> int:
        return self.cache.length + self.tree.num_path_slots + self.tree.depth * self.tree.top_k

    def draft(self, root: Tensor) -> DraftTree:
        """Draft a tree below `root`, int64 `[1]`, the last decided token, which the target has not seen yet."""
        self.vocabulary.prepare()
        if self._held:
            held, self._held = self._held, []
            self.feed(torch.cat([hidden for hidden, _ in held]), torch.cat([tokens for _, tokens in held]))
        k, depth = self.tree.top_k, self.tree.depth

        # Rows behind num_pending are padding: later rows are invisible to earlier ones, and the tree overwrites them.
        path = self._path_columns
        rows = self.num_rows + path
        output = self._see(self.pending_tokens, self.pending_hidden, path, rows, rows, self._chain)
        self.num_rows += self.num_pending
        last = output.index_select(0, self.num_pending - 1)
        rows, positions = self.num_rows + self._columns, self.num_rows + self._levels
        scores, tokens = self.vocabulary.topk(last, k)
        candidates = self._candidates
        candidates[0][:k], candidates[1][:k] = scores[0], tokens[0]  # the first ones are the root's children
        beam = ops.Beam(scores[0], tokens[0], self._columns[:k], self._root_row, self._own_bits[:k])
        output = last
        for level in range(depth):
            own, following = slice(level * k, (level + 1) * k), slice((level + 1) * k, (level + 2) * k)
            output = self._see(beam.tokens, output, beam.parent, rows[own], positions[own], beam.ancestors)
            scores, tokens = self.vocabulary.topk(output, k)
            beam = ops.grow_beam(candidates, k + level * k * k, scores, tokens, beam, self._own_bits[following])
        nodes = ops.build_tree(*candidates, root, self.tree.num_nodes)
        return DraftTree(*nodes)

    def hold(self, root: Tensor) -> DraftTree:
        """A tree of `root` alone, int64 `[1]`. What `draft` would have started from is kept for its next call."""
        count = self._num_expected
        self._held.append((self.pending_hidden[:count].clone(), self.pending_tokens[:count].clone()))
        zero = torch.zeros_like(root)
        return DraftTree(root, parents=zero - 1, depths=zero, ancestors=zero + 1)

    def learn(self, hidden: Tensor, tree: DraftTree, candidates: Tensor, verification: Verification) -> None:
        """Take in a verified round: the next draft starts from the true features of the accepted path.

        Args:
            hidden: `[N, H]`, the target's hidden rows at the nodes.
            tree: what was drafted.
            candidates: int64 `[N, K_ver]`, the target's top ids at the nodes.
            verification: the accepted path.
        """
        self.vocabulary.observe(tree, candidates, verification)
        self.expect(hidden.index_select(0, verification.path), verification.emitted, verification.num_emitted)

    def commit(self, num_rows: int, num_expected: int) -> None:
        """Tell the host side how many rows of true features there are, and how many of them `draft` starts from."""
        self.cache.length, self._num_expected = num_rows, num_expected

    def _see(
        self, tokens: Tensor, hidden: Tensor, parents: Tensor, rows: Tensor, positions: Tensor, ancestors: Tensor
    ) -> Tensor:
        """The head's output `[T, H]` for nodes behind the true features.

        Args:
            tokens: int64 `[T]`.
            hidden: `[R, H]`, of which row `parents[t]` stands before node t, int64 `[T]`.
            rows, positions: int64 `[T]`, where each is kept, and where it stands.
            ancestors: int64 `[T, W]`, see `Sight`.
        """
        view = self._view()
        nowhere = self._nowhere[:, : ancestors.shape[1] * WORD]  # no window asks for depths
        sight = Sight(self.num_rows, ancestors[None], nowhere, self._first_row)
        self.cache.prepare(rows[None], view)
        if self.tree_pass is None:
            return self._run(tokens, hidden, parents, positions, sight.positions(view)[0])
        run = self.tree_pass.over(self.cache, sight)
        return run(tokens, hidden, parents, positions, self.tree_pass.mask)  # type: ignore[no-any-return]

    def _run(self, tokens: Tensor, hidden: Tensor, parents: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        mask = additive_mask(visible, positions, None, hidden.dtype)
        tokens = tokens.to(self.target.device)
        return self._step(tokens, hidden, parents, positions, mask, self.cache)  # type: ignore[no-any-return]

    # transformers' assisted decoding ---------------------------------------------------------------------------

    def get_candidates(  # type: ignore[override]
        self, input_ids: Tensor, model_outputs: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """The best chain of a fresh tree behind `input_ids` `[1, L]`: `[1, L + c]`, and no logits.

        Without logits the host compares tokens with its own choice, which is exact (see `verification`). The first
        call has no hidden states to draft from and proposes nothing.
        """
        if model_outputs is None:
            return input_ids, None
        tokens = input_ids[0].to(self.device)
        hidden = model_outputs.hidden_states[-1][0].to(self.device)
        rows = tokens.shape[0] - 1 - int(self.num_rows)
        if self._offered is None:
            self.vocabulary.begin(tokens, self._prompt_candidates(hidden[:rows]))
            self.feed(hidden[: rows - 1], tokens[1:rows])
            hidden, rows = hidden[rows - 1 : rows], 1
        else:
            self._observe_chain(tokens[-rows:], model_outputs.logits[0].to(self.device))
        self.commit(int(self.num_rows), rows)
        padding = (0, self.tree.num_path_slots - rows)
        self.expect(
            nn.functional.pad(hidden[:rows], (0, 0, *padding)),
            nn.functional.pad(tokens[-rows:], padding),
            torch.tensor([rows], device=self.device),
        )
        chain = _best_chain(self.draft(tokens[-1:]))
        self._offered = torch.cat([tokens[-1:], chain])
        return torch.cat([input_ids, chain[None].to(input_ids.device)], dim=1), None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Nothing to adapt: the next call of `get_candidates` brings the hidden states of what was accepted."""

    def _prompt_candidates(self, hidden: Tensor) -> Tensor | None:
        k = self.vocabulary.prompt_candidates
        return ops.topk_candidates(self.target.head(hidden), k) if k else None

    def _observe_chain(self, emitted: Tensor, logits: Tensor) -> None:
        """Show the vocabulary the chain that the host has just verified, as a tree with one branch."""
        assert self._offered is not None
        nodes = torch.arange(self._offered.shape[0], device=self.device)
        count = emitted.shape[0]
        verification = Verification(
            path=nodes[:count], emitted=emitted, num_accepted=torch.tensor([count - 1], device=self.device)
        )
        k = self.vocabulary.verify_candidates
        candidates = ops.topk_candidates(logits[-nodes.shape[0] :], k) if k else nodes.new_empty(nodes.shape[0], 0)
        self.vocabulary.observe(DraftTree.from_parents(self._offered, nodes - 1), candidates, verification)


class DraftStep(nn.Module):
    """One pass of the head: rows of tokens and of the hidden states before them give the next hidden states."""

    def __init__(self, embeddings: nn.Module, head: EagleHead):
        super().__init__()
        self.embeddings, self.head = embeddings, head

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        parents: Tensor,
        positions: Tensor,
        mask: Tensor,
        cache: TreeCache | None = None,
    ) -> Tensor:
        """`[T, H]` for T tokens, each behind one of the hidden rows.

        Args:
            tokens, parents, positions: int64 `[T]`, the tokens, the hidden row before each, and its position.
            hidden: `[R, H]`.
            mask, cache: as for `EagleHead`.
        """
        embeddings = self.embeddings(tokens.clamp(min=0)).to(hidden)
        rows = hidden.index_select(0, parents)
        return self.head(embeddings[None], rows[None], positions[None], mask, cache)[0]  # type: ignore[no-any-return]


def _num_words(tree: TreeConfig) -> int:
    """Words that name the rows of a draft, see `hf.Sight`."""
    return max(1, -(-tree.depth * tree.top_k // WORD))


def _best_chain(tree: DraftTree) -> Tensor:
    """Tokens of the path that takes the best child at every node (siblings are in the order of their scores)."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    chain, node = [], 0
    while (child := next((n for n, p in enumerate(parents) if p == node and tokens[n] >= 0), None)) is not None:
        chain.append(tokens[child])
        node = child
    return torch.tensor(chain, dtype=torch.int64, device=tree.tokens.device)
