"""From prompts to finished texts: stopping, streaming, the batch that shrinks, and what is recorded on the way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from microspec_hf.candidate_generator import MicroSpecCandidateGenerator
from microspec_hf.config import MicroSpecConfig
from microspec_hf.engine import Rounds
from microspec_hf.hf import Target, TreeCache
from microspec_hf.loop import Emission, Record, Text, prefill, step
from microspec_hf.pace import Pace
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
        shows_scores: whether the criteria are given the scores so far, as `generate` gives them with `output_scores`.
    """

    text: Text
    stops: Stops
    streamer: Any
    length: int
    shows_scores: bool
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
        if self.shows_scores and scores is not None:
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

    def finish(self) -> None:
        """Read the counters; the text is not written on."""
        seen = self.text.drafter.vocabulary.statistics()
        self.stats.new_tokens = self.length - self.text.state.prompt_length
        self.stats.coverage, self.stats.mean_active_vocabulary = seen.coverage, seen.mean_active
        self.stats.rows_gathered, self.stats.evicted = seen.rows_gathered, seen.evicted


def write(
    target: Target,
    drafters: Sequence[tuple[MicroSpecCandidateGenerator, TokenRule, Tensor]],
    caches: Sequence[TreeCache],
    config: MicroSpecConfig,
    stops: Stops,
    streamer: Any,
    record: Record,
    shows_scores: bool,
    pace: Pace,
    rounds: Rounds,
) -> tuple[list[Progress], TreeCache]:
    """Write all texts side by side; those that end leave the batch. Also the cache of those that ended last."""
    started = time.perf_counter()
    everyone, active, waiting = [], [], []
    for (drafter, rule, prompt), cache in zip(drafters, caches, strict=True):
        text, emission = prefill(target, drafter, prompt, rule, config.prefill_chunk, record, cache)
        progress = Progress(text, stops, streamer, prompt.shape[0], shows_scores)
        progress.stats = SpeculationStats(num_levels=drafter.tree.num_levels, tree=vars(drafter.tree).copy())
        everyone.append(progress)
        if not progress.take(emission):
            active.append(progress)
            waiting.append(cache)
    prefilled = time.perf_counter()
    joint = TreeCache.stack(waiting) if waiting else caches[0]
    # A sampled text must not hang on the clock: plain steps and trees take different random numbers.
    is_paced = config.fallback and not any(rule.do_sample for _, rule, _ in drafters)
    while active:
        drafts = pace.drafts or not is_paced
        emissions = step(target, [progress.text for progress in active], joint, record, drafts, rounds)
        if is_paced:
            pace.record(sum(len(emission.tokens) for emission in emissions) / len(emissions))
        for progress, emission in zip(active, emissions, strict=True):
            if drafts:
                progress.stats.emitted.append(len(emission.tokens))
            else:
                progress.stats.plain_steps += 1
        going = [not p.take(emission) for p, emission in zip(active, emissions, strict=True)]
        if any(going) and not all(going):
            joint.keep([row for row, goes in enumerate(going) if goes])
        active = [progress for progress, goes in zip(active, going, strict=True) if goes]
    for progress in everyone:
        progress.finish()
        progress.stats.switches = [asdict(switch) for switch in pace.switches]
        progress.stats.prefill_seconds = prefilled - started
        progress.stats.decode_seconds = time.perf_counter() - prefilled
    return everyone, joint
