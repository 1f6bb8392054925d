"""Text on the terminal as it comes, with the tokens that were accepted drafts in colour."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from microspec_hf.cli.console import ACCEPTED


class AcceptedTextStreamer(BaseStreamer):
    """A streamer that shows what speculation gave.

    The decoding loop calls `begin_round` before it puts the tokens of a round; all but the last of them were
    drafted and accepted. Without such calls, as in plain `generate`, every token is the target's own.

    Args:
        console: where to print.
        tokenizer: of the target.
        style: of the target's own tokens.
    """

    def __init__(self, console: Console, tokenizer: PreTrainedTokenizerBase, style: str = ""):
        self._console = console
        self._tokenizer = tokenizer
        self._style = style
        self._prompt_is_next = True
        self._drafts_left = 0
        self._line: list[int] = []  # ids decoded together, so that spaces and multi-token characters come out right
        self._printed = 0

    def begin_round(self, num_emitted: int) -> None:
        """The next `num_emitted` tokens come from one pass of the target."""
        self._drafts_left = num_emitted - 1

    def put(self, value: Tensor) -> None:
        """The prompt first, which is not shown; then new tokens, int64 `[n]`."""
        if self._prompt_is_next:
            self._prompt_is_next = False
            return
        for token in value.flatten().tolist():
            accepted = self._drafts_left > 0
            self._drafts_left -= accepted
            self._line.append(token)
            self._show(ACCEPTED if accepted else self._style)

    def end(self) -> None:
        """Print what was held back, and end the line."""
        self._show(self._style, hold=False)
        self._console.print()

    def _show(self, style: str, hold: bool = True) -> None:
        text = str(self._tokenizer.decode(self._line, skip_special_tokens=True))
        if hold and text.endswith("�"):
            return  # a character whose other bytes are still to come
        self._console.print(Text(text[self._printed :], style), end="", soft_wrap=True)
        self._printed = len(text)
        if text.endswith("\n"):
            self._line, self._printed = [], 0
