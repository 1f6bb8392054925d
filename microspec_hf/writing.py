"""From prompts to finished texts: stopping, streaming, the batch that shrinks, and what is recorded on the way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from microspec_hf.config import MicroSpecConfig
from microspec_hf.hf import TreeCache
from microspec_hf.loop import NOTHING, Emission, Launched, Record, Text, collect, launch, prefill
from microspec_hf.pace import Pace
from microspec_hf.sessions import Session
from microspec_hf.stats import SpeculationStats
from microspec_hf.stopping import Stops
from microspec_hf.verification import TokenRule


@dataclass
class Progress:
    """One sequence on its way to the caller: the text, its end, and what was recorded of its tokens.

    Args:
        text: what is written, perhaps past its end.
        stops: the stopping criteria.
        streamer: gets each token that is kept.
        length: tokens that are kept so far, the prompt included.
        cache: once it has ended, holds the rows of all its tokens but the last.
    """

    text: Text
    stops: Stops
    streamer: Any
    length: int
    cache: TreeCache | None = None
    logits: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    hidden_states: list[tuple[Tensor, ...]] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def __post_init__(self) -> None:
        self.text.ends = self.ends
        self._asked: list[Tensor] = []  # scores of tokens that the criteria have seen, and that are not taken yet

    @property
    def new_ids(self) -> Tensor:
        return self.text.state.ids[self.text.state.prompt_length : self.length]

    def ends(self, ids: Tensor, token: int, scores: Tensor | None) -> bool:
        """Ask the criteria about the text `[L]` up to its latest token."""
        padding = self.text.rule.padding
        seen = None
        if self.stops.shows_scores and scores is not None:
            self._asked.append(scores)
            seen = (*self.scores, *self._asked)
        return self.stops(ids if padding is None else torch.cat([padding, ids]), token, seen)

    def take(self, emission: Emission) -> bool:
        """Keep the new tokens up to the end of the text; True: it ends."""
        count, ended = self._cut(emission)
        self._asked.clear()
        self.length += count
        if emission.logits is not None and emission.scores is not None:
            self.logits += emission.logits[:count].split(1)
            self.scores += emission.scores[:count].split(1)
        if emission.hidden_states:
            layers = [layer[None] for layer in emission.hidden_states]
            if self.hidden_states:
                self.hidden_states += [tuple(layer[:, i : i + 1] for layer in layers) for i in range(count)]
            else:  # of the whole prompt, for its one token
                self.hidden_states.append(tuple(layers))
        return ended

    def _cut(self, emission: Emission) -> tuple[int, bool]:
        """Offer the new tokens one by one: how many are kept, and whether the text ends with them."""
        if hasattr(self.streamer, "begin_round"):  # beyond transformers' interface: tells drafts from the bonus token
            self.streamer.begin_round(len(emission.tokens))
        for count, token in enumerate(emission.tokens, start=1):
            if self.streamer is not None:
                self.streamer.put(torch.tensor([token]))
            if emission.ended is None:
                scores = None if emission.scores is None else emission.scores[count - 1 : count]
                if self.ends(self.text.state.ids[: self.length + count], token, scores):
                    return count, True
        return len(emission.tokens), bool(emission.ended)

    def has_room_behind_a_round(self) -> bool:
        """Whether the text goes on behind the round that is on its way, as far as its length tells."""
        return self.stops.max_length - self.length > self.text.drafter.tree.num_path_slots

    def finish(self, drops_round: bool) -> None:
        """Read the counters; the text is not written on, and a round behind its end was perhaps begun in vain."""
        seen = self.text.drafter.vocabulary.statistics(drops_round)
        self.stats.new_tokens = self.length - self.text.state.prompt_length
        self.stats.coverage, self.stats.mean_active_vocabulary = seen.coverage, seen.mean_active
        self.stats.rows_gathered, self.stats.evicted = seen.rows_gathered, seen.evicted


def write(
    sessions: Sequence[Session],
    prompts: Sequence[tuple[TokenRule, Tensor]],
    config: MicroSpecConfig,
    stops: Stops,
    streamer: Any,
    record: Record,
    pace: Pace,
) -> list[Progress]:
    """Write all texts side by side; those that end leave the batch."""
    started = time.perf_counter()
    target, rounds = sessions[0].target, sessions[0].rounds
    everyone, active, waiting = [], [], []
    for session, (rule, prompt) in zip(sessions, prompts, strict=True):
        text = Text(session.drafter, rule, session.state)
        progress = Progress(text, stops, streamer, prompt.shape[0])
        emission = prefill(target, text, prompt, session.cache, config.prefill_chunk, record)
        progress.stats = SpeculationStats(num_levels=text.drafter.tree.num_levels, tree=text.drafter.tree.to_dict())
        everyone.append(progress)
        if progress.take(emission):
            progress.cache = session.cache
        else:
            active.append(progress)
            waiting.append(session.cache)
    prefilled = time.perf_counter()
    joint = TreeCache.stack(waiting) if waiting else sessions[0].cache
    # A sampled text must not hang on the clock: plain steps and trees take different random numbers.
    is_paced = config.fallback and not rounds.is_captured and not any(rule.do_sample for rule, _ in prompts)
    begun: list[tuple[bool, Launched]] = []

    def begin() -> None:
        drafts = pace.drafts or not is_paced
        texts = [progress.text for progress in active]
        begun.append((drafts, launch(target, texts, joint, record, drafts, rounds, in_flight=len(begun))))

    while active:
        if not begun:
            begin()
        # The device goes on while the host reads; a round behind the end of a text is dropped unread.
        if rounds.run_ahead and record == NOTHING and active[0].has_room_behind_a_round():
            begin()
        drafts, launched = begun.pop(0)
        emissions = collect(launched, joint, record)
        if is_paced:
            pace.record(sum(len(emission.tokens) for emission in emissions) / len(emissions))
        for progress, emission in zip(active, emissions, strict=True):
            if drafts and progress.stats.num_levels:
                progress.stats.emitted.append(len(emission.tokens))
                progress.stats.draft_seconds += rounds.clock.seconds() if rounds.clock else 0.0
            else:
                progress.stats.plain_steps += 1
        going = [not p.take(emission) for p, emission in zip(active, emissions, strict=True)]
        for row, (progress, goes) in enumerate(zip(active, going, strict=True)):
            if not goes:
                progress.cache = joint if len(everyone) == 1 else joint.text(row)
        if any(going) and not all(going):
            joint.keep([row for row, goes in enumerate(going) if goes])
        active = [progress for progress, goes in zip(active, going, strict=True) if goes]
    for progress in everyone:
        progress.finish(drops_round=bool(begun))
        progress.stats.switches = [asdict(switch) for switch in pace.switches]
        progress.stats.is_captured = rounds.is_captured
        progress.stats.prefill_seconds = prefilled - started
        progress.stats.decode_seconds = time.perf_counter() - prefilled
    return everyone
