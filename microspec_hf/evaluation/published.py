"""Figures that the papers print, to be set beside ours: other hardware, other weights."""

from __future__ import annotations

from dataclasses import dataclass

MICROSPEC = "MicroSpec Table 1 (Llama-3.1-8B, H20Z, greedy, mean of Spec-Bench's tasks and HumanEval)"
FR_SPEC = "FR-Spec Tables 1 and 2 (Llama-3-8B, A800, greedy, mean of the same tasks)"


@dataclass(frozen=True)
class Published:
    """One row of a published table.

    Args:
        arm: our name of the arm.
        acceptance_length: tokens a target pass, the bonus token included.
        tokens_per_second: on the paper's hardware.
        full_acceptance_length: of EAGLE-2 with the whole LM head in the same table.
        source: which table.
    """

    arm: str
    acceptance_length: float
    tokens_per_second: float
    full_acceptance_length: float
    source: str

    @property
    def relative_acceptance(self) -> float:
        """Share of the whole LM head's acceptance length."""
        return self.acceptance_length / self.full_acceptance_length


PUBLISHED = (
    Published("plain", 1.0, 172.6, 3.80, MICROSPEC),
    Published("eagle2", 3.80, 336.9, 3.80, MICROSPEC),
    Published("fr-spec-32k", 3.62, 369.7, 3.80, MICROSPEC),
    Published("coral-32k", 3.92, 359.9, 3.80, MICROSPEC),
    Published("dynaspec-27k", 3.78, 378.1, 3.80, MICROSPEC),
    Published("microspec", 3.59, 392.7, 3.80, MICROSPEC),
    Published("plain", 1.0, 89.11, 3.89, FR_SPEC),
    Published("eagle2", 3.89, 180.99, 3.89, FR_SPEC),
    Published("fr-spec-32k", 3.63, 201.87, 3.89, FR_SPEC),
    Published("fr-spec-16k", 3.40, 196.69, 3.89, FR_SPEC),
    Published("fr-spec-8k", 3.13, 185.98, 3.89, FR_SPEC),
)

TABLE_1 = {row.arm: row for row in PUBLISHED if row.source == MICROSPEC}
"""MicroSpec's own table, by arm."""

DRAFT_TIME = {"eagle2": -0.516, "fr-spec-32k": -0.203}
"""How much less time MicroSpec drafts than these arms (MicroSpec, abstract and section 5)."""

NOTES = (
    "CORAL's and DynaSpec's rows in MicroSpec's table are figures that its authors took over or computed; CORAL's "
    "drafter was trained otherwise, which is why its acceptance length is above the whole head's.",
    "The tokens a second of MicroSpec's table were in part read from a public summary of it, not from the paper.",
    "Acceptance lengths of two targets cannot be compared, nor can tokens a second of two machines. What can be "
    "compared is the share of the whole head's acceptance length, and the order of the arms.",
)
