"""Make the list of a static draft vocabulary: ids by how often they occur in one of three sources.

    # what the target says in a drafter's training answers, without their prompts (VocabTrim)
    python examples/static_list.py --target HuggingFaceTB/SmolLM2-135M-Instruct --answers my-drafter.work/answers \
        --output emitted.json
    # what the drafter proposes along those answers (VocabTrim, calibrated on the drafter)
    python examples/static_list.py --target ... --answers my-drafter.work/answers --drafter my-drafter \
        --output proposed.json
    # a text corpus (FR-Spec)
    python examples/static_list.py --target ... --corpus texts.jsonl.gz --output corpus.json

A corpus is a text file, or JSON lines with a `text` or `prompt` each; either may be gzip. How many ids are kept is a
choice: so many (`--size`), as many as make up a share of all tokens (`--coverage 0.99`), or those that occur so often
(`--min_count 5`). A short source knows few ids: `--fill corpus.json` puts those of another list behind them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import option
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from microspec_hf.eagle import check_pair, load_drafter
from microspec_hf.hf import Target
from microspec_hf.training import load_responses
from microspec_hf.training.proposals import proposals
from microspec_hf.vocabulary import count_token_ids, load_token_ids, save_token_ids


@dataclass
class Arguments:
    """Command-line options."""

    target: str = option("Hub id or folder of the target.")
    output: str = option("The list: .json, or .pt as FR-Spec writes it.")
    answers: str | None = option("Folder of answers that `microspec train` left beside the drafter.", default=None)
    drafter: str | None = option("With --answers: count what this EAGLE head proposes along them.", default=None)
    corpus: str | None = option("Text to count: plain or JSON lines, or gzip of either.", default=None)
    size: int | None = option("Length of the list (default: every token that occurs).", default=None)
    coverage: float = option("Share of all tokens that the list makes up.", default=1.0)
    min_count: int = option("How often a token has to occur.", default=1)
    fill: str | None = option("List whose ids follow those that were counted.", default=None)
    max_answers: int | None = option("Read so many answers only (default: all).", default=None)


def main(arguments: Arguments) -> None:
    """Count, and write the list."""
    if (arguments.answers is None) == (arguments.corpus is None):
        raise SystemExit("Name what to count: either --answers or --corpus.")
    if arguments.corpus is not None and arguments.drafter is not None:
        raise SystemExit("--drafter counts along --answers; a --corpus is counted as it is.")
    vocab_size = AutoConfig.from_pretrained(arguments.target).get_text_config().vocab_size
    behind = () if arguments.fill is None else load_token_ids(arguments.fill)
    counted = count_token_ids(
        sequences(arguments), vocab_size, coverage=arguments.coverage, min_count=arguments.min_count
    )
    ids = list(dict.fromkeys([*counted, *behind]))[: arguments.size]
    save_token_ids(arguments.output, ids)
    print(f"Wrote {len(ids)} token ids, most frequent first, to {arguments.output}; {len(counted)} were counted.")


def sequences(arguments: Arguments) -> Iterator[Tensor | list[int]]:
    """The ids to count."""
    if arguments.corpus is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.target)
        for text in texts(Path(arguments.corpus)):
            yield tokenizer(text, add_special_tokens=False)["input_ids"]
        return
    assert arguments.answers is not None
    answers = first(load_responses(Path(arguments.answers)), arguments.max_answers)
    if arguments.drafter is None:
        yield from answers_of(answers)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.bfloat16)
    drafter = load_drafter(arguments.drafter, dtype=torch.bfloat16, device=device)
    check_pair(drafter, model.config, str(model.config._name_or_path))
    yield from proposals(Target(model.to(device).eval()), drafter, answers)


def texts(path: Path) -> Iterator[str]:
    """The texts of a corpus; a line that cannot be read is named."""
    opener = gzip.open if path.suffix == ".gz" else open
    is_json = path.name.removesuffix(".gz").endswith((".jsonl", ".json"))
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not is_json:
                yield line
                continue
            try:
                row = json.loads(line)
                yield str(row["text"] if "text" in row else row["prompt"])
            except (json.JSONDecodeError, TypeError, KeyError) as error:
                raise SystemExit(
                    f'{path}, line {number}: expected a JSON object with a "text" or a "prompt", got {error}.'
                ) from error


def first(answers: dict[str, Tensor], count: int | None) -> dict[str, Tensor]:
    """So many answers, the first ones; None: all."""
    if count is None:
        return answers
    end = int(answers["length"][:count].sum())
    return {name: values[:end] if name == "ids" else values[:count] for name, values in answers.items()}


def answers_of(answers: dict[str, Tensor]) -> Iterator[Tensor]:
    """The ids of each answer, without its prompt."""
    ends = answers["length"].cumsum(0)
    starts = ends - answers["length"] + answers["prompt"]
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        yield answers["ids"][start:end]


if __name__ == "__main__":
    main(*HfArgumentParser(Arguments).parse_args_into_dataclasses())  # type: ignore[arg-type]
