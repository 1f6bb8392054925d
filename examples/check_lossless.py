"""Check that the text equals plain `generate()`, on all prompts of Spec-Bench and HumanEval.

    python examples/check_lossless.py --target HuggingFaceTB/SmolLM2-135M-Instruct --drafter <folder> \\
        --data <folder> --vocabularies full,static:8192,dynamic --static-list ids.json

An interrupted run goes on where it stopped: finished prompts are kept in a file beside the result until the
result is written. Under `accelerate launch` or `torchrun` the processes share the prompts. Exit code 1: a
text differs by more than rounding explains. `microspec check` does the same for one vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from measuring import RESULTS, Options, load, option, share, start, write_result
from transformers import HfArgumentParser

from microspec_hf.evaluation import LosslessReport, Prompt, check_lossless


@dataclass
class Arguments(Options):
    """Command-line options."""

    max_new_tokens: int = option("Length limit of a text, in tokens.", default=64)
    vocabularies: str = option("full, dynamic, static:SIZE; commas between.", default="full,dynamic")
    seconds: float | None = option("Begin no further prompt after so long; a rerun goes on.", default=None)
    journal: str | None = option("File of finished prompts (default: beside the result).", default=None)


def main(arguments: Arguments) -> int:
    """Check, and write the result when all prompts are done: the exit code."""
    state = start()
    output = Path(arguments.output or RESULTS / f"check_{arguments.dtype}.json")
    journal = Path(arguments.journal or output.with_suffix(".unfinished.jsonl"))
    prompts = arguments.prompts()
    pair = load(state, arguments)

    def check(some: Sequence[Prompt], seconds: float | None) -> LosslessReport:
        return check_lossless(
            *pair,
            some,
            arguments.configurations(),
            arguments.max_new_tokens,
            journal=journal,
            progress=state.is_main_process,
            seconds=seconds,
        )

    check(share(state, prompts), arguments.seconds)
    state.wait_for_everyone()
    if not state.is_main_process:
        return 0
    report = check(prompts, seconds=0.0)  # reads what all processes have finished, and computes nothing
    print(f"{report.num_prompts} of {len(prompts)} prompts: {report.verdict}")
    if report.num_prompts == len(prompts):
        write_result(output, report.to_dict(), command="check_lossless", **asdict(arguments))
        journal.unlink()
    return int(report.num_faults > 0)


if __name__ == "__main__":
    sys.exit(main(*HfArgumentParser(Arguments).parse_args_into_dataclasses()))  # type: ignore[arg-type]
