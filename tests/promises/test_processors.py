"""Every processor of transformers, and processors and criteria of a caller's own, whatever they remember."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation import logits_process as lp

from tests.doubles import SCRIPTS, random_tree
from tests.promises.support import (
    NUM_NEW_TOKENS,
    Setting,
    accepted_drafts,
    call,
    differs,
    drafts_along,
    ids_of,
    repeatable_draws,
    same_output,
    setting,
    speculate,
)

DRAFTS = {
    "perfect": SCRIPTS["perfect"],
    "last_branch_right": SCRIPTS["last_branch_right"],
    "alternately_right": SCRIPTS["alternately_right"],
    "random_tree": random_tree(seed=2, num_nodes=30),
}

OF_OTHER_MODELS = {
    "LogitsProcessor",  # the base class
    "WhisperTimeStampLogitsProcessor",
    "WhisperNoSpeechDetection",
    "ClassifierFreeGuidanceLogitsProcessor",  # of MusicGen: wants conditional and unconditional rows in one batch
    "AlternatingCodebooksLogitsProcessor",
    "BarkEosPrioritizerLogitsProcessor",
    "DiaClassifierFreeGuidanceLogitsProcessor",
    "DiaEOSChannelFilterLogitsProcessor",
    "DiaEOSDelayPatternLogitsProcessor",
}


def _allowed(batch: int, ids: Tensor) -> list[int]:
    return [token for token in range(97) if (token + int(ids[-1])) % 3]


PROCESSORS: dict[str, Callable[[Setting], LogitsProcessor]] = {
    "MinLengthLogitsProcessor": lambda s: lp.MinLengthLogitsProcessor(12, s.text[1]),
    "MinNewTokensLengthLogitsProcessor": lambda s: lp.MinNewTokensLengthLogitsProcessor(7, 6, s.text[1]),
    "TemperatureLogitsWarper": lambda s: lp.TemperatureLogitsWarper(2.5),
    "RepetitionPenaltyLogitsProcessor": lambda s: lp.RepetitionPenaltyLogitsProcessor(1.7),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda s: lp.EncoderRepetitionPenaltyLogitsProcessor(2.0, s.prompt),
    "TopPLogitsWarper": lambda s: lp.TopPLogitsWarper(0.5),
    "TopKLogitsWarper": lambda s: lp.TopKLogitsWarper(4),
    "TopHLogitsWarper": lambda s: lp.TopHLogitsWarper(0.4),
    "MinPLogitsWarper": lambda s: lp.MinPLogitsWarper(0.3),
    "TypicalLogitsWarper": lambda s: lp.TypicalLogitsWarper(0.5),
    "EpsilonLogitsWarper": lambda s: lp.EpsilonLogitsWarper(0.1),
    "EtaLogitsWarper": lambda s: lp.EtaLogitsWarper(0.1),
    "NoRepeatNGramLogitsProcessor": lambda s: lp.NoRepeatNGramLogitsProcessor(1),
    "EncoderNoRepeatNGramLogitsProcessor": lambda s: lp.EncoderNoRepeatNGramLogitsProcessor(1, s.prompt),
    "SequenceBiasLogitsProcessor": lambda s: lp.SequenceBiasLogitsProcessor([[[s.text[1]], -9.0], [[8, 9], 9.0]]),
    "NoBadWordsLogitsProcessor": lambda s: lp.NoBadWordsLogitsProcessor([[s.text[1]], list(s.text[3:5])], 3),
    "PrefixConstrainedLogitsProcessor": lambda s: lp.PrefixConstrainedLogitsProcessor(_allowed, 1),
    "ForcedBOSTokenLogitsProcessor": lambda s: lp.ForcedBOSTokenLogitsProcessor(3),
    "ForcedEOSTokenLogitsProcessor": lambda s: lp.ForcedEOSTokenLogitsProcessor(7 + NUM_NEW_TOKENS, 3),
    "InfNanRemoveLogitsProcessor": lambda s: lp.InfNanRemoveLogitsProcessor(),
    "ExponentialDecayLengthPenalty": lambda s: lp.ExponentialDecayLengthPenalty((2, 1.5), 3, 7),
    "LogitNormalization": lambda s: lp.LogitNormalization(),
    "SuppressTokensAtBeginLogitsProcessor": lambda s: lp.SuppressTokensAtBeginLogitsProcessor([s.text[0]], 7),
    "SuppressTokensLogitsProcessor": lambda s: lp.SuppressTokensLogitsProcessor([*range(60)]),
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": lambda s: lp.UnbatchedClassifierFreeGuidanceLogitsProcessor(
        1.6, s.model, unconditional_ids=s.prompt[:, 4:]
    ),
    "WatermarkLogitsProcessor": lambda s: lp.WatermarkLogitsProcessor(s.vocab_size, "cpu", bias=4.0),
    "SynthIDTextWatermarkLogitsProcessor": lambda s: lp.SynthIDTextWatermarkLogitsProcessor(
        3, [7, 11, 13, 17], sampling_table_size=2**8, sampling_table_seed=0, context_history_size=64, device="cpu"
    ),
}
PROMPTS = {"ForcedBOSTokenLogitsProcessor": torch.tensor([[10]])}  # it looks at texts of one token only
SHOWN_BY_ANOTHER = {"InfNanRemoveLogitsProcessor"}  # `test_options.py` shows its effect behind a bias of -inf


def test_every_processor_of_a_causal_model_has_a_case() -> None:
    known = {name for name, kind in vars(lp).items() if isinstance(kind, type) and issubclass(kind, lp.LogitsProcessor)}
    assert known == {*PROCESSORS} | OF_OTHER_MODELS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processor(name: str, do_sample: bool, family: str) -> None:
    where = setting(family)
    usual = {"do_sample": do_sample, "top_k": 0, "inputs": PROMPTS.get(name, where.prompt)}

    def ask() -> dict[str, Any]:
        return usual | {"logits_processor": LogitsProcessorList([PROCESSORS[name](where)])}

    with repeatable_draws():
        expected = call(where, **ask())
        for script in ("perfect", "random_tree"):
            with drafts_along(DRAFTS[script], expected):
                got = speculate(where, **ask())
            same_output(expected, got)
            assert script == "random_tree" or accepted_drafts(got)
        assert name in SHOWN_BY_ANOTHER or differs(expected, call(where, **usual))


# Processors of the caller's own -------------------------------------------------------------------------------------


class Balanced(LogitsProcessor):
    """A grammar: opening and closing ids alternate in depth, never below 0 or above 3; a third kind needs depth 2.

    It keeps a stack of its own, moved on by the one id that is new at each call, as constrained decoders do.
    """

    def __init__(self, prompt_length: int):
        self.prompt_length, self.depth, self.read = prompt_length, 0, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[0, self.read :].tolist()
        assert len(new) == (0 if self.read == self.prompt_length and not new else 1), "one id at a time"
        for token in new:
            self.depth += {0: 1, 1: -1, 2: 0}[token % 3]
        self.read = input_ids.shape[1]
        kinds = torch.arange(scores.shape[1]) % 3
        allowed = (kinds == 0) & (self.depth < 3) | (kinds == 1) & (self.depth > 0) | (kinds == 2) & (self.depth == 2)
        return scores.masked_fill(~allowed, -torch.inf)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("script", DRAFTS)
def test_grammar(script: str, do_sample: bool) -> None:
    where = setting()

    def ask() -> dict[str, Any]:
        return {
            "max_new_tokens": 30,
            "do_sample": do_sample,
            "top_k": 0,
            "logits_processor": LogitsProcessorList([Balanced(prompt_length=7)]),
        }

    with repeatable_draws():
        expected = call(where, **ask())
        with drafts_along(DRAFTS[script], expected):
            got = speculate(where, **ask())
    same_output(expected, got)
    depths = torch.tensor([{0: 1, 1: -1, 2: 0}[t % 3] for t in expected.sequences[0, 7:].tolist()]).cumsum(0)
    assert depths.min() >= 0
    assert depths.max() <= 3
    assert len({*depths.tolist()}) > 2  # the grammar has something to decide


class Witness(LogitsProcessor):
    """Keeps what it is called with, and forbids by how often it was called."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.append(input_ids[0].tolist())
        self.shapes.append(tuple(scores.shape))
        forbidden = torch.arange(scores.shape[1]) % 5 == len(self.prefixes) % 5
        return scores.masked_fill(forbidden, -torch.inf)


