"""`microspec demo`: a real model answers real prompts twice, plainly and with MicroSpec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch import Tensor

from microspec_hf import MicroSpecConfig
from microspec_hf.cli import options
from microspec_hf.cli.compare import (
    Comparison,
    answer_plainly,
    answer_with_microspec,
    compare,
    record,
    summary,
)
from microspec_hf.cli.console import ACCEPTED, check_json_file, open_console, write_json
from microspec_hf.cli.pair import Pair, load_pair
from microspec_hf.cli.streaming import AcceptedTextStreamer
from microspec_hf.conversations import user
from microspec_hf.evaluation import Prompt, provenance, read_prompts

PROMPTS = Path(__file__).with_name("demo_prompts.jsonl")


def demo(
    model: options.Model = None,
    drafter: options.Drafter = "auto",
    vocabulary: options.Vocabulary = "dynamic",
    static_list: options.StaticList = None,
    tree: options.Tree = None,
    max_new_tokens: options.MaxNewTokens = 48,
    repeats: Annotated[int, typer.Option(min=1, help="Timed answers to each prompt, both ways; medians count.")] = 3,
    dtype: options.Dtype = "float32",
    device: options.Device = None,
    json: options.JsonFile = None,
) -> None:
    """Watch a real model answer seven prompts plainly and with MicroSpec, then see both timed.

    Every prompt is first answered once each way for you to read, which also warms both up. Then plain
    generate() and MicroSpec answer in turn, without printing, and the medians are compared. Accepted drafts
    are green.
    """
    check_json_file(json)
    console = open_console(json)
    where = options.default_device(device)
    config = options.speculation(vocabulary, static_list, tree, where)
    pair = load_pair(model, drafter, dtype, where, console)
    prompts = read_prompts(PROMPTS)
    inputs = [pair.chat_inputs([user(prompt.turns[0])]) for prompt in prompts]

    _show(console, pair, config, prompts, inputs, max_new_tokens)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("Timing both, in turn", total=2 * repeats * len(prompts))
        comparisons = compare(
            pair.model, pair.drafter, config, inputs, max_new_tokens, repeats, lambda: progress.advance(task)
        )
    figures = summary(comparisons)
    settings = {
        "model": pair.name,
        "drafter": drafter if drafter == "auto" else Path(drafter).name,
        "vocabulary": vocabulary,
        "dtype": str(pair.model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
    }
    origin = provenance(command="demo", device=where, tree_option=tree or "default", **settings)
    title = f"{pair.name}, {settings['dtype']}, {origin['device']}"
    title += f", threads: {settings['threads']}" if where == "cpu" else ""
    _print_figures(console, title, pair, prompts, comparisons, figures | settings)
    rows = [{"id": p.id, "task": p.task} | record(c) for p, c in zip(prompts, comparisons, strict=True)]
    write_json(json, figures | settings | {"prompts": rows, "provenance": origin})


def _show(
    console: Console,
    pair: Pair,
    config: MicroSpecConfig,
    prompts: Sequence[Prompt],
    inputs: Sequence[Mapping[str, Tensor]],
    max_new_tokens: int,
) -> None:
    """Answer every prompt once each way on the screen; also the warm-up."""
    with console.status("Choosing the draft tree" if config.tree == "auto" else "Warming up"):
        answer_with_microspec(pair.model, pair.drafter, config, inputs[0], max_new_tokens=8)
    for prompt, prompt_inputs in zip(prompts, inputs, strict=True):
        console.rule(style="dim")
        console.print(Text(prompt.turns[0], style="bold"))
        console.print("plain", style="dim")
        streamer = AcceptedTextStreamer(console, pair.tokenizer, style="dim")
        answer_plainly(pair.model, prompt_inputs, max_new_tokens, streamer)
        console.print(f"MicroSpec [{ACCEPTED}](accepted drafts)[/]", style="dim")
        streamer = AcceptedTextStreamer(console, pair.tokenizer)
        answer_with_microspec(pair.model, pair.drafter, config, prompt_inputs, max_new_tokens, streamer)


def _print_figures(
    console: Console,
    title: str,
    pair: Pair,
    prompts: Sequence[Prompt],
    comparisons: Sequence[Comparison],
    figures: dict[str, Any],
) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("prompt")
    for name in ("plain tok/s", "MicroSpec tok/s", "speed-up", "tokens a pass", "same text"):
        table.add_column(name, justify="right")
    rows = [(prompt.id, record(comparison)) for prompt, comparison in zip(prompts, comparisons, strict=True)]
    for name, row in [*rows, ("all", figures)]:
        table.add_row(
            name,
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['acceptance_length']:.2f}",
            "[green]yes[/]" if row["identical"] else "[red]no[/]",
            style="bold" if name == "all" else None,
            end_section=name == prompts[-1].id,
        )
    console.print(table)
    tree = figures["tree"]
    console.print(
        f"The drafter scored {figures['mean_active_vocabulary']:.0f} of {pair.model.config.vocab_size} "
        f"tokens a round; {figures['coverage']:.1%} of the text was among them.\n"
        f"Tree: depth {tree['depth']}, top-k {tree['top_k']}, {tree['num_nodes']} nodes. "
        f"Medians of {figures['repeats']}, prefill included."
    )
    if not figures["identical"]:
        console.print("[red]The texts differ.[/] microspec check shows where, and how close the choice was there.")
