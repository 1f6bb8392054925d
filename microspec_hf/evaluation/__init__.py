"""Measuring a pair of target and drafter: how much is accepted, and whether the text is the target's own.

Works with the public API only, in one process or in several, on any device. `examples/acceptance.py` and
`examples/check_lossless.py` are the commands. Whole evaluations, arm against arm, are made by `examples/evaluate.py`
over `arms`, `answers` and `runner`, and read by `results`, `analyses`, `report` and `comparison`.
"""

from microspec_hf.evaluation.acceptance import (
    OVERALL,
    expected_acceptance,
    measure_acceptance,
    parse_vocabulary,
    task_records,
)
from microspec_hf.evaluation.lossless import Difference, LosslessReport, PromptCheck, check_lossless
from microspec_hf.evaluation.metrics import summarize
from microspec_hf.evaluation.prompts import Prompt, prompt_ids, read_prompts, select_prompts
from microspec_hf.evaluation.provenance import provenance

__all__ = [
    "OVERALL",
    "Difference",
    "LosslessReport",
    "Prompt",
    "PromptCheck",
    "check_lossless",
    "expected_acceptance",
    "measure_acceptance",
    "parse_vocabulary",
    "prompt_ids",
    "provenance",
    "read_prompts",
    "select_prompts",
    "summarize",
    "task_records",
]
