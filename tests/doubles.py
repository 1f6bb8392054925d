"""Drafters that propose what a test wants, and pairs of target and head whose agreement is known.

A random head is almost never accepted, so that most faults of the loop stay hidden behind it. A script sees the
text that the target is going to write and decides what is right and what is wrong about the tree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from microspec_hf import DraftTree, EagleConfig, EagleHead, MicroSpecCandidateGenerator, loop, sessions
from microspec_hf.hf import Target, TreeCache
from microspec_hf.loop import NOTHING, Emission, Record, Text, prefill, step
from microspec_hf.state import GenerationState
from microspec_hf.tree import Verification
from microspec_hf.verification import TokenRule
from tests.tiny import tiny_llama

Nodes = list[tuple[int, int]]
"""The nodes below the root, in level order: node number of the parent, and token."""

Script = Callable[[list[int], int, int], Nodes]
"""From the next tokens of the text (as many as the tree has levels, fewer at its end), the size of the vocabulary and
the number of the round to the nodes of the tree."""


def perfect(upcoming: list[int], vocab_size: int, round_number: int) -> Nodes:
    """A chain of what comes."""
    return list(enumerate(upcoming))


def wrong(upcoming: list[int], vocab_size: int, round_number: int) -> Nodes:
    """A chain that is wrong from its first token."""
    return [(level, (token + 1) % vocab_size) for level, token in enumerate(upcoming)]


def last_branch_right(upcoming: list[int], vocab_size: int, round_number: int) -> Nodes:
    """Three wrong siblings before each right node; the first of them has a child that would be right elsewhere."""
    nodes: Nodes = []
    right, decoy = 0, None
    for token in upcoming:
        if decoy is not None:
            nodes.append((decoy, token))
        decoy = len(nodes) + 1
        nodes += [(right, (token + shift) % vocab_size) for shift in (1, 2, 3, 0)]
        right = len(nodes)
    return nodes


def alternately_right(upcoming: list[int], vocab_size: int, round_number: int) -> Nodes:
    """A chain that is right for 0, 1, 2, ... levels in turn."""
    num_right = round_number % (len(upcoming) + 1)
    return [(level, (token + (level >= num_right)) % vocab_size) for level, token in enumerate(upcoming)]


def with_holes(upcoming: list[int], vocab_size: int, round_number: int) -> Nodes:
    """The right chain between nodes that were never drafted, as a small draft vocabulary leaves them."""
    nodes: Nodes = []
    right = 0
    for token in upcoming:
        nodes += [(right, -1), (right, token), (right, -1)]
        right = len(nodes) - 1
    return nodes


def nothing(upcoming: list[int], vocab_size: int, round_number: int) -> Nodes:
    """The root alone."""
    return []


def proposing(token: int) -> Script:
    """`token` as the first child of every node of the right chain, with a right-looking child of its own."""

    def script(upcoming: list[int], vocab_size: int, round_number: int) -> Nodes:
        nodes: Nodes = []
        right, decoy = 0, None
        for expected in upcoming:
            if decoy is not None:
                nodes.append((decoy, expected))
            decoy = None
            if expected != token:
                nodes.append((right, token))
                decoy = len(nodes)
            nodes.append((right, expected))
            right = len(nodes)
        return nodes

    return script


def random_tree(seed: int, num_nodes: int = 24) -> Script:
    """A tree of random shape; every other node carries what the text has at its level, siblings differ."""

    def script(upcoming: list[int], vocab_size: int, round_number: int) -> Nodes:
        rng = random.Random(1000 * seed + round_number)
        levels = [0]
        children: dict[int, list[int]] = {0: []}
        nodes: Nodes = []
        for _ in range(num_nodes):
            shallow = [n for n, level in enumerate(levels) if level < len(upcoming)]
            if not shallow:
                break
            parent = rng.choice(shallow)
            token = upcoming[levels[parent]] if rng.random() < 0.5 else rng.randrange(vocab_size)
            if token in children[parent]:
                continue
            children[parent].append(token)
            nodes.append((parent, token))
            levels.append(levels[parent] + 1)
            children[len(nodes)] = []
        return nodes

    return script


SCRIPTS: dict[str, Script] = {
    "perfect": perfect,
    "wrong": wrong,
    "last_branch_right": last_branch_right,
    "alternately_right": alternately_right,
    "with_holes": with_holes,
    "nothing": nothing,
    "random_tree": random_tree(seed=0),
}


def draft_tree(root: int, nodes: Sequence[tuple[int, int]]) -> DraftTree:
    """The tree of a script's nodes."""
    tokens = torch.tensor([root, *(token for _, token in nodes)])
    return DraftTree.from_parents(tokens, torch.tensor([-1, *(parent for parent, _ in nodes)]))


class ScriptedDrafter(MicroSpecCandidateGenerator):
    """A candidate generator whose trees come from a script; it finds out which of `texts` is being written."""

    def __init__(self, *args: Any, script: Script, texts: Sequence[Sequence[int]]):
        super().__init__(*args)
        self.script, self.texts = script, texts
        self.heard: list[int] = []  # the text behind its first token, which no drafter is told
        self.trees: list[DraftTree] = []

    def feed(self, hidden: Tensor, next_tokens: Tensor) -> None:
        super().feed(hidden, next_tokens)
        self.heard += next_tokens.tolist()

    def draft(self, root: Tensor) -> DraftTree:
        if not self.trees:
            self.heard += root.tolist()
        nodes = self.script(self._upcoming(), self.target.vocab_size, len(self.trees))
        self.trees.append(draft_tree(int(root), nodes))
        return self.trees[-1]

    def learn(self, hidden: Tensor, tree: DraftTree, candidates: Tensor, verification: Verification) -> None:
        super().learn(hidden, tree, candidates, verification)
        self.heard += verification.emitted[: int(verification.num_emitted)].tolist()

    def _upcoming(self) -> list[int]:
        position = len(self.heard) + 1
        for text in self.texts:
            if list(text[1:position]) == self.heard:
                return list(text[position : position + self.tree.num_levels])
        return []


