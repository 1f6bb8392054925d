"""One round of the loop: the tree pass, the rows it leaves behind, and what the host is told."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList, PreTrainedModel, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

import microspec_hf
from microspec_hf import EagleHead, TreeConfig, VocabularyConfig, loop
from microspec_hf.hf import Sight, Target
from microspec_hf.loop import Record
from microspec_hf.verification import TokenRule
from tests.doubles import (
    SCRIPTS,
    Alone,
    Script,
    ScriptedDrafter,
    begin,
    controlled_pair,
    draft_tree,
    last_branch_right,
    make_drafter,
    perfect,
    plain,
    random_head,
    random_prompt,
    random_tree,
)
from tests.tiny import TINY_MODELS, tiny_llama

GREEDY = TokenRule(LogitsProcessorList(), do_sample=False)
FULL = VocabularyConfig("full")


def start(
    model: PreTrainedModel, prompt: Tensor, script: Script, text: list[int], chunk: int = 512, rule: TokenRule = GREEDY
) -> tuple[ScriptedDrafter, Alone]:
    target, real = make_drafter(model, random_head(model, dtype=model.dtype), VocabularyConfig(), TreeConfig())
    drafter = ScriptedDrafter(target, real.head, real.vocabulary, real.tree, script=script, texts=[text])
    alone, _ = begin(target, drafter, prompt[0], rule, chunk=chunk)
    return drafter, alone


def models(dtype: torch.dtype) -> list[Any]:
    cells = [(name, attention) for name in TINY_MODELS for attention in ("eager", "sdpa")]
    cells.remove(("gemma2", "sdpa"))  # does not cap the scores
    return [pytest.param(name, attention, dtype, id=f"{name}-{attention}") for name, attention in cells]


@pytest.mark.parametrize(("name", "attention", "dtype"), models(torch.float64))
@torch.no_grad()
def test_every_node_sees_the_text_and_its_ancestors_and_nothing_else(
    name: str, attention: str, dtype: torch.dtype
) -> None:
    """The hidden state of a node is that of a plain forward over the text and the node's path."""
    model = TINY_MODELS[name](attn_implementation=attention, dtype=dtype)
    prompt = random_prompt(model, 11)
    _, alone = start(model, prompt, perfect, [])
    tree = draft_tree(int(alone.state.root), random_tree(seed=4)(list(range(6)), 90, 0))
    assert int(tree.depths.max()) >= 4
    hidden = alone.target_pass(tree)

    reference = TINY_MODELS[name](attn_implementation="eager", dtype=dtype)
    for node, on_path in enumerate(tree.ancestor_mask()):
        ids = torch.cat([alone.state.ids[:-1], tree.tokens[on_path]])
        expected = reference(ids[None], output_hidden_states=True).hidden_states[-1][0, -1]
        torch.testing.assert_close(hidden[node], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "attention", "dtype"), models(torch.float32))
@torch.no_grad()
def test_another_sibling_moves_no_other_node(name: str, attention: str, dtype: torch.dtype) -> None:
    model = TINY_MODELS[name](attn_implementation=attention, dtype=dtype)
    prompt = random_prompt(model, 11)
    passes = []
    for sibling in (3, 77):
        _, alone = start(model, prompt, perfect, [])
        tree = draft_tree(int(alone.state.root), [(0, 5), (0, sibling), (1, 9), (1, 8), (2, 7), (3, 6)])
        passes.append(alone.target_pass(tree))
    same = (passes[0] == passes[1]).all(dim=1).tolist()
    assert same == [True, True, False, True, True, False, True]  # the sibling, and its child


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@torch.no_grad()
def test_cache_is_that_of_the_text(name: str, script: str) -> None:
    """After each round the rows of decided tokens are those that a prefill of the text would have written."""
    model = TINY_MODELS[name](attn_implementation="eager", dtype=torch.float64)
    prompt = random_prompt(model, 5)
    text = plain(model, prompt, max_new_tokens=30)[0].tolist()
    _, alone = start(model, prompt, SCRIPTS[script], text)
    for _ in range(3):
        length = len(alone.state.ids)
        emission = alone.step()
        assert alone.state.ids.tolist() == text[: length + len(emission.tokens)]
        assert alone.cache.length == int(alone.state.length) == len(alone.state.ids) - 1

        _, afresh = start(model, alone.state.ids[None, :-1], perfect, [])
        for ours, theirs in zip(alone.cache.buffers(), afresh.cache.buffers(), strict=True):
            rows = alone.cache.length
            torch.testing.assert_close(ours[:, :, :rows], theirs[:, :, :rows], rtol=0, atol=1e-4)


