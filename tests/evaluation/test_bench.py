"""The bench: who takes part, in which order, and what is made of the times."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from microspec_hf import TreeConfig, ops, sessions
from microspec_hf.engine import CapturedRounds
from microspec_hf.evaluation import bench
from microspec_hf.evaluation.bench import BenchArm, Run
from microspec_hf.stats import SpeculationStats
from tests.capture import capture
from tests.doubles import controlled_pair, plain, random_prompt

SMALL = TreeConfig(depth=2, top_k=4, num_nodes=12)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.setattr(bench, "TREE", SMALL)
    return controlled_pair(scale=0.05)


def test_arms_run_and_give_one_text(pair: tuple[Any, Any]) -> None:
    model, head = pair
    arms = bench.bench_arms(head)
    prompts = [random_prompt(model, 7, seed) for seed in (1, 2)]
    told: list[str] = []
    records = bench.bench(model, head, arms, prompts, 12, repeats=2, slow_prompts=1, tell=told.append)
    assert [record["arm"] for record in records] == [arm.name for arm in arms]
    for record in records:
        slow = record["arm"] in bench.SLOW
        assert record["prompts"] == (1 if slow else 2)
        assert record["new_tokens"] == 12 * record["prompts"]
        assert record["same_text_as"][bench.STOCK]["equal"] == 1
        assert record["tokens_per_second_range"][0] <= record["tokens_per_second"]
        assert record["tokens_per_second"] <= record["tokens_per_second_range"][1]
        assert record["round_ms"] > 0
        ours = record["arm"] not in bench.SLOW
        assert (record["device_ms"] is not None) == ours
        if ours:  # timed with a clock, as nothing is captured
            assert record["device_ms"] > record["verify_ms"] > 0
            assert record["host_gap_ms"] == record["round_ms"] - record["device_ms"]
    by_name = {record["arm"]: record for record in records}
    assert by_name["microspec"]["acceptance_length"] > 1
    assert by_name["microspec"]["draft_ms"] > by_name["plain-engine"]["draft_ms"] == 0
    assert by_name["plain-engine"]["acceptance_length"] == 1
    assert by_name["microspec"]["mean_active_vocabulary"] < by_name["eagle-2"]["mean_active_vocabulary"]
    order = [text.split(":")[0] for text in told if ": repeat" in text]
    names = [arm.name for arm in arms]
    assert order == names + names[1:] + names[:1]


def test_a_round_is_taken_apart(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rounds are captured, the parts of a round of the latest text are timed; here the capture is emulated."""
    model, head = pair
    monkeypatch.setattr(sessions, "CapturedRounds", lambda **options: CapturedRounds(capture, **options))
    monkeypatch.setattr(sessions, "can_capture", lambda devices: True)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(ops, "used_slots", lambda token_of: token_of.shape[0])
    arms = [arm for arm in bench.bench_arms(head) if arm.name not in bench.SLOW]
    records = bench.bench(model, head, arms, [random_prompt(model, 7)], 12, repeats=1)
    for record in records:
        assert record["is_captured"]
        assert record["verify_ms"] > 0
        assert record["device_ms"] > 0
        assert (record["draft_ms"] > 0) == (record["arm"] != bench.ENGINE)
        assert record["same_text_as"][bench.ENGINE]["equal"] == 1


def test_arms_that_cannot_take_part_are_left_out_with_a_reason(pair: tuple[Any, Any]) -> None:
    head = pair[1]
    reasons = bench.left_out(head.device, range(20000))
    assert set(reasons) == {"fr-spec-32k", bench.STATIC}
    assert "32,768 ids, got 20,000" in reasons["fr-spec-32k"]
    names = {arm.name for arm in bench.bench_arms(head, range(20000))}
    assert "fr-spec-16k" in names
    assert not names & set(reasons)
    assert not bench.left_out(torch.device("cuda"), range(40000))


