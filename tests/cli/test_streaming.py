from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from microspec_hf import EagleHead
from microspec_hf.cli.streaming import AcceptedTextStreamer
from tests import tiny
from tests.cli.conftest import PairFolders, word_tokenizer


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, so that a character of several bytes takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def recorded(colour: bool = False) -> Console:
    options = {"force_terminal": True, "color_system": "standard"} if colour else {}
    return Console(file=io.StringIO(), width=20, **options)


def text_of(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


def stream(streamer: AcceptedTextStreamer, rounds: list[list[int]]) -> None:
    streamer.put(torch.tensor([[0, 0, 0]]))
    for tokens in rounds:
        streamer.begin_round(len(tokens))
        for token in tokens:
            streamer.put(torch.tensor([token]))
    streamer.end()


@pytest.mark.parametrize("text", ["plain words", "two\nlines\n\n and a third", "naïve café ☕ 日本語", "tail \n"])
def test_prints_the_text_whole_without_the_prompt_and_without_wrapping(text: str) -> None:
    tokenizer, console = bytes_tokenizer(), recorded()
    stream(AcceptedTextStreamer(console, tokenizer), [[i] for i in tokenizer(text)["input_ids"]])
    assert text_of(console) == text + "\n"


def test_nothing_half_a_character_is_shown() -> None:
    tokenizer, console = bytes_tokenizer(), recorded()
    streamer = AcceptedTextStreamer(console, tokenizer)
    streamer.put(torch.tensor([[0]]))
    first, *rest = tokenizer("é")["input_ids"]
    streamer.put(torch.tensor([first]))
    assert text_of(console) == ""
    streamer.put(torch.tensor(rest))
    assert text_of(console) == "é"


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    tokenizer, console = bytes_tokenizer(), recorded()
    stream(AcceptedTextStreamer(console, tokenizer), [[tokenizer("é")["input_ids"][0]]])
    assert text_of(console) == "�\n"


def test_all_but_the_last_token_of_a_round_are_in_colour() -> None:
    console = recorded(colour=True)
    stream(AcceptedTextStreamer(console, word_tokenizer()), [[1], [2, 3, 4], [5]])
    green, off = "\x1b[1;32m", "\x1b[0m"
    assert text_of(console) == f"w1{green} w2{off}{green} w3{off} w4 w5\n"


def test_a_round_cut_at_a_stop_leaves_no_colour_to_the_next() -> None:
    console = recorded(colour=True)
    streamer = AcceptedTextStreamer(console, word_tokenizer())
    streamer.put(torch.tensor([[0]]))
    streamer.begin_round(4)
    streamer.put(torch.tensor([1]))
    streamer.begin_round(1)
    streamer.put(torch.tensor([2]))
    assert text_of(console) == "\x1b[1;32mw1\x1b[0m w2"


def test_the_decoding_loop_announces_every_round(pair_folders: PairFolders) -> None:
    class Rounds(AcceptedTextStreamer):
        announced: list[int]
        put_since: list[int]

        def begin_round(self, num_emitted: int) -> None:
            self.announced.append(num_emitted)
            self.put_since.append(0)

        def put(self, value: torch.Tensor) -> None:
            if self.announced:
                self.put_since[-1] += 1

    rounds = Rounds(recorded(), word_tokenizer())
    rounds.announced, rounds.put_since = [], []
    target = tiny.tiny_llama()
    output = target.generate(
        torch.tensor([[3, 5, 8]]),
        max_new_tokens=10,
        do_sample=False,
        streamer=rounds,
        custom_generate="microspec",
        drafter=EagleHead.from_pretrained(pair_folders.drafter).eval(),
        return_dict_in_generate=True,
    )
    assert rounds.announced == [1, *output.stats[0].emitted]  # the first token comes from the prefill
    assert rounds.put_since[:-1] == rounds.announced[:-1]  # the last round may be cut at the limit
    assert sum(rounds.put_since) == 10


def test_markup_in_a_text_is_not_markup() -> None:
    tokenizer, console = bytes_tokenizer(), recorded(colour=True)
    stream(AcceptedTextStreamer(console, tokenizer), [[i] for i in tokenizer("[red]x[/red]")["input_ids"]])
    assert text_of(console) == "[red]x[/red]\n"