@torch.no_grad()
def test_lengths() -> None:
    """Prompt of 5: its rows are cached and the first token is not; a drafts accepted, 5 + 1 + a rows are."""
    model = tiny_llama()
    prompt = random_prompt(model, 5)
    text = plain(model, prompt, max_new_tokens=12)[0].tolist()
    two_right = lambda upcoming, vocab_size, round_number: list(enumerate(upcoming[:2]))  # noqa: E731
    drafter, alone = start(model, prompt, two_right, text)
    assert alone.cache.length == 5
    assert alone.state.ids.tolist() == text[:6]
    assert alone.state.prompt_length == 5
    assert int(drafter.num_pending) == 1
    assert drafter.pending_tokens[0] == text[5]  # the pair of the last prompt position: (h4, x5)

    emission = alone.step()
    assert emission.tokens == text[6:9]
    assert alone.cache.length == 5 + 1 + 2
    assert alone.state.root.tolist() == [text[8]]
    assert int(drafter.num_pending) == 3
    assert drafter.pending_tokens[:3].tolist() == text[6:9]  # (h_root, a), (h_a, d), (h_d, z)

    hidden = model(torch.tensor([text[:9]]), output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(drafter.pending_hidden[:3], hidden[5:8], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 4, 9, 10, 64])
@torch.no_grad()
def test_prefill_does_not_depend_on_its_chunks(chunk: int) -> None:
    model = tiny_llama(dtype=torch.float64)
    head = random_head(model, dtype=torch.float64)
    prompt = random_prompt(model, 10)
    results = []
    for size in (512, chunk):
        target, drafter = make_drafter(model, head, VocabularyConfig(max_rows=30), TreeConfig())
        alone, emission = begin(target, drafter, prompt[0], GREEDY, size, Record(scores=True))
        assert int(drafter.num_rows) == 9
        results.append((alone.state, emission, drafter.draft(alone.state.root)))
    (one, first, tree), (other, second, same_tree) = results
    assert first.tokens == second.tokens
    torch.testing.assert_close(first.logits, second.logits)
    torch.testing.assert_close(first.logits[0], model(prompt).logits[0, -1].float())
    assert torch.equal(tree.tokens, same_tree.tokens)
    assert torch.equal(one.ids, other.ids)


@torch.no_grad()
def test_prompt_candidates_are_the_targets_best_ids_of_every_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "HEAD_ROWS", 3)
    model = tiny_llama()
    prompt = random_prompt(model, 10)
    target, drafter = make_drafter(model, random_head(model), VocabularyConfig(prompt_candidates=4), TreeConfig())
    seen = []
    monkeypatch.setattr(drafter.vocabulary, "begin", lambda *arguments: seen.append(arguments))
    begin(target, drafter, prompt[0], GREEDY, chunk=4)
    [(tokens, candidates)] = seen
    assert tokens.tolist() == prompt[0].tolist()
    assert candidates.tolist() == model(prompt).logits[0].topk(4).indices.tolist()


@pytest.mark.parametrize(
    "rule",
    [
        GREEDY,
        TokenRule(LogitsProcessorList([TemperatureLogitsWarper(0.5)]), do_sample=False),
        TokenRule(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.0001)]), do_sample=False),
    ],
    ids=["plain", "history-free", "walk"],
)
@torch.no_grad()
def test_recorded_logits_are_those_of_the_path(rule: TokenRule) -> None:
    model = tiny_llama(dtype=torch.float64)
    prompt = random_prompt(model, 5)
    text = plain(model, prompt, max_new_tokens=12)[0].tolist()
    _, alone = start(model, prompt, last_branch_right, text, rule=rule)
    emission = alone.step(Record(scores=True))
    assert len(emission.tokens) == 7
    expected = model(torch.tensor([text[:12]])).logits[0, 5:].float()
    torch.testing.assert_close(emission.logits, expected, rtol=0, atol=1e-5)
    prefixes = [torch.tensor(text[: 6 + i]) for i in range(7)]
    scores = [rule.scores(prefix, row[None]) for prefix, row in zip(prefixes, expected, strict=True)]
    torch.testing.assert_close(emission.scores, torch.cat(scores), rtol=0, atol=1e-5)


