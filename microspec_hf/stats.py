"""Counters of a call, with the definitions the field uses (acceptance length: emitted tokens per target pass)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class SpeculationStats:
    """What speculation did in one call of `generate`; the output carries it as `stats`.

    Args:
        new_tokens: tokens returned after the prompt, the first one (from the prefill) included.
        emitted: tokens emitted by each round that drafted, bonus included, before any cut at a stop.
        plain_steps: target passes without a draft, one token each (`MicroSpecConfig.fallback`).
        switches: where drafting gave way to plain steps and came back, each with the token and the measured seconds a
            token of both.
        num_levels: levels of the tree; at most `num_levels + 1` tokens a round.
        coverage: share of emitted tokens that were in the active vocabulary when the tree was drafted.
        mean_active_vocabulary: rows of the LM head that the drafter scored, mean over rounds.
        rows_gathered: rows copied into the packed buffer, over the call.
        evicted: ids that left the active vocabulary, over the call.
        prefill_seconds, decode_seconds: wall time before and after the first token.
        draft_seconds: of the decoding, the time in which trees were drafted, on the device that drafts; 0.0 unless
            `MicroSpecConfig.time_drafts`. In a batch, of all its texts together.
        tree: the tree that was used, as a dict; empty for plain decoding.
        is_captured: whether rounds were replayed from CUDA graphs.
    """

    new_tokens: int = 0
    emitted: list[int] = field(default_factory=list)
    plain_steps: int = 0
    switches: list[dict[str, Any]] = field(default_factory=list)
    num_levels: int = 0
    coverage: float = 1.0
    mean_active_vocabulary: float = 0.0
    rows_gathered: int = 0
    evicted: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    draft_seconds: float = 0.0
    tree: dict[str, int] = field(default_factory=dict)
    is_captured: bool = False

    @property
    def rounds(self) -> int:
        """Target passes that checked a draft."""
        return len(self.emitted)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, bonus included, past a stop included (0.0 without rounds)."""
        return sum(self.emitted) / len(self.emitted) if self.emitted else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of rounds that accepted at least d drafts, for d = 1 .. num_levels."""
        rounds = max(1, len(self.emitted))
        return [sum(n > depth for n in self.emitted) / rounds for depth in range(1, self.num_levels + 1)]

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived figures, JSON-ready."""
        derived = {
            "rounds": self.rounds,
            "acceptance_length": self.acceptance_length,
            "acceptance_by_depth": self.acceptance_by_depth,
        }
        return asdict(self) | derived
