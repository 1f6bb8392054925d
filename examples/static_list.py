"""Make the list of a static draft vocabulary: what the target says most in a drafter's training answers.

    python examples/static_list.py --answers my-drafter.work/answers --vocab-size 49152 --output ids.json

Answers are counted and prompts are not (VocabTrim). How many ids are kept is a choice: so many (`--size`), as many as
make up a share of all tokens (`--coverage 0.99`), or those that occur so often (`--min_count 5`). FR-Spec counts a
corpus instead: see `microspec_hf.vocabulary.count_token_ids`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from measuring import option
from torch import Tensor
from transformers import HfArgumentParser

from microspec_hf.training import load_responses
from microspec_hf.vocabulary import count_token_ids, save_token_ids


@dataclass
class Arguments:
    """Command-line options."""

    answers: str = option("Folder of answers that `microspec train` left beside the drafter.")
    vocab_size: int = option("Rows of the target's LM head.")
    output: str = option("The list: .json, or .pt as FR-Spec writes it.")
    size: int | None = option("Length of the list (default: every token that occurs).", default=None)
    coverage: float = option("Share of all tokens that the list makes up.", default=1.0)
    min_count: int = option("How often a token has to occur.", default=1)


def main(arguments: Arguments) -> None:
    """Count, and write the list."""
    answers = answers_of(load_responses(Path(arguments.answers)))
    ids = count_token_ids(
        answers, arguments.vocab_size, arguments.size, coverage=arguments.coverage, min_count=arguments.min_count
    )
    save_token_ids(arguments.output, ids)
    print(f"Wrote {len(ids)} token ids, most frequent first, to {arguments.output}")


def answers_of(responses: dict[str, Tensor]) -> Iterator[Tensor]:
    """The ids of each answer, without its prompt."""
    ends = responses["length"].cumsum(0)
    starts = ends - responses["length"] + responses["prompt"]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        yield responses["ids"][start:end]


if __name__ == "__main__":
    main(*HfArgumentParser(Arguments).parse_args_into_dataclasses())  # type: ignore[arg-type]