@pytest.mark.parametrize("script", DRAFTS)
def test_processor_sees_true_prefixes_in_order_and_each_position_once(script: str) -> None:
    where = setting()
    ours, theirs = Witness(), Witness()
    expected = call(where, max_new_tokens=20, logits_processor=LogitsProcessorList([theirs]))
    with drafts_along(DRAFTS[script], expected):
        got = speculate(where, max_new_tokens=20, logits_processor=LogitsProcessorList([ours]))
    same_output(expected, got)
    text = got.sequences[0].tolist()
    assert theirs.prefixes == [text[:end] for end in range(7, 27)]
    assert ours.prefixes == theirs.prefixes
    assert {*ours.shapes} == {(1, where.vocab_size)}


def test_scores_of_a_processor_are_its_own_to_change() -> None:
    """A processor that writes into the scores does not write into the logits that are returned."""

    class InPlace(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores[:, ::2] = -torch.inf
            return scores

    where = setting()
    processors = LogitsProcessorList([InPlace()])
    got = speculate(where, logits_processor=processors)
    assert all(bool(row.isfinite().all()) for row in got.logits)
    assert all(token % 2 for token in got.sequences[0, 7:].tolist())


# Criteria of the caller's own ---------------------------------------------------------------------------------------


class Counting(StoppingCriteria):
    """Stops at its n-th call, and keeps what it is called with."""

    def __init__(self, stop_at: int):
        self.stop_at = stop_at
        self.texts: list[list[int]] = []
        self.num_scores: list[int | None] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.texts.append(input_ids[0].tolist())
        self.num_scores.append(None if scores is None else len(scores))
        return torch.tensor([len(self.texts) >= self.stop_at])


@pytest.mark.parametrize("script", DRAFTS)
@pytest.mark.parametrize("stop_at", [1, 2, 5, 6, 9, 99])
def test_criterion_is_asked_once_for_each_token_and_not_behind_the_stop(stop_at: int, script: str) -> None:
    where = setting()
    ours, theirs = Counting(stop_at), Counting(stop_at)
    expected = call(where, stopping_criteria=StoppingCriteriaList([theirs]))
    with drafts_along(DRAFTS[script], (*where.prompt[0].tolist(), *where.text)):
        got = speculate(where, stopping_criteria=StoppingCriteriaList([ours]))
    same_output(expected, got)
    assert ours.texts == theirs.texts
    assert len(ours.texts) == min(stop_at, NUM_NEW_TOKENS) == ids_of(got).shape[1] - 7


def test_criterion_sees_the_scores_of_all_tokens_so_far() -> None:
    where = setting()
    ours, theirs = Counting(8), Counting(8)
    expected = call(where, stopping_criteria=StoppingCriteriaList([theirs]))
    with drafts_along(DRAFTS["perfect"], expected):
        speculate(where, stopping_criteria=StoppingCriteriaList([ours]))
    assert theirs.num_scores == [*range(1, 9)]
    assert ours.num_scores == theirs.num_scores


def test_criterion_sees_no_scores_that_were_not_asked_for() -> None:
    where = setting()
    ours, theirs = Counting(8), Counting(8)
    expected = call(where, output_scores=False, output_logits=False, stopping_criteria=StoppingCriteriaList([theirs]))
    with drafts_along(DRAFTS["perfect"], expected):
        speculate(where, output_scores=False, output_logits=False, stopping_criteria=StoppingCriteriaList([ours]))
    assert ours.num_scores == theirs.num_scores == [None] * 8


@pytest.mark.parametrize("both", [(3, 9), (9, 3), (4, 4)])
def test_all_criteria_are_asked_of_the_last_token(both: tuple[int, int]) -> None:
    where = setting()
    counts = []
    for decode in (call, speculate):
        criteria = StoppingCriteriaList([Counting(n) for n in both])
        with drafts_along(DRAFTS["perfect"], (*where.prompt[0].tolist(), *where.text)):
            decode(where, stopping_criteria=criteria)
        counts.append([len(c.texts) for c in criteria])
    assert counts[0] == counts[1] == [min(both)] * 2
