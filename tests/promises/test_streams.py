"""Streamers of every class get what plain `generate` gives them, and always an end."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from itertools import chain
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer
from transformers.generation import streamers

import microspec_hf
from tests.doubles import SCRIPTS, random_tree
from tests.promises.questions import Recorder
from tests.promises.support import Setting, call, drafts_along, failing_pass, ids_of, setting, speculate

DRAFTS = {
    "perfect": SCRIPTS["perfect"],
    "last_branch_right": SCRIPTS["last_branch_right"],
    "random_tree": random_tree(seed=3, num_nodes=30),
}


def text_of(where: Setting) -> tuple[int, ...]:
    return (*where.prompt[0].tolist(), *where.text)


def in_thread(decode: Callable[..., Any], where: Setting, **ask: Any) -> Thread:
    thread = Thread(target=decode, args=(where,), kwargs=ask, daemon=True)
    thread.start()
    return thread


def test_every_streamer_class_has_a_test() -> None:
    known = {
        kind
        for kind in vars(streamers).values()
        if inspect.isclass(kind) and issubclass(kind, streamers.BaseStreamer) and kind is not streamers.BaseStreamer
    }
    ours = {TextStreamer, TextIteratorStreamer, AsyncTextIteratorStreamer}
    # Draft texts of diffusion models go through a method of their own, which `generate` never calls.
    assert {kind.__name__ for kind in known - ours} <= {"TextDiffusionStreamer"}


@pytest.mark.parametrize("script", DRAFTS)
@pytest.mark.parametrize("custom_generate", ["microspec", microspec_hf.generate], ids=["name", "callable"])
def test_single_tokens_in_order(script: str, custom_generate: Any) -> None:
    where = setting()

    class Shapes(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.shapes: list[tuple[Any, ...]] = []

        def put(self, value: Tensor) -> None:
            super().put(value)
            self.shapes.append((tuple(value.shape), value.dtype, value.device.type))

    ours, theirs = Shapes(), Shapes()
    call(where, max_new_tokens=20, streamer=theirs)
    with drafts_along(DRAFTS[script], text_of(where)):
        output = speculate(where, max_new_tokens=20, streamer=ours, custom_generate=custom_generate)
    assert ours.values == theirs.values
    assert ours.shapes == theirs.shapes
    assert list(chain(*ours.values)) == ids_of(output)[0].tolist()
    assert ours.ends == theirs.ends == 1


@pytest.mark.parametrize("script", DRAFTS)
@pytest.mark.parametrize("index", [0, 3, 5, 8])
def test_nothing_behind_an_end_token(index: int, script: str) -> None:
    where = setting()
    ask = {"max_new_tokens": 20, "eos_token_id": where.text[index], "pad_token_id": 0}
    ours, theirs = Recorder(), Recorder()
    call(where, streamer=theirs, **ask)
    with drafts_along(DRAFTS[script], text_of(where)):
        speculate(where, streamer=ours, **ask)
    assert ours.values == theirs.values
    assert len(ours.values) <= 1 + index + 1


@pytest.mark.parametrize("skip_prompt", [False, True])
def test_text_streamer(skip_prompt: bool, capsys: pytest.CaptureFixture[str]) -> None:
    where = setting()
    printed = []
    for decode in (call, speculate):
        with drafts_along(DRAFTS["random_tree"], text_of(where)):
            decode(where, max_new_tokens=30, streamer=TextStreamer(where.words, skip_prompt=skip_prompt))
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(printed[0]) > 10


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_text_iterator_streamer_in_a_thread(seed: int) -> None:
    """Piece by piece, also where a character is made of several tokens."""
    where = setting(seed=seed)
    pieces = []
    for decode in (call, speculate):
        streamer = TextIteratorStreamer(where.words, timeout=30)
        with drafts_along(DRAFTS["random_tree"], text_of(where)):
            thread = in_thread(decode, where, max_new_tokens=30, streamer=streamer)
            pieces.append(list(streamer))
            thread.join()
    assert pieces[0] == pieces[1]
    assert "".join(pieces[0]) == where.words.decode(text_of(where)[: 7 + 30])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the streamer itself needs asyncio.timeout of Python 3.11")
def test_async_text_iterator_streamer() -> None:
    where = setting()

    async def read(decode: Callable[..., Any]) -> list[str]:
        streamer = AsyncTextIteratorStreamer(where.words, timeout=30)
        with drafts_along(DRAFTS["random_tree"], text_of(where)):
            thread = in_thread(decode, where, max_new_tokens=30, streamer=streamer)
            pieces = [piece async for piece in streamer]
            await asyncio.to_thread(thread.join)
        return pieces

    expected, got = asyncio.run(read(call)), asyncio.run(read(speculate))
    assert got == expected
    assert "".join(got) == where.words.decode(text_of(where)[: 7 + 30])


def test_tokens_come_while_the_text_is_written() -> None:
    """Not all at the end: when the target fails in its fourth pass, what the passes before gave has been streamed."""
    where = setting()
    streamer = Recorder()
    with (
        drafts_along(DRAFTS["perfect"], text_of(where)),
        failing_pass(where.model, number=3, error=RuntimeError("broken")),
        pytest.raises(RuntimeError, match="broken"),
    ):
        speculate(where, max_new_tokens=40, streamer=streamer)
    assert list(chain(*streamer.values[1:])) == list(where.text[: 1 + 7])
    assert streamer.ends == 1


@pytest.mark.parametrize("custom_generate", ["microspec", microspec_hf.generate], ids=["name", "callable"])
@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt(), torch.OutOfMemoryError("full")])
def test_end_comes_once_after_an_error(error: BaseException, number: int, custom_generate: Any) -> None:
    where = setting()
    streamer = Recorder()
    with failing_pass(where.model, number, error), pytest.raises(type(error)):
        speculate(where, streamer=streamer, custom_generate=custom_generate)
    assert streamer.ends == 1


def test_end_comes_once_after_a_failing_criterion_or_processor() -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    where = setting()
    for name in ("logits_processor", "stopping_criteria"):
        streamer = Recorder()
        with pytest.raises(RuntimeError, match="broken"):
            speculate(where, streamer=streamer, **{name: [fail]})
        assert streamer.ends == 1


REFUSED: dict[str, dict[str, Any]] = {
    "found by generate": {"num_beams": 3},
    "typo": {"max_nwe_tokens": 3},
    "found at once": {"inputs_embeds": torch.zeros(1, 3, 48)},
    "cache": {"cache_implementation": "quantized"},
}


@pytest.mark.parametrize("case", REFUSED)
def test_end_comes_once_after_a_refusal(case: str) -> None:
    """Whoever reads the stream in another thread is told that nothing comes."""
    where = setting()
    streamer = Recorder()
    with pytest.raises(ValueError, match=r"\w"):
        speculate(where, streamer=streamer, **REFUSED[case])
    assert streamer.ends == 1