def test_source_of_a_round_reads_the_device_once() -> None:
    """`Rounds.send` brings the news; nothing in the loop or the drafter itself waits for the device."""
    waits = re.compile(
        r"\.tolist\(|\.item\(|\.cpu\(|\.numpy\(|nonzero|\.unique\(|masked_select|\bint\(|\bbool\(|\bfloat\("
    )
    generator = microspec_hf.MicroSpecCandidateGenerator
    for part in (
        loop.step,
        loop.launch,
        loop.collect,
        loop._decide,
        loop._target_pass,
        Target.see,
        Sight.positions,
        generator.draft,
        generator.hold,
        generator.learn,
        generator.commit,
        generator.feed,
        generator._see,
        generator._run,
    ):
        assert waits.findall(inspect.getsource(part)) == []


class Reads(TorchDispatchMode):
    """Notes where a tensor's value, or a shape that depends on values, reaches the host."""

    WAITING = (
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::masked_select",
        "aten::_unique2",
        "aten::is_nonzero",
    )

    def __init__(self) -> None:
        super().__init__()
        self.where: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        masks = [i for i in args[1] if i is not None and i.dtype == torch.bool] if name == "aten::index" else []
        if name in self.WAITING or masks:
            self.where.append(self._module())
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _module() -> str:
        root = Path(microspec_hf.__file__).parent
        frame = sys._getframe(1)
        while frame.f_back is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(root):
                return str(file.relative_to(root))
            frame = frame.f_back
        return "?"


@pytest.mark.parametrize(
    "vocabulary", [FULL, VocabularyConfig("static", token_ids=tuple(range(50))), VocabularyConfig()]
)
@pytest.mark.parametrize("rule", [GREEDY, TokenRule(LogitsProcessorList([TemperatureLogitsWarper(0.5)]), True)])
@torch.no_grad()
def test_a_round_reads_nothing_back(rule: TokenRule, vocabulary: VocabularyConfig) -> None:
    """Nothing but the one `.tolist()`, which the dispatcher does not see; the ops look at CPU tensors for speed."""
    model, head = controlled_pair(scale=0.1)
    target, drafter = make_drafter(model, head, vocabulary, TreeConfig())
    alone, _ = begin(target, drafter, random_prompt(model)[0], rule, chunk=512)
    with Reads() as reads:
        for _ in range(2):
            alone.step()
    assert [where for where in reads.where if not where.startswith("ops/")] == []


@torch.no_grad()
def test_reads_are_noticed() -> None:
    with Reads() as reads:
        int(torch.ones(1).sum())
        torch.ones(3)[torch.ones(3).bool()]
    assert len(reads.where) == 2


@torch.no_grad()
def test_shapes_of_a_round_do_not_depend_on_what_is_accepted() -> None:
    model = tiny_llama()
    prompt = random_prompt(model, 5)
    text = plain(model, prompt, max_new_tokens=30)[0].tolist()
    shapes = []
    for script in (lambda u, v, r: perfect(u, v, r), lambda u, v, r: [(n, (t + 1) % v) for n, t in enumerate(u)]):
        drafter, alone = start(model, prompt, script, text)
        alone.step()
        shapes.append((drafter.pending_hidden.shape, drafter.pending_tokens.shape, drafter.num_pending.shape))
    assert shapes[0] == shapes[1]


def test_head_of_another_dtype_is_not_needed(tmp_path: Path) -> None:
    """A float32 head drafts for a float64 target: it is converted once, the caller's head stays as it is."""
    model, prompt = tiny_llama(dtype=torch.float64), random_prompt(tiny_llama())
    head: EagleHead = random_head(model)
    got = plain(model, prompt, max_new_tokens=5, custom_generate="microspec", drafter=head)
    assert got.tolist() == plain(model, prompt, max_new_tokens=5).tolist()
    assert head.dtype == torch.float32