@dataclass
class Alone:
    """One text that is written alone, step by step."""

    target: Target
    text: Text
    cache: TreeCache

    @property
    def state(self) -> GenerationState:
        return self.text.state

    def step(self, record: Record = NOTHING, draft: bool = True) -> Emission:
        [emission] = step(self.target, [self.text], self.cache, record, draft)
        return emission

    def target_pass(self, tree: DraftTree) -> Tensor:
        """Hidden rows `[N, H]` of the nodes of a tree."""
        hidden, _ = loop._target_pass(self.target, [self.text], [tree], self.cache, NOTHING)
        return hidden[0]


def begin(
    target: Target,
    drafter: MicroSpecCandidateGenerator,
    prompt: Tensor,
    rule: TokenRule,
    chunk: int = 512,
    record: Record = NOTHING,
) -> tuple[Alone, Emission]:
    """Read the prompt `[L]`, as `generate` does."""
    cache, text = target.new_cache(), Text(drafter, rule, GenerationState.empty(target.device))
    emission = prefill(target, text, prompt, cache, chunk, record)
    return Alone(target, text, cache), emission


@contextmanager
def scripted(script: Script, texts: Tensor | Sequence[Sequence[int]] = ()) -> Iterator[list[ScriptedDrafter]]:
    """Within the block, `generate` drafts by the script; yields the drafters as they are made."""
    known = texts.tolist() if isinstance(texts, Tensor) else texts
    made: list[ScriptedDrafter] = []

    def make(*args: Any) -> ScriptedDrafter:
        made.append(ScriptedDrafter(*args, script=script, texts=known))
        return made[-1]

    with mock.patch.object(sessions, "MicroSpecCandidateGenerator", make):
        yield made


def random_head(model: PreTrainedModel, seed: int = 0, dtype: torch.dtype = torch.float32) -> EagleHead:
    """An EAGLE head that fits the target and knows nothing; its weights are large enough for sharp choices."""
    config = model.config
    with torch.random.fork_rng(devices=[]):
        head = EagleHead(
            EagleConfig(
                hidden_size=config.hidden_size,
                intermediate_size=64,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                vocab_size=config.vocab_size,
            )
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.ndim == 2:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    return head.to(dtype).eval()


def nan_head(model: PreTrainedModel) -> EagleHead:
    """A head that answers NaN to everything."""
    head = random_head(model)
    with torch.no_grad():
        head.fc.weight.fill_(torch.nan)
    return head


def controlled_pair(scale: float) -> tuple[PreTrainedModel, EagleHead]:
    """A target and a head that knows its first layer; the later layers' influence is scaled, and acceptance with it.

    With scale 0 the target is its first layer. The head then misses one key only, that of the text's first token,
    since its rows begin one token later.
    """
    model = tiny_llama()
    config = model.config
    decoder = model.get_decoder()
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings /= embeddings.pow(2).mean(dim=1, keepdim=True).sqrt()  # its norm is then the identity
        decoder.layers[0].input_layernorm.weight.fill_(1.0)
        decoder.norm.weight.fill_(1.0)
        for layer in decoder.layers[1:]:
            layer.self_attn.o_proj.weight *= scale
            layer.mlp.down_proj.weight *= scale
        head = EagleHead(
            EagleConfig(
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                vocab_size=config.vocab_size,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters=config.rope_parameters,
            )
        )
        head.fc.weight.zero_()
        head.fc.weight[:, : config.hidden_size] = torch.eye(config.hidden_size)  # the embedding, nothing of the state
        first = {
            name: tensor for name, tensor in decoder.layers[0].state_dict().items() if "input_layernorm" not in name
        }
        head.layers[0].load_state_dict(first)
    return model, head.eval()


def random_prompt(model: PreTrainedModel, length: int = 7, seed: int = 0) -> Tensor:
    """Token ids `[1, length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (1, length), generator=generator)


def plain(model: PreTrainedModel, prompt: Tensor, **arguments: Any) -> Any:
    """What the target writes without us; greedy unless the arguments say otherwise."""
    arguments = {"attention_mask": torch.ones_like(prompt), "do_sample": False} | arguments
    return model.generate(prompt, **arguments)


def speculate(model: PreTrainedModel, prompt: Tensor, **arguments: Any) -> Any:
    """The same call with our strategy, and a random head unless the arguments name another."""
    if "drafter" not in arguments:
        arguments["drafter"] = random_head(model)
    arguments.setdefault("custom_generate", "microspec")
    return plain(model, prompt, **arguments)


def make_drafter(
    model: PreTrainedModel, head: EagleHead, vocabulary: Any, tree: Any
) -> tuple[Target, MicroSpecCandidateGenerator]:
    """Target and candidate generator as `generate` makes them, for tests below it."""
    from microspec_hf.vocabulary import make_vocabulary

    target = Target(model)
    return target, MicroSpecCandidateGenerator(
        target, head, make_vocabulary(vocabulary, target.head, [], tree.top_k, tree.num_nodes), tree
    )
