"""Sampling follows the target's exact law, whatever is drafted: enumerated joint laws and a chi-square test.

All seeds are fixed, so the tests are deterministic; `test_a_wrong_law_is_noticed` shows that the number of draws is
enough to tell a wrong law from the right one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    set_seed,
)

from microspec_hf import DraftTree
from microspec_hf.verification import TokenRule, verify
from tests.doubles import (
    Nodes,
    controlled_pair,
    draft_tree,
    nan_head,
    plain,
    random_head,
    random_prompt,
    scripted,
    speculate,
)

Law = dict[tuple[int, ...], float]


def p_value(draws: Counter[tuple[int, ...]], law: Law) -> float:
    """Chi-square of draws against a law; outcomes that are expected less than five times are taken together."""
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    num_draws = sum(draws.values())
    assert {*draws} <= {outcome for outcome, p in law.items() if p > 0}, "an outcome that the target never gives"
    observed, expected, rare = [], [], [0.0, 0.0]
    for outcome, p in law.items():
        if p * num_draws >= 5:
            observed.append(draws[outcome])
            expected.append(p * num_draws)
        else:
            rare[0] += draws[outcome]
            rare[1] += p * num_draws
    if rare[1] >= 1:
        observed.append(int(rare[0]))
        expected.append(rare[1])
    scale = sum(observed) / sum(expected)
    assert scale == pytest.approx(1.0, abs=0.02)
    return float(stats.chisquare(observed, [e * scale for e in expected]).pvalue) if len(observed) > 1 else 1.0


# One round ----------------------------------------------------------------------------------------------------------

VOCAB_SIZE = 5
NUM_DRAWS = 2500

TREES: dict[str, Nodes] = {
    "root alone": [],
    "one child": [(0, 2)],
    "two children": [(0, 1), (0, 3)],
    "all children": [(0, token) for token in range(VOCAB_SIZE)],
    "holes": [(0, -1), (0, 4), (2, -1), (2, 0)],
    "two levels": [(0, 1), (0, 3), (1, 0), (1, 1), (2, 4)],
    "all of two levels": [(0, t) for t in range(5)] + [(parent, t) for parent in range(1, 6) for t in range(5)],
    "three levels": [(0, 1), (0, 2), (1, 1), (2, 3), (3, 1), (3, 0), (4, 2)],
}

PROCESSORS: dict[str, list[Any]] = {
    "temperature 0.5": [TemperatureLogitsWarper(0.5)],
    "temperature 1": [],
    "temperature 2": [TemperatureLogitsWarper(2.0)],
    "top_k 2": [TopKLogitsWarper(2)],
    "top_p 0.9": [TopPLogitsWarper(0.9)],
    "min_p 0.2": [MinPLogitsWarper(0.2)],
    "typical_p 0.7": [TypicalLogitsWarper(0.7)],
    "temperature and top_p": [TemperatureLogitsWarper(1.5), TopPLogitsWarper(0.8)],
    "repetition_penalty": [RepetitionPenaltyLogitsProcessor(2.0), TemperatureLogitsWarper(1.5)],
    "no_repeat_ngram": [NoRepeatNGramLogitsProcessor(2)],
}

PREFIX = torch.tensor([3, 1, 3, 0])


def node_logits(num_nodes: int, seed: int = 0) -> Tensor:
    return 1.5 * torch.randn(num_nodes, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def law_of_a_round(tree: DraftTree, logits: Tensor, rule: TokenRule) -> Law:
    """Probability of everything that a round can emit: it ends at the first token without a node."""
    law: Law = {}

    def visit(node: int, emitted: tuple[int, ...], probability: float) -> None:
        prefix = torch.cat([PREFIX, torch.tensor(emitted, dtype=torch.int64)])
        probabilities = rule.processors(prefix[None], logits[node : node + 1].clone()).softmax(-1)[0].tolist()
        for token, p in enumerate(probabilities):
            children = [n for n in range(tree.num_nodes) if tree.parents[n] == node and tree.tokens[n] == token]
            if children:
                visit(children[0], (*emitted, token), probability * p)
            else:
                law[(*emitted, token)] = probability * p

    visit(0, (), 1.0)
    return law


def draws_of_a_round(tree: DraftTree, logits: Tensor, rule: TokenRule, seed: int) -> Counter[tuple[int, ...]]:
    torch.manual_seed(seed)
    num_slots = int(tree.depths.max()) + 1
    draws: Counter[tuple[int, ...]] = Counter()
    for _ in range(NUM_DRAWS):
        verification = verify(tree, logits, PREFIX, rule, num_slots).verification
        draws[tuple(verification.emitted[: int(verification.num_emitted)].tolist())] += 1
    return draws


@pytest.mark.parametrize(
    ("nodes", "processors"),
    [
        *((tree, "temperature 1") for tree in TREES),
        *(("two levels", processors) for processors in PROCESSORS if processors != "temperature 1"),
        ("all of two levels", "temperature 2"),
        ("three levels", "repetition_penalty"),
        ("root alone", "top_k 2"),
    ],
)
def test_law_of_a_round(nodes: str, processors: str) -> None:
    tree = draft_tree(0, TREES[nodes])
    logits = node_logits(tree.num_nodes)
    rule = TokenRule(LogitsProcessorList(PROCESSORS[processors]), do_sample=True)
    assert p_value(draws_of_a_round(tree, logits, rule, seed=1), law_of_a_round(tree, logits, rule)) > 1e-3


def test_golden_node() -> None:
    """p = (0.5, 0.3, 0.2), children 1 and 2: each accepted with its own probability, 0 emitted with 0.5."""
    logits = torch.tensor([[0.5, 0.3, 0.2], [1.0, 1e-9, 1e-9], [1e-9, 1.0, 1e-9]]).log()
    tree = draft_tree(0, [(0, 1), (0, 2)])
    rule = TokenRule(LogitsProcessorList(), do_sample=True)
    draws = draws_of_a_round(tree, logits, rule, seed=2)
    assert p_value(draws, {(0,): 0.5, (1, 0): 0.3, (2, 1): 0.2}) > 1e-3


def test_a_wrong_law_is_noticed() -> None:
    tree = draft_tree(0, TREES["two levels"])
    logits = node_logits(tree.num_nodes)
    draws = draws_of_a_round(tree, logits, TokenRule(LogitsProcessorList(), True), seed=3)
    for wrong in (
        TokenRule(LogitsProcessorList([TemperatureLogitsWarper(1.3)]), True),
        TokenRule(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)]), True),
    ):
        assert p_value(draws, law_of_a_round(tree, logits, wrong)) < 1e-6
    others = node_logits(tree.num_nodes)
    others[[1, 2]] = others[[2, 1]]
    assert p_value(draws, law_of_a_round(tree, others, TokenRule(LogitsProcessorList(), True))) < 1e-6


# A whole text -------------------------------------------------------------------------------------------------------

NUM_TEXTS = 700
SMALL_TREE = {"depth": 1, "top_k": 2, "num_nodes": 5}


def small_target() -> LlamaForCausalLM:
    """Four ids, one layer, and logits that depend on the whole prefix."""
    config = LlamaConfig(
        vocab_size=4,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    parameter.copy_(1.3 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    return model.eval()


@torch.no_grad()
def law_of_a_text(model: LlamaForCausalLM, prompt: Tensor, processors: Sequence[Any], length: int) -> Law:
    """Probability of all continuations of a length, each prefix by a plain forward."""
    law: Law = {(): 1.0}
    for _ in range(length):
        longer: Law = {}
        for text, probability in law.items():
            ids = torch.cat([prompt, torch.tensor([text], dtype=torch.int64)], dim=1)
            scores = LogitsProcessorList(processors)(ids, model(ids).logits[:, -1].float())
            for token, p in enumerate(scores.softmax(-1)[0].tolist()):
                longer[(*text, token)] = probability * p
        law = longer
    return law


TEXTS: dict[str, tuple[dict[str, Any], list[Any], dict[str, Any]]] = {
    "temperature 1, all ids": ({}, [], {"kind": "full"}),
    "temperature 0.5, window of 2": ({"temperature": 0.5}, [TemperatureLogitsWarper(0.5)], {"max_rows": 2}),
    "top_k 2, window of 1": ({"top_k": 2}, [TopKLogitsWarper(2)], {"max_rows": 1}),
    "repetition_penalty, window of 3": (
        {"repetition_penalty": 1.8},
        [RepetitionPenaltyLogitsProcessor(1.8)],
        {"max_rows": 3, "window": "stream"},
    ),
}


@pytest.mark.parametrize(("arguments", "processors", "vocabulary"), TEXTS.values(), ids=TEXTS)
def test_law_of_a_text(arguments: dict[str, Any], processors: list[Any], vocabulary: dict[str, Any]) -> None:
    model, prompt = small_target(), torch.tensor([[1, 0]])
    set_seed(5)
    output = speculate(
        model,
        prompt,
        drafter=random_head(model),
        do_sample=True,
        num_return_sequences=NUM_TEXTS,
        max_new_tokens=3,
        microspec={"tree": SMALL_TREE, "vocabulary": vocabulary},
        return_dict_in_generate=True,
        **arguments,
    )
    draws = Counter(tuple(row) for row in output.sequences[:, 2:].tolist())
    assert p_value(draws, law_of_a_text(model, prompt, processors, length=3)) > 1e-3
    accepted = [n - 1 for s in output.stats for n in s.emitted]
    assert 0 < sum(accepted) < sum(s.tree["depth"] + 1 for s in output.stats for _ in s.emitted)


@pytest.mark.parametrize("drafter", ["every id", "nothing", "always 2"])
def test_law_of_a_text_does_not_depend_on_the_drafter(drafter: str) -> None:
    model, prompt = small_target(), torch.tensor([[1, 0]])
    nodes: Nodes = {
        "every id": [(0, t) for t in range(4)] + [(parent, t) for parent in range(1, 5) for t in range(4)],
        "nothing": [],
        "always 2": [(0, 2), (1, 2)],
    }[drafter]
    set_seed(6)
    with scripted(lambda upcoming, vocab_size, round_number: nodes):
        output = speculate(
            model,
            prompt,
            drafter=nan_head(model),
            do_sample=True,
            num_return_sequences=NUM_TEXTS,
            max_new_tokens=3,
            microspec={"tree": SMALL_TREE, "vocabulary": "full"},
            return_dict_in_generate=True,
        )
    draws = Counter(tuple(row) for row in output.sequences[:, 2:].tolist())
    assert p_value(draws, law_of_a_text(model, prompt, [], length=3)) > 1e-3
    if drafter == "every id":
        assert {n for s in output.stats for n in s.emitted} == {3}


# Random state -------------------------------------------------------------------------------------------------------


def test_seed_repeats_the_text() -> None:
    model, head = controlled_pair(scale=0.1)
    prompt = random_prompt(model)
    texts = []
    for seed in (7, 7, 8):
        set_seed(seed)
        texts.append(
            speculate(model, prompt, drafter=head, do_sample=True, temperature=3.0, max_new_tokens=20).tolist()
        )
    assert texts[0] == texts[1] != texts[2]


def test_temperature_has_an_effect() -> None:
    model, head = controlled_pair(scale=0.1)
    prompt = random_prompt(model)
    ask: dict[str, Any] = {"drafter": head, "do_sample": True, "max_new_tokens": 6}
    hot = {tuple(speculate(model, prompt, temperature=5.0, **ask)[0].tolist()) for _ in range(5)}
    assert len(hot) == 5
    cold = speculate(model, prompt, temperature=1e-4, **ask)
    assert cold.tolist() == plain(model, prompt, max_new_tokens=6).tolist()


def test_greedy_leaves_the_random_state_alone() -> None:
    model, head = controlled_pair(scale=0.1)
    set_seed(9)
    state = torch.random.get_rng_state()
    speculate(model, random_prompt(model), drafter=head, max_new_tokens=8, repetition_penalty=1.1)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_all_outcomes_are_counted() -> None:
    """The enumerations sum to one, also where processors forbid tokens."""
    tree = draft_tree(0, TREES["three levels"])
    for processors, seed in itertools.product(PROCESSORS.values(), range(3)):
        law = law_of_a_round(tree, node_logits(tree.num_nodes, seed), TokenRule(LogitsProcessorList(processors), True))
        assert sum(law.values()) == pytest.approx(1.0)
