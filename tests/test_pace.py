"""When drafting does not pay, plain steps take over, and drafting is tried again."""

from __future__ import annotations

import functools

import pytest
import torch

from microspec_hf import TreeConfig, generation, pace
from microspec_hf.autotune import Choice
from microspec_hf.pace import MARGIN, PATIENCE, PROBES, WINDOW, Pace
from tests.doubles import SCRIPTS, controlled_pair, plain, random_prompt, scripted, speculate
from tests.tiny import TINY_MODELS, tiny_llama


class Clock:
    """Advances by what the latest step cost."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def play(steps: int, round_seconds: float, plain_seconds: float, tokens: float) -> tuple[Pace, list[bool]]:
    """So many steps, each of which costs and yields the same; and which of them drafted."""
    clock = Clock()
    paced, drafted = Pace(clock), []
    for _ in range(steps):
        drafted.append(paced.drafts)
        clock.now += round_seconds if paced.drafts else plain_seconds
        paced.record(tokens if paced.drafts else 1.0)
    return paced, drafted


def test_drafting_that_pays_goes_on_after_one_measurement() -> None:
    paced, drafted = play(200, round_seconds=1.5, plain_seconds=1.0, tokens=2.0)
    assert drafted.count(False) == paced.plain_steps == PROBES
    assert paced.switches == []


def test_drafting_that_surely_pays_is_not_measured() -> None:
    _, drafted = play(200, round_seconds=9.0, plain_seconds=1.0, tokens=3.2)
    assert all(drafted)


def test_drafting_that_does_not_pay_gives_way_and_is_tried_less_and_less() -> None:
    paced, drafted = play(400, round_seconds=3.0, plain_seconds=1.0, tokens=1.5)
    assert drafted.count(False) > 300
    assert [switch.to for switch in paced.switches][:4] == ["plain", "draft", "plain", "draft"]
    first, second = (switch for switch in paced.switches[:2])
    assert first.draft_seconds == pytest.approx(2.0)
    assert first.plain_seconds == 1.0
    assert second.token - first.token == PATIENCE
    rests = [b.token - a.token for a, b in zip(paced.switches[::2], paced.switches[1::2], strict=False)]
    assert rests == sorted(rests)
    assert rests[-1] > rests[0]


def test_noise_switches_nothing() -> None:
    paced, _ = play(200, round_seconds=2.0 * MARGIN - 1e-6, plain_seconds=1.0, tokens=2.0)
    assert paced.switches == []


def test_drafting_comes_back_when_the_text_becomes_easy() -> None:
    clock = Clock()
    paced, drafted = Pace(clock), []
    for step in range(300):
        drafted.append(paced.drafts)
        clock.now += 2.0 if paced.drafts else 1.0
        paced.record((1.2 if step < 60 else 4.0) if paced.drafts else 1.0)
    assert not all(drafted[:60])
    assert all(drafted[-100:])


def test_first_round_is_not_judged() -> None:
    """It pays for what is made once: buffers, kernels that are looked for."""
    clock = Clock()
    paced = Pace(clock)
    clock.now += 1000.0
    for _ in range(1 + WINDOW + PROBES + 1):
        paced.record(2.0 if paced.drafts else 1.0)
        clock.now += 1.5 if paced.drafts else 1.0
    assert paced.switches == []


class Alternating(Pace):
    """Two rounds, then three plain steps, and so on, whatever they cost."""

    def record(self, tokens: float) -> None:
        self._tokens += 1
        self.drafts = self._tokens % 5 < 2


@pytest.fixture
def alternating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "Pace", Alternating)


@pytest.mark.usefixtures("alternating")
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_switching_changes_no_text(name: str, script: str) -> None:
    model = TINY_MODELS[name](attn_implementation="eager")
    prompt = random_prompt(model)
    expected = plain(model, prompt, max_new_tokens=30)
    with scripted(SCRIPTS[script], expected):
        got = speculate(model, prompt, max_new_tokens=30, return_dict_in_generate=True)
    assert got.sequences.tolist() == expected.tolist()
    stats = got.stats[0]
    assert stats.plain_steps > 0
    assert stats.new_tokens <= 1 + sum(stats.emitted) + stats.plain_steps


@pytest.mark.usefixtures("alternating")
def test_drafter_hears_what_was_written_without_it() -> None:
    """Its rows of the plain steps are made up for before it drafts again: it drafts as well as without them."""
    model, head = controlled_pair(scale=0.0)
    prompt = random_prompt(model, 12)
    got = speculate(model, prompt, drafter=head, max_new_tokens=60, return_dict_in_generate=True)
    assert got.sequences.tolist() == plain(model, prompt, max_new_tokens=60).tolist()
    always = speculate(
        model,
        prompt,
        drafter=head,
        max_new_tokens=60,
        return_dict_in_generate=True,
        microspec={"fallback": False},
    )
    assert always.stats[0].plain_steps == 0
    assert got.stats[0].acceptance_length == pytest.approx(always.stats[0].acceptance_length, rel=0.2)


def test_switches_reach_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that is always wrong, on a clock where a round costs as much as two plain steps."""
    clock = Clock()

    class Costly(Pace):
        def record(self, tokens: float) -> None:
            clock.now += 2.0 if self.drafts else 1.0
            super().record(tokens)

    monkeypatch.setattr(generation, "Pace", functools.partial(Costly, clock=clock))
    model = tiny_llama()
    prompt = random_prompt(model)
    expected = plain(model, prompt, max_new_tokens=60)
    for fallback in (True, False):
        with scripted(SCRIPTS["wrong"], expected):
            got = speculate(
                model,
                prompt,
                max_new_tokens=60,
                return_dict_in_generate=True,
                microspec={"fallback": fallback},
            )
        stats = got.stats[0]
        assert torch.equal(got.sequences, expected)
        if fallback:
            assert stats.switches[0]["to"] == "plain"
            assert stats.switches[0]["draft_seconds"] > pace.MARGIN * stats.switches[0]["plain_seconds"]
            assert stats.plain_steps > 20
        else:
            assert (stats.switches, stats.plain_steps) == ([], 0)


@pytest.mark.parametrize("rows", [1, 2])
def test_known_cost_holds_for_one_text_only(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """What a round of one text costs says nothing of a batch, whose plain steps are wider too."""
    made: list[Pace] = []

    class Noted(Pace):
        def __post_init__(self) -> None:
            super().__post_init__()
            made.append(self)

    monkeypatch.setattr(generation, "Pace", functools.partial(Noted, clock=lambda: 0.0))
    monkeypatch.setattr(generation, "choose_tree", lambda *_: Choice(TreeConfig(1, 2, 3), cost=1.25))
    model = tiny_llama()
    prompt = random_prompt(model).repeat(rows, 1)
    speculate(model, prompt, max_new_tokens=4, microspec={"tree": "auto"})
    assert [paced.surely_pays for paced in made] == [1.25 if rows == 1 else pace.SURELY_PAYS]
