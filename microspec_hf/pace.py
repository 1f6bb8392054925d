"""When drafting does not pay: plain steps inside a call, and back, decided by what both were measured to cost.

A round costs as much as one to three plain steps, by machine and tree, and yields as many tokens as the drafter guesses
right. On text that it cannot guess, plain decoding is faster. The tokens are the same either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

WINDOW = 8
"""Rounds over which drafting is judged."""
MARGIN = 1.05
"""How much faster plain steps must be, so that noise switches nothing."""
PROBES = 2
"""Plain steps that measure what one costs."""
SURELY_PAYS = 3.0
"""Plain steps that hardly any round costs."""
PATIENCE = 16
"""Plain steps before drafting is tried again; doubled each time that it fails again."""
MOST_PATIENCE = 256


@dataclass(frozen=True)
class Switch:
    """A change between drafting and plain steps.

    Args:
        token: new tokens of the call so far.
        to: `"plain"` or `"draft"`.
        draft_seconds, plain_seconds: what a token was measured to cost either way.
    """

    token: int
    to: str
    draft_seconds: float
    plain_seconds: float


@dataclass
class Pace:
    """Decides before each step whether it drafts.

    Args:
        clock: gives seconds.
        surely_pays: what a round costs in plain steps, as far as it is known. As long as it yields clearly more tokens,
            nothing is measured.
        switches: what was decided, in order.
        plain_steps: steps that did not draft, probes included.
    """

    clock: Callable[[], float] = time.perf_counter
    switches: list[Switch] = field(default_factory=list)
    plain_steps: int = 0
    surely_pays: float = SURELY_PAYS

    def __post_init__(self) -> None:
        self._rounds: list[tuple[float, float]] = []  # seconds and tokens of the latest rounds
        self._plain_seconds = float("inf")  # of one step: the fastest, other work only ever adds time
        self._probed = False
        self._rest = 0
        self._patience = PATIENCE
        self._tokens = 0.0
        self._since: float | None = None
        self.drafts = True

    def record(self, tokens: float) -> None:
        """A step is done that yielded so many tokens (of each text, on average); decides about the next one."""
        now, since = self.clock(), self._since
        self._since = now
        self._tokens += tokens
        if since is None:  # the first round also warms up
            return
        if not self.drafts:
            self.plain_steps += 1
            self._plain_seconds = min(self._plain_seconds, now - since)
            self._rest -= 1
            if self._rest <= 0:
                self._resume()
            return
        self._rounds = [*self._rounds, (now - since, tokens)][-WINDOW:]
        if len(self._rounds) == WINDOW:
            self._judge()

    def _judge(self) -> None:
        seconds, tokens = (sum(column) for column in zip(*self._rounds, strict=True))
        if tokens >= MARGIN * self.surely_pays * WINDOW:
            return
        if not self._probed:
            self._probed, self._rest, self.drafts = True, PROBES, False
        elif seconds / tokens > MARGIN * self._plain_seconds:
            self._note("plain", seconds / tokens)
            self._rest, self.drafts = self._patience, False
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        else:
            self._patience = PATIENCE

    def _resume(self) -> None:
        self.drafts = True
        if self.switches and self.switches[-1].to == "plain":
            self._note("draft", self.switches[-1].draft_seconds)
            self._rounds.clear()

    def _note(self, to: str, draft_seconds: float) -> None:
        self.switches.append(Switch(round(self._tokens), to, draft_seconds, self._plain_seconds))
