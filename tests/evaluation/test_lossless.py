from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from microspec_hf import EagleHead, MicroSpecConfig, SpeculationStats, TreeConfig
from microspec_hf.evaluation import Prompt, check_lossless, lossless
from microspec_hf.evaluation.decoding import decode_plainly
from microspec_hf.evaluation.lossless import first_difference
from tests.evaluation.conftest import ids_of

TREE = TreeConfig(depth=2, top_k=3, num_nodes=6)
CONFIGS = {kind: MicroSpecConfig(TREE, {"kind": kind}) for kind in ("full", "dynamic")}
NEW = 10


def wrong_at(position: int, token: Callable[[list[int]], int | None]) -> Callable[..., Any]:
    """A `decode` that is right up to a position; there it emits another token, or ends (None)."""

    def decode(
        model: PreTrainedModel, drafter: Any, ids: Any, config: Any, count: int
    ) -> tuple[list[int], SpeculationStats]:
        text = decode_plainly(model, ids, count)
        wrong = token(text)
        stats = SpeculationStats(new_tokens=count, emitted=[1] * (count - 1))
        return text[:position] + ([] if wrong is None else [wrong, *text[position + 1 :]]), stats

    return decode


def test_equal_texts(target: PreTrainedModel, head: EagleHead, prompts: list[Prompt]) -> None:
    report = check_lossless(target, ids_of, head, prompts, CONFIGS, NEW)
    assert report.identical
    assert report.verdict == "identical"
    assert [(c.id, c.vocabulary) for c in report.checks] == [(p.id, v) for p in prompts for v in CONFIGS]
    assert all(c.new_tokens == NEW and c.rounds > 0 and c.emitted >= NEW - 1 for c in report.checks)
    record = report.to_dict()
    assert record["dtype"] == "float32"
    assert record["prompts"] == 3
    assert record["differences"] == []
    assert [(r["vocabulary"], r["identical"], r["faults"]) for r in record["records"]] == [
        ("full", 3, 0),
        ("dynamic", 3, 0),
    ]
    json.dumps(record, allow_nan=False)


def test_a_wrong_token_is_a_fault_and_is_located(
    target: PreTrainedModel, head: EagleHead, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lossless, "decode", wrong_at(4, lambda text: (text[4] + 1) % 101))
    report = check_lossless(target, ids_of, head, prompts[:1], CONFIGS["full"], NEW)
    plain = decode_plainly(target, ids_of(prompts[0]), NEW)
    assert not report.identical
    assert report.verdict == "differs: a fault"
    assert report.num_faults == 1
    (difference,) = report.to_dict()["differences"]
    assert (difference["id"], difference["vocabulary"], difference["position"]) == (prompts[0].id, "full", 4)
    assert (difference["plain"], difference["microspec"]) == (plain[4], (plain[4] + 1) % 101)
    with torch.no_grad():
        text = torch.cat([ids_of(prompts[0]), torch.tensor([plain[:4]])], dim=1)
        logits = target(text).logits[0, -1]
    expected = float(logits[plain[4]] - logits[(plain[4] + 1) % 101])
    assert difference["logit_gap"] == pytest.approx(expected, rel=1e-4)
    assert difference["logit_gap"] > difference["tolerance"] > 0
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("lead", [0.0, 1e-7])
def test_a_near_tie_is_no_fault(target: PreTrainedModel, head: EagleHead, prompts: list[Prompt], lead: float) -> None:
    """Two tokens with (nearly) one row of the head: which one wins is a matter of rounding."""
    model = copy.deepcopy(target)
    ids = ids_of(prompts[0])
    plain = decode_plainly(model, ids, NEW)
    winner, twin = plain[4], next(t for t in range(100, 0, -1) if t not in plain)
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[winner] * (1 - lead)
    text = decode_plainly(model, ids, NEW)
    ours = [*text[:4], twin if text[4] == winner else winner, *text[5:]]
    difference = first_difference(model, ids, text, ours)
    assert difference is not None
    assert difference.is_near_tie
    assert difference.logit_gap is not None
    assert difference.logit_gap <= difference.tolerance < 1e-3
    assert difference.verdict.startswith("differs at a near tie of ")


