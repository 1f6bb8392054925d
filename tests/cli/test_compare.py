from __future__ import annotations

import pytest
import torch

from microspec_hf import EagleHead, MicroSpecConfig, SpeculationStats, TreeConfig
from microspec_hf.cli.compare import Answer, Comparison, compare, record, summary
from tests import tiny
from tests.cli.conftest import PairFolders


def comparison(plain: list[float], ours: list[float], ids: list[int], emitted: list[int]) -> Comparison:
    stats = SpeculationStats(
        new_tokens=len(ids),
        emitted=emitted,
        num_levels=3,
        coverage=0.5,
        mean_active_vocabulary=100.0 * len(emitted),
        tree={"depth": 2},
    )
    return Comparison(
        plain=[Answer(ids, seconds) for seconds in plain],
        microspec=[Answer(ids, seconds, stats) for seconds in ours],
    )


def test_summary_by_hand() -> None:
    figures = summary(
        [
            comparison([1.0, 9.0, 2.0], [1.0, 1.0, 5.0], [1, 2, 3, 4], [3]),
            comparison([4.0, 4.0, 4.0], [1.0, 1.0, 1.0], [5, 6], [1, 1, 1]),
        ]
    )
    assert figures["plain_tokens_per_second"] == pytest.approx(6 / (2.0 + 4.0))
    assert figures["tokens_per_second"] == pytest.approx(6 / (1.0 + 1.0))
    assert figures["speedup"] == pytest.approx(3.0)
    assert figures["median_speedup"] == pytest.approx(3.0)
    assert figures["acceptance_length"] == pytest.approx(6 / 4)
    assert figures["mean_active_vocabulary"] == pytest.approx((100 * 1 + 300 * 3) / 4)
    assert figures["coverage"] == pytest.approx(0.5)
    assert (figures["identical"], figures["new_tokens"], figures["rounds"]) == (True, 6, 4)


def test_one_other_text_in_any_repeat_is_not_identical() -> None:
    for way in ("plain", "microspec"):
        changed = comparison([1.0, 1.0], [1.0, 1.0], [1, 2], [1])
        answers = getattr(changed, way)
        answers[1] = Answer([1, 3], 1.0, answers[1].stats)
        assert not changed.identical
        assert not record(changed)["identical"]
        assert not summary([comparison([1.0], [1.0], [1], [1]), changed])["identical"]


def test_an_answer_without_rounds_divides_by_nothing() -> None:
    figures = summary([comparison([1.0], [0.5], [7], [])])
    assert (figures["acceptance_length"], figures["coverage"], figures["speedup"]) == (0.0, 1.0, 2.0)


def test_both_ways_answer_every_prompt_in_turn(pair_folders: PairFolders) -> None:
    model = tiny.tiny_llama()
    head = EagleHead.from_pretrained(pair_folders.drafter).eval()
    prompts = [{"input_ids": torch.tensor([ids])} for ids in ([3, 5, 8], [13, 21])]
    for prompt in prompts:
        prompt["attention_mask"] = torch.ones_like(prompt["input_ids"])
    progress: list[int] = []
    config = MicroSpecConfig(tree=TreeConfig(2, 3, 6))
    comparisons = compare(model, head, config, prompts, 7, 2, lambda: progress.append(1))
    assert len(progress) == 2 * 2 * len(prompts)
    for prompt, found in zip(prompts, comparisons, strict=True):
        expected = model.generate(**prompt, max_new_tokens=7, do_sample=False)[
            0, prompt["input_ids"].shape[1] :
        ].tolist()
        assert [answer.ids for answer in found.plain + found.microspec] == [expected] * 4
        assert found.identical
        assert all(answer.seconds > 0 for answer in found.plain + found.microspec)
        assert all(answer.stats is None for answer in found.plain)
        assert found.stats.new_tokens == 7
