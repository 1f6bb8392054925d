"""`microspec bench`: tokens a second of every way of decoding, and what a round is made of."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from microspec_hf import EagleHead, ops
from microspec_hf.cli import options
from microspec_hf.cli.console import check_json_file, open_console, write_json
from microspec_hf.cli.demo import PROMPTS
from microspec_hf.cli.pair import Pair, load_pair
from microspec_hf.conversations import user
from microspec_hf.evaluation import bench as measuring
from microspec_hf.evaluation import provenance, read_prompts
from microspec_hf.evaluation.prompts import select_prompts
from microspec_hf.evaluation.widened import COSTS, match_depth, widen
from microspec_hf.hf import Target
from microspec_hf.vocabulary import load_token_ids


def bench(
    model: options.Model = None,
    drafter: options.Drafter = "auto",
    cost: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=f"Widen the pair to the cost of a large one: {', '.join(COSTS)}."),
    ] = None,
    deep: Annotated[
        Literal["refuse", "spread", "shorten"],
        typer.Option(help="What to do with a target that has more layers than the cost."),
    ] = "refuse",
    prompts: Annotated[
        Path | None, typer.Option(metavar="PATH", help="JSON lines, or a folder of them; default: the demo's prompts.")
    ] = None,
    per_task: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 1,
    slow_prompts: Annotated[int | None, typer.Option(min=1, help="Prompts for transformers' own decoding.")] = None,
    max_new_tokens: options.MaxNewTokens = 256,
    repeats: Annotated[int, typer.Option(min=1, help="Times that everything is measured.")] = 3,
    arms: Annotated[str | None, typer.Option(metavar="A,B", help="Only these arms; default: all.")] = None,
    static_list: options.StaticList = None,
    dtype: options.Dtype = "bfloat16",
    device: options.Device = None,
    json: options.JsonFile = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the kernels of one MicroSpec round.")
    ] = None,
) -> None:
    """Compare ways of decoding on one machine: transformers' own, our engine, EAGLE-2, FR-Spec, MicroSpec.

    Same prompts, one process, in turn; medians over repeats. With --cost the pair costs what a large one does and
    says what the small one says.
    """
    check_json_file(json)
    console = open_console(json)
    where = options.default_device(device)
    chosen = select_prompts(read_prompts(prompts or PROMPTS), per_task=per_task)
    static_ids = load_token_ids(static_list) if static_list else ()
    pair = load_pair(model, drafter, "float32" if cost else dtype, where, console)
    target, head = _widened(pair, cost, deep, dtype, console) if cost else (pair.model, pair.drafter)
    ids = [pair.chat_inputs([user(prompt.turns[0])])["input_ids"] for prompt in chosen]
    left_out = measuring.left_out(target.device, static_ids)
    taking_part = _chosen_arms(measuring.bench_arms(head, static_ids), arms, left_out)
    profiled = [arm for arm in taking_part if arm.name == measuring.OURS]
    if profile is not None and not profiled:
        raise ValueError(f"--profile shows a round of the arm {measuring.OURS}; add it to --arms.")
    with console.status("") as status:
        records = measuring.bench(
            target, head, taking_part, ids, max_new_tokens, repeats, slow_prompts, tell=status.update
        )
        status.update("Memory bandwidth")
        floors = _floors(target, head, records)
    if profile is not None:
        found = measuring.profile_round(target, profiled[0], ids[0])
        profile.write_text(json_format.dumps(found, indent=1) + "\n", encoding="utf-8")
    console.print(bench_table(records))
    for line in same_text_lines(records):
        console.print(line)
    record = {
        "pair": pair.name,
        "cost": cost,
        "label": f"{cost} cost, {pair.name} text" if cost else pair.name,
        "arms": records,
        "left_out": left_out,
        **floors,
        "kernels": ops.status(target.device),
        "prompts": [prompt.id for prompt in chosen],
        "provenance": provenance(
            device=where, dtype=dtype, cost=cost, deep=deep, per_task=per_task, slow_prompts=slow_prompts,
            max_new_tokens=max_new_tokens, repeats=repeats, static_list=static_list and static_list.name,
        ),
    }  # fmt: skip
    write_json(json, record)


def bench_table(records: list[dict[str, Any]]) -> Table:
    """The figures of all arms, and how they compare."""
    table = Table(title="Tokens a second, and milliseconds of a round")
    for column in ("arm", "tok/s", "x stock", "x engine", "tokens a round", "round", "draft", "verify", "rest", "host"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    speed = {record["arm"]: record["tokens_per_second"] for record in records}
    for record in records:
        ratios = [
            f"{record['tokens_per_second'] / speed[base]:.2f}" if base in speed else ""
            for base in (measuring.STOCK, measuring.ENGINE)
        ]
        parts = [record.get(name) for name in ("round_ms", "draft_ms", "verify_ms", "rest_ms", "host_gap_ms")]
        table.add_row(
            record["arm"],
            f"{record['tokens_per_second']:.1f}",
            *ratios,
            f"{record['acceptance_length']:.2f}",
            *("" if part is None else f"{part:.2f}" for part in parts),
        )
    return table


def same_text_lines(records: list[dict[str, Any]]) -> list[str]:
    """How many texts of each arm are those of plain decoding on the engine, and how close the choice was elsewhere."""
    lines = []
    for record in records:
        same = record["same_text_as"].get(measuring.ENGINE)
        if same is None or record["arm"] == measuring.ENGINE:
            continue
        line = f"{record['arm']}: {same['equal']} of {same['of']} texts are those of {measuring.ENGINE}"
        gaps = [found["logit_gap"] for found in same["differences"] if found["logit_gap"] is not None]
        if gaps:
            line += f"; where others part, scores differ by at most {max(gaps):.2g} ({same['near_ties']} near ties)"
        lines.append(line + ".")
    return lines


def _widened(
    pair: Pair, cost: str, deep: Literal["refuse", "spread", "shorten"], dtype: str, console: Console
) -> tuple[PreTrainedModel, EagleHead]:
    sample = pair.text_inputs(PROMPTS.read_text(encoding="utf-8")[:400])["input_ids"]
    with console.status(f"Widening {pair.name} to the cost of {cost}"):
        model, shape = match_depth(pair.model, cost, deep, sample)
        return widen(model, pair.drafter, shape, getattr(torch, dtype))


def _chosen_arms(
    arms: list[measuring.BenchArm], names: str | None, left_out: dict[str, str]
) -> list[measuring.BenchArm]:
    known = [arm.name for arm in arms]
    wanted = known if names is None else names.split(",")
    for name in wanted:
        if name in left_out:
            raise ValueError(f"The arm {name} cannot take part: {left_out[name]}.")
        if name not in known:
            raise ValueError(f"There is no arm {name}; with these options there are {', '.join(known)}.")
    return [arm for arm in arms if arm.name in wanted]


def _floors(model: PreTrainedModel, head: EagleHead, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The least time of a round by the bytes of its weights, and each arm's share of it."""
    target = Target(model)
    bandwidth = measuring.memory_bandwidth(target.device, 4.0 if target.device.type == "cuda" else 0.1)
    target_bytes = measuring.bytes_of_pass(target)
    row_bytes = target.head.weight.nbytes // target.head.weight.shape[0]
    for record in records:
        num_bytes: float = target_bytes
        if record["mean_active_vocabulary"] is not None:
            num_bytes += measuring.bytes_of_drafting(head, measuring.TREE, record["mean_active_vocabulary"], row_bytes)
        record["floor_ms"] = 1e3 * num_bytes / bandwidth
        record["share_of_floor"] = record["floor_ms"] / record["round_ms"]
    return {"bandwidth": bandwidth, "target_bytes": target_bytes}
