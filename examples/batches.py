"""Measure throughput by batch size, plainly and with speculation, on left-padded batches of real prompts.

    python examples/batches.py --target HuggingFaceTB/SmolLM2-135M-Instruct --drafter <folder> --data <folder> \\
        --sizes 1,2,4,8 --vocabularies dynamic

Both ways answer the same batches in turn, after one answer each that is not timed. The rows of a batch are also
compared with plain `generate`'s on the same batch. With `--nodes 0` the tree is chosen by `tree="auto"`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, Options, Pair, load, option, start, write_result
from torch import Tensor
from transformers import HfArgumentParser

from microspec_hf import MicroSpecConfig
from microspec_hf.evaluation import Prompt, prompt_ids
from microspec_hf.evaluation.decoding import GREEDY


@dataclass
class Arguments(Options):
    """Command-line options."""

    per_task: int | None = option("First prompts of each task.", default=2)
    vocabularies: str = option("full, dynamic, static:SIZE; commas between.", default="dynamic")
    max_new_tokens: int = option("Length limit of an answer, in tokens.", default=48)
    sizes: str = option("Batch sizes, with commas between.", default="1,2,4,8")
    repeats: int = option("Timed answers to each batch, both ways; medians count.", default=3)
    nodes: int = option('Nodes of the tree, root included; 0: tree="auto".', default=0)


def main(arguments: Arguments) -> None:
    """Measure, and write the result."""
    pair = load(start(), arguments)
    prompts = arguments.prompts()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    auto = arguments.nodes == 0
    shown = replace(arguments, nodes=60) if auto else arguments
    records = []
    for name, config in shown.configurations().items():
        config = replace(config, tree="auto") if auto else config
        for size in sizes:
            record = {"vocabulary": name, "batch": size} | measure(pair, config, prompts, size, arguments)
            records.append(record)
            print(
                f"{name:12} batch {size}: plain {record['plain_tokens_per_second']:.1f} tok/s, "
                f"MicroSpec {record['tokens_per_second']:.1f} tok/s ({record['speedup']:.2f}x), "
                f"{record['equal_rows']} of {record['rows']} rows equal"
            )
    output = Path(arguments.output or RESULTS / f"batches_{Path(arguments.target).name.split('-')[0].lower()}.json")
    write_result(output, {"records": records}, command="batches", **asdict(arguments))


def measure(
    pair: Pair, config: MicroSpecConfig, prompts: Sequence[Prompt], size: int, arguments: Arguments
) -> dict[str, Any]:
    """Medians over the repeats, summed over the batches; tokens are those up to each row's end."""
    ids = [prompt_ids(pair.tokenizer, prompt)[0] for prompt in prompts]
    batches = [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]
    if not batches:
        raise SystemExit(f"A batch of {size} needs as many prompts, got {len(ids)}. Raise --per-task.")
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "microspec": {"custom_generate": "microspec", "drafter": pair.drafter, "microspec": config},
    }
    seconds, tokens, equal, stats = dict.fromkeys(ways, 0.0), 0, 0, []
    for batch in batches:
        times: dict[str, list[float]] = {way: [] for way in ways}
        for repeat in range(arguments.repeats + 1):
            outputs = {}
            for way, speculation in ways.items():
                started = time.perf_counter()
                outputs[way] = generate(pair, batch, arguments.max_new_tokens, **speculation)
                if repeat > 0:  # the first answers warm up
                    times[way].append(time.perf_counter() - started)
        for way in ways:
            seconds[way] += statistics.median(times[way])
        plain, ours = (outputs[way].sequences for way in ways)
        stats += outputs["microspec"].stats
        tokens += sum(row.new_tokens for row in outputs["microspec"].stats)
        equal += sum(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    return {
        "rows": size * len(batches),
        "equal_rows": equal,
        "new_tokens": tokens,
        "plain_tokens_per_second": tokens / seconds["plain"],
        "tokens_per_second": tokens / seconds["microspec"],
        "speedup": seconds["plain"] / seconds["microspec"],
        "tree": stats[0].tree,
        "plain_steps": sum(row.plain_steps for row in stats),
    }


def generate(pair: Pair, batch: Sequence[Tensor], max_new_tokens: int, **speculation: Any) -> Any:
    """Greedy answers to a left-padded batch; returns when the device is done."""
    longest = max(prompt.shape[0] for prompt in batch)
    model: Any = pair.model
    pad = model.generation_config.pad_token_id or 0
    ids = torch.stack([torch.nn.functional.pad(p, (longest - p.shape[0], 0), value=pad) for p in batch])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(p), (longest - p.shape[0], 0)) for p in batch])
    output = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max_new_tokens,
        pad_token_id=pad,
        return_dict_in_generate=True,
        **GREEDY,
        **speculation,
    )
    output.sequences.cpu()  # waits
    return output


if __name__ == "__main__":
    main(*HfArgumentParser(Arguments).parse_args_into_dataclasses())  # type: ignore[arg-type]