def test_rows_that_no_text_uses_excuse_nothing(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary padded with rows of absurd scores leaves the tolerance as it is."""
    scores = torch.tensor([20.0, 19.0, -5.0] + [-1e9] * 98)
    monkeypatch.setattr(lossless, "next_token_scores", lambda model, text: scores)
    difference = first_difference(target, torch.tensor([[1]]), [0], [1])
    assert difference is not None
    assert not difference.is_near_tie
    assert difference.tolerance == pytest.approx(lossless.NEAR_TIE[target.dtype] * torch.finfo(target.dtype).eps * 20)


def test_two_tokens_that_tie_far_below_the_best_are_a_fault(target: PreTrainedModel, prompts: list[Prompt]) -> None:
    """Both texts would be wrong there; that they are close to each other excuses neither."""
    model = copy.deepcopy(target)
    ids = ids_of(prompts[0])
    plain = decode_plainly(model, ids, 5)
    a, b = [t for t in range(101) if t not in plain][:2]
    with torch.no_grad():
        model.lm_head.weight[b] = model.lm_head.weight[a] = -model.lm_head.weight[plain[4]]
    difference = first_difference(model, ids, [*plain[:4], a], [*plain[:4], b])
    assert difference is not None
    assert difference.logit_gap == 0.0
    assert not difference.is_near_tie


def test_a_text_that_ends_early_is_a_fault(
    target: PreTrainedModel, head: EagleHead, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lossless, "decode", wrong_at(7, lambda text: None))
    report = check_lossless(target, ids_of, head, prompts[:1], CONFIGS, NEW)
    assert report.num_faults == 2
    difference = report.checks[0].difference
    assert difference is not None
    assert (difference.position, difference.microspec, difference.logit_gap) == (7, None, None)
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_forbidden_token_is_a_fault(target: PreTrainedModel, prompts: list[Prompt]) -> None:
    """The scores are those after the processors of the target's generation config."""
    model = copy.deepcopy(target)
    ids = ids_of(prompts[0])
    wrong = (decode_plainly(model, ids, 1)[0] + 1) % 101
    model.generation_config.suppress_tokens = [wrong]
    plain = decode_plainly(model, ids, 3)
    difference = first_difference(model, ids, plain, [wrong, *plain[1:]])
    assert difference is not None
    assert difference.logit_gap is None
    assert not difference.is_near_tie


def test_a_fault_outweighs_near_ties() -> None:
    def check(gap: float, is_near_tie: bool) -> lossless.PromptCheck:
        difference = lossless.Difference(0, 1, 2, gap, 0.5, is_near_tie)
        return lossless.PromptCheck("a", "qa", "full", 5, 2, 4, difference)

    ties = [check(0.1, True), check(0.25, True)]
    equal = lossless.PromptCheck("b", "qa", "full", 5, 2, 4)
    assert lossless.LosslessReport("bfloat16", 5, (*ties, equal)).verdict == "differs at a near tie of 0.25"
    report = lossless.LosslessReport("bfloat16", 5, (*ties, check(0.6, False)))
    assert report.verdict == "differs: a fault"
    (record,) = report.to_dict()["records"]
    assert (record["prompts"], record["identical"], record["near_ties"], record["faults"]) == (3, 0, 2, 1)
    assert record["acceptance_length"] == 2.0
    assert not lossless.LosslessReport("float32", 5, ()).identical


def test_plain_text_is_made_once_for_all_configurations(
    target: PreTrainedModel, head: EagleHead, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _count(monkeypatch, "decode_plainly")
    check_lossless(target, ids_of, head, prompts, CONFIGS, NEW)
    assert len(calls) == len(prompts)


def test_an_interrupted_check_goes_on(
    target: PreTrainedModel,
    head: EagleHead,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    journal = tmp_path / "check.jsonl"
    whole = check_lossless(target, ids_of, head, prompts, CONFIGS, NEW)
    calls = _count(monkeypatch, "decode")
    check_lossless(target, ids_of, head, prompts[:1], CONFIGS, NEW, journal=journal)
    assert len(calls) == 2
    nothing = check_lossless(target, ids_of, head, prompts[1:], CONFIGS, NEW, journal=journal, seconds=0.0)
    assert (nothing.num_prompts, nothing.verdict, len(calls)) == (0, "nothing checked", 2)
    assert check_lossless(target, ids_of, head, prompts, CONFIGS, NEW, journal=journal) == whole
    assert len(calls) == 6
    assert check_lossless(target, ids_of, head, prompts, CONFIGS, NEW, journal=journal, seconds=0.0) == whole
    assert len(calls) == 6


def test_differences_survive_the_journal(
    target: PreTrainedModel,
    head: EagleHead,
    prompts: list[Prompt],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(lossless, "decode", wrong_at(2, lambda text: (text[2] + 1) % 101))
    arguments: Any = (target, ids_of, head, prompts, CONFIGS, NEW, tmp_path / "check.jsonl")
    report = check_lossless(*arguments)
    assert report.num_faults == 6
    assert check_lossless(*arguments, seconds=0.0) == report


def test_a_journal_of_another_drafter_or_configuration_is_refused(
    target: PreTrainedModel, head: EagleHead, prompts: list[Prompt], tmp_path: Path
) -> None:
    journal = tmp_path / "check.jsonl"
    check_lossless(target, ids_of, head, prompts[:1], CONFIGS, NEW, journal=journal)
    other = copy.deepcopy(head)
    with torch.no_grad():
        other.fc.weight.mul_(2)
    with pytest.raises(ValueError, match="these differ: drafter"):
        check_lossless(target, ids_of, other, prompts, CONFIGS, NEW, journal=journal)
    with pytest.raises(ValueError, match="these differ: configurations, max_new_tokens"):
        check_lossless(target, ids_of, head, prompts, CONFIGS["full"], NEW + 1, journal=journal)


def test_nothing_to_check_and_repeated_ids_are_refused(
    target: PreTrainedModel, head: EagleHead, prompts: list[Prompt]
) -> None:
    with pytest.raises(ValueError, match="nothing to check"):
        check_lossless(target, ids_of, head, [], CONFIGS, NEW)
    with pytest.raises(ValueError, match="nothing to check"):
        check_lossless(target, ids_of, head, prompts, {}, NEW)
    with pytest.raises(ValueError, match="same id"):
        check_lossless(target, ids_of, head, [prompts[0]] * 2, CONFIGS, NEW)


def test_float32_is_exact_meanwhile_and_the_setting_comes_back(
    target: PreTrainedModel, head: EagleHead, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(lossless, "decode_plainly", lambda *a: seen.append(torch.get_float32_matmul_precision()) or [1])
    monkeypatch.setattr(lossless, "decode", lambda *a: ([1], SpeculationStats()))
    torch.set_float32_matmul_precision("high")
    try:
        check_lossless(target, ids_of, head, prompts[:1], CONFIGS, NEW)
        assert seen == ["highest"]
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


def _count(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """Record the calls of a function of the module, and make them."""
    calls: list[Any] = []
    original = getattr(lossless, name)

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(lossless, name, counted)
    return calls
