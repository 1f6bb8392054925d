"""Measure how many tokens a target pass yields, by draft vocabulary and task.

    python examples/acceptance.py --target HuggingFaceTB/SmolLM2-135M-Instruct --drafter <folder> \\
        --data <folder> --per-task 10 --vocabularies full,dynamic,static:8192 --static-list ids.json

The data folder holds Spec-Bench and HumanEval (see `microspec_hf.evaluation.prompts`). Under `accelerate
launch` or `torchrun` the processes share the prompts; several processes may share a GPU.

With `--grid` the acceptance length is measured for the trees that `tree="auto"` chooses from instead, with the
dynamic vocabulary and on prompts that were held out of the drafter's training, and the table is written into
the drafter's `config.json`, where `tree="auto"` reads it:

    python examples/acceptance.py --grid --target ... --drafter <folder> --train-prompts prompts.jsonl.gz
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from measuring import RESULTS, Options, Pair, load, option, share, start, write_result
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import HfArgumentParser, PreTrainedTokenizerBase

from microspec_hf import MicroSpecConfig, SpeculationStats
from microspec_hf.autotune import candidate_trees
from microspec_hf.evaluation import (
    Prompt,
    expected_acceptance,
    measure_acceptance,
    prompt_ids,
    summarize,
    task_records,
)
from microspec_hf.training import read_prompts as read_training_prompts
from microspec_hf.training.trainer import held_out


@dataclass
class Arguments(Options):
    """Command-line options."""

    per_task: int | None = option("First prompts of each task.", default=10)
    grid: bool = option("Measure trees, and write the table into the drafter's config.json.", default=False)
    train_prompts: str | None = option("--grid: the prompts the drafter was trained with.", default=None)
    grid_prompts: int = option("--grid: how many held-out prompts.", default=24)


def main(arguments: Arguments) -> None:
    """Measure, and let the first process write the result."""
    state = start()
    pair = load(state, arguments)
    if arguments.grid:
        measure_grid(state, pair, arguments)
    else:
        measure_vocabularies(state, pair, arguments)


def measure_vocabularies(state: PartialState, pair: Pair, arguments: Arguments) -> None:
    """Acceptance by vocabulary and task."""
    configs, prompts = arguments.configurations(), arguments.prompts()
    measured = measure(state, pair, prompts, list(configs.values()), arguments.max_new_tokens)
    if not state.is_main_process:
        return
    by_vocabulary = zip(configs, measured, strict=True)
    records = [record for name, stats in by_vocabulary for record in task_records(name, prompts, stats)]
    for r in records:
        print(
            f"{r['vocabulary']:12} {r['task']:5} acceptance length {r['acceptance_length']:.3f}, "
            f"coverage {r['coverage']:.1%}, active rows {r['mean_active_vocabulary']:.0f}"
        )
    output = Path(arguments.output or RESULTS / f"acceptance_{_short(arguments.target)}.json")
    write_result(output, {"records": records}, command="acceptance", **asdict(arguments))


def measure_grid(state: PartialState, pair: Pair, arguments: Arguments) -> None:
    """Acceptance by depth and nodes, also written into the drafter's configuration."""
    trees = candidate_trees()
    prompts = held_out_prompts(pair.tokenizer, arguments)
    measured = measure(state, pair, prompts, [MicroSpecConfig(tree) for tree in trees], arguments.max_new_tokens)
    if not state.is_main_process:
        return
    by_tree = {(tree.depth, tree.num_nodes): stats for tree, stats in zip(trees, measured, strict=True)}
    table = expected_acceptance(by_tree)
    file = Path(arguments.drafter) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | {"expected_acceptance": table}
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(table))
    records = [{"depth": d, "nodes": n} | summarize(stats) for (d, n), stats in by_tree.items()]
    output = Path(arguments.output or RESULTS / f"grid_{_short(arguments.target)}.json")
    write_result(output, {"records": records}, command="acceptance", **asdict(arguments))


def measure(
    state: PartialState,
    pair: Pair,
    prompts: Sequence[Prompt],
    configs: Sequence[MicroSpecConfig],
    max_new_tokens: int,
) -> list[list[SpeculationStats]]:
    """The counters of the answer to every prompt under each configuration, in the order of the prompts."""
    mine = share(state, prompts)
    with tqdm(total=len(configs) * len(mine), desc="answers", disable=not state.is_main_process) as bar:
        answers = [
            measure_acceptance(
                pair.model, pair.tokenizer, pair.drafter, mine, config, max_new_tokens, lambda: bar.update()
            )
            for config in configs
        ]
    everyone = gather_object([answers])
    return [_in_order([process[i] for process in everyone]) for i in range(len(configs))]


def held_out_prompts(tokenizer: PreTrainedTokenizerBase, arguments: Arguments) -> list[Prompt]:
    """Prompts that the drafter was never trained on, spread evenly over those that its training held out."""
    if arguments.train_prompts is None:
        raise SystemExit("--grid needs --train-prompts, the file of prompts that the drafter was trained with.")
    record = Path(arguments.drafter) / "training.json"
    if not record.exists():
        raise SystemExit("--grid needs the drafter's training.json, which says what its training held out.")
    training = json.loads(record.read_text(encoding="utf-8"))["config"]
    texts = read_training_prompts(arguments.train_prompts, training["languages"])
    is_held_out = held_out(torch.arange(len(texts)), training["heldout"]).tolist()
    prompts = [Prompt(str(i), "training", (text,)) for i, text in enumerate(texts) if is_held_out[i]]
    longest = training["max_prompt_tokens"]
    prompts = [prompt for prompt in prompts if prompt_ids(tokenizer, prompt).shape[1] <= longest]
    if not prompts:
        raise SystemExit("--train-prompts has no prompt that the drafter's training held out.")
    return prompts[:: max(1, len(prompts) // arguments.grid_prompts)][: arguments.grid_prompts]


def _in_order(shares: Sequence[Sequence[SpeculationStats]]) -> list[SpeculationStats]:
    """Undo `share`: of n processes, process r had the prompts r, r + n, r + 2n and so on."""
    total = sum(map(len, shares))
    return [shares[i % len(shares)][i // len(shares)] for i in range(total)]


def _short(target: str) -> str:
    """`smollm2` of `HuggingFaceTB/SmolLM2-135M-Instruct`."""
    return Path(target).name.split("-")[0].lower()


if __name__ == "__main__":
    main(*HfArgumentParser(Arguments).parse_args_into_dataclasses())  # type: ignore[arg-type]