def test_record() -> None:
    def run(tokens: int, seconds: float, emitted: list[int]) -> Run:
        stats = SpeculationStats(emitted=emitted, decode_seconds=seconds / 2, is_captured=True)
        return Run(list(range(tokens)), seconds, stats)

    repeats = [[run(11, 1.0, [5, 5])], [run(11, 2.0, [5, 5])], [run(11, 4.0, [5, 5])]]
    parts = {"draft_ms": 1.0, "verify_ms": 2.0, "rest_ms": 0.5, "device_ms": 3.5}
    record = bench.record_of(BenchArm("x"), repeats, startup=3.0, prefill=0.0, parts=parts)
    assert record["tokens_per_second"] == 5.5
    assert record["tokens_per_second_range"] == [2.75, 11.0]
    assert record["round_ms"] == pytest.approx(500)
    assert record["round_ms_range"] == pytest.approx([250, 1000])
    assert record["decode_tokens_per_second"] == pytest.approx(10)
    assert record["decode_tokens_per_second_range"] == pytest.approx([5, 20])
    assert record["acceptance_length"] == 5
    assert record["host_gap_ms"] == pytest.approx(record["round_ms"] - 3.5)
    plain_record = bench.record_of(BenchArm("y"), [[Run([1] * 11, 1.2, None)]], 0.0, prefill=0.2, parts={})
    assert plain_record["round_ms"] == pytest.approx(100)
    assert plain_record["host_gap_ms"] is None


def test_same_texts(pair: tuple[Any, Any]) -> None:
    model, _ = pair
    prompts = [random_prompt(model, 7, seed) for seed in range(3)]
    texts = [plain(model, ids, max_new_tokens=4)[0, 7:].tolist() for ids in prompts]
    wrong = [*texts[1][:2], (texts[1][2] + 1) % model.config.vocab_size, texts[1][3]]
    found = bench.same_texts(model, prompts, texts, [texts[0], wrong])
    assert (found["equal"], found["of"], found["near_ties"]) == (1, 2, 0)
    (difference,) = found["differences"]
    assert (difference["prompt"], difference["position"]) == (1, 2)
    assert (difference["plain"], difference["microspec"]) == (texts[1][2], wrong[2])
    assert difference["logit_gap"] > difference["tolerance"]


def test_round_of_a_profile() -> None:
    events = []
    for start in (0.0, 100.0, 200.0):
        events += [("gemm", start, start + 10), ("norm", start + 11, start + 13), ("gemm", start + 14, start + 20)]
        events += [("Memcpy DtoH", start + 21, start + 22)]
    found = bench.round_of(events, ends=lambda name: "DtoH" in name)
    assert found["launches"] == 3
    assert found["busy_us"] == 18
    assert found["kernels"][0] == {"kernel": "gemm", "calls": 2, "us": 16, "share": 16 / 18}
    assert bench.round_of([], ends=bool)["kernels"] == []


def test_bytes(pair: tuple[Any, Any]) -> None:
    from microspec_hf.hf import Target

    model, head = pair
    target = Target(model)
    everything = sum(weight.nbytes for weight in model.parameters())
    embedding = model.get_input_embeddings().weight.nbytes
    tied = model.config.tie_word_embeddings
    assert bench.bytes_of_pass(target) == everything - (0 if tied else embedding)
    weights = sum(weight.nbytes for weight in head.parameters())
    assert bench.bytes_of_drafting(head, SMALL, 10, 8) == 3 * (weights + 80)


def test_bandwidth_is_positive() -> None:
    assert bench.memory_bandwidth(torch.device("cpu"), 0.01) > 1e8


def test_plain_engine_is_plain(pair: tuple[Any, Any]) -> None:
    model, head = pair
    prompt = random_prompt(model, 7)
    (arm,) = [arm for arm in bench.bench_arms(head) if arm.name == bench.ENGINE]
    run = bench.run_arm(model, arm, prompt, 9)
    assert run.ids == plain(model, prompt, max_new_tokens=9)[0, 7:].tolist()
    assert run.stats is not None
    assert run.stats.rounds == 0
