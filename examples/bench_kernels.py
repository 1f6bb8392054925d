"""Time every compiled kernel on a GPU against its floor and against PyTorch; the tests come first.

    python examples/bench_kernels.py --kernels FOLDER --json kernels.json --readme cuda_kernels/README.md

Each number is a median over replays of a CUDA graph that holds a series of calls on different data, divided by
their number. Two floors are measured in the same run: the memory bandwidth of a large copy, and the time of a
launch in such a graph. No time is printed if a test of the kernels fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from microspec_hf import ops
from microspec_hf.evaluation import provenance
from microspec_hf.evaluation.bench import memory_bandwidth
from microspec_hf.ops import loading, reference
from microspec_hf.streams import SideStream

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- kernel times: begin -->", "<!-- kernel times: end -->"
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Case:
    """One size of one op.

    Args:
        op: its name.
        size: in words, for the table.
        inputs: `inputs(seed)` gives arguments; several sets rotate, so that no cache holds them all.
        num_bytes: the fewest that must be read and written.
        target_us: what the kernel is to reach on an H200.
        num_sets: how many sets rotate.
    """

    op: str
    size: str
    inputs: Callable[[int], tuple[Any, ...]]
    num_bytes: int
    target_us: float
    num_sets: int = 16


@dataclass(frozen=True)
class Timing:
    op: str
    size: str
    served_by: str
    kernel_us: float
    pytorch_us: float
    floor_us: float
    bytes: int
    terabytes_per_second: float
    target_us: float


def randint(high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def gather_case(count: int, num_entries: int, weight: Tensor, target_us: float, num_sets: int = 16) -> Case:
    hidden = weight.shape[1]
    out = torch.empty(3072, hidden, dtype=weight.dtype, device=DEVICE)  # one packed buffer, as in use

    def inputs(seed: int) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randperm(weight.shape[0], generator=generator)[:num_entries].to(DEVICE)
        slots = torch.randperm(3072, generator=generator)[:num_entries].to(DEVICE)
        return out, weight, rows, slots, torch.tensor([count], dtype=torch.int32, device=DEVICE)

    size = f"{count:,} of {num_entries:,} rows of {hidden:,} bf16"
    return Case("gather_rows", size, inputs, 2 * count * hidden * 2, target_us, num_sets)


def window_inputs(stream: bool) -> Callable[[int], tuple[Any, ...]]:
    """All sets share one window, so that every call brings ids that the calls before have pushed out."""
    vocab_size, num_slots = 128256, 3072
    state = (
        torch.full((vocab_size,), -1, dtype=torch.int32, device=DEVICE),
        torch.full((num_slots,), -1, dtype=torch.int32, device=DEVICE),
        torch.zeros(num_slots, dtype=torch.int32, device=DEVICE),
        torch.full((num_slots if stream else 0,), -1, dtype=torch.int32, device=DEVICE),
        torch.zeros(1, dtype=torch.int64, device=DEVICE),
    )
    pinned = torch.zeros(num_slots, dtype=torch.bool, device=DEVICE)

    def inputs(seed: int) -> tuple[Any, ...]:
        spread = torch.rand(240, generator=torch.Generator().manual_seed(seed)) ** 2
        return *state, (vocab_size * spread).long().to(DEVICE), pinned, stream

    for step in range(1000, 1040):  # until it is full and has turned over
        reference.window_update(*inputs(step))
    return inputs


def half_empty_logits(seed: int) -> tuple[Any, ...]:
    """A drafter's logits as a round has them: most slots of the window hold no id."""
    logits = 4 * torch.randn(10, 3072, device=DEVICE).bfloat16()
    logits[:, 600:] = -torch.inf
    return logits, 10


def padded_logits(seed: int) -> tuple[Any, ...]:
    """A target's logits whose last columns stand for no token."""
    logits = torch.randn(60, 128256, device=DEVICE).bfloat16()
    logits[:, 49152:] = 0
    return logits, 3


def tree_inputs(seed: int) -> tuple[Any, ...]:
    top_k, depth = 10, 5
    generator = torch.Generator().manual_seed(seed)
    scores, parents = [-torch.rand(top_k, generator=generator) * 5], [torch.full((top_k,), -1)]
    beam, beam_scores, first = torch.arange(top_k), scores[0], top_k
    for _ in range(depth):
        level = (beam_scores[:, None] - torch.rand(top_k, top_k, generator=generator) * 5).flatten()
        scores.append(level)
        parents.append(beam.repeat_interleave(top_k))
        beam_scores, best = level.topk(top_k)
        beam, first = first + best, first + top_k * top_k
    flat = torch.cat(scores).to(DEVICE)
    return (
        flat,
        randint(128256, len(flat), seed=seed),
        torch.cat(parents).to(DEVICE),
        randint(9, 1, seed=seed),
        60,
    )


def compact_inputs(seed: int) -> tuple[Any, ...]:
    buffers = [torch.randn(1, 8, 2048, 128, device=DEVICE).bfloat16() for _ in range(64)]
    path = torch.tensor([0, 2, 5, 11, 23, 40, 58], device=DEVICE)
    return buffers, path, torch.tensor([1000 + seed], device=DEVICE)


def cases() -> list[Case]:
    weight = torch.randn(128256, 4096, dtype=torch.bfloat16, device=DEVICE)
    # Three arrays over the slots are read and one is written; ids and their slots in, rows and slots out.
    window_bytes = 3072 * (4 + 4 + 1 + 4) + 240 * (8 + 4 + 8 + 8)
    return [
        gather_case(3072, 3072, weight, target_us=2 * 3072 * 8192 / 3.6e6),
        gather_case(200, 240, weight, target_us=3.0, num_sets=64),
        gather_case(5, 240, weight, target_us=3.0, num_sets=64),
        Case("window_update", "240 ids, 3,072 slots, lru", window_inputs(False), window_bytes, 6.0),
        Case("window_update", "240 ids, 3,072 slots, stream", window_inputs(True), window_bytes, 6.0),
        Case(
            "topk_candidates",
            "60 x 128,256 bf16, k = 3",
            lambda seed: (torch.randn(60, 128256, device=DEVICE).bfloat16(), 3),
            60 * 128256 * 2,
            12.0,
        ),
        Case(
            "topk_candidates",
            "60 x 128,256 bf16, k = 3, 79,104 alike",
            padded_logits,
            60 * 128256 * 2,
            12.0,
        ),
        Case(
            "draft_topk",
            "10 x 3,072 bf16, k = 10",
            lambda seed: (4 * torch.randn(10, 3072, device=DEVICE).bfloat16(), 10),
            10 * 3072 * 2,
            6.0,
        ),
        Case("draft_topk", "10 x 3,072 bf16, k = 10, 600 slots held", half_empty_logits, 10 * 3072 * 2, 6.0),
        Case("build_tree", "510 candidates, 60 nodes", tree_inputs, 510 * 20, 6.0),
        Case(
            "compact_kv",
            "32 layers, 8 heads of 128 bf16, 7 rows",
            compact_inputs,
            2 * 64 * 8 * 6 * 256,
            8.0,
            num_sets=4,
        ),
    ]


LAUNCHES = 64
"""Calls in a graph, or somewhat more, so that its own start is a small part of the time."""


def microseconds(calls: Sequence[Callable[[], Any]], replays: int = 60, repeat: int | None = None) -> float:
    """Median time of one call: a graph of all calls, `repeat` times over, replayed; default: `LAUNCHES` calls."""
    repeat = repeat or -(-LAUNCHES // len(calls))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeat):
            for call in calls:
                call()
    times: list[float] = []
    for _ in range(replays + 5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / (len(calls) * repeat))
    return statistics.median(times[5:])


def launch_microseconds() -> float:
    """One of a series of launches in a graph that have next to nothing to do."""
    value = torch.zeros(1, device=DEVICE)
    return microseconds([value.zero_])


def time_case(case: Case, bandwidth: float, launch_us: float) -> Timing:
    service = loading.load("cuda")[case.op]
    plain = getattr(reference, case.op)
    sets = [case.inputs(seed) for seed in range(case.num_sets)]
    if service.supports is None or not all(service.supports(case.op, *arguments) for arguments in sets):
        raise SystemExit(f"{case.op} ({case.size}) is served by {service.tier}: {service.refusals}")

    def calls(function: Callable[..., Any]) -> list[Callable[[], Any]]:
        return [lambda arguments=arguments: function(*arguments) for arguments in sets]  # type: ignore[misc]

    kernel_us = microseconds(calls(service.function))
    pytorch_us = microseconds(calls(plain), replays=20, repeat=1)
    return Timing(
        case.op,
        case.size,
        _without_folder(service.source),
        kernel_us,
        pytorch_us,
        max(launch_us, case.num_bytes / bandwidth * 1e6),
        case.num_bytes,
        case.num_bytes / kernel_us / 1e6,
        case.target_us,
    )


def overlap() -> dict[str, float]:
    """The gather beside a drafter's layer: each alone, one after the other, and side by side, in microseconds."""
    weights = [
        torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE) / columns**0.5
        for rows, columns in ((4096, 8192), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    ]
    features = [torch.randn(10, weight.shape[1], dtype=torch.bfloat16, device=DEVICE) for weight in weights]
    lm_head = torch.randn(128256, 4096, dtype=torch.bfloat16, device=DEVICE)
    sets = [gather_case(count, 3072, lm_head, 0.0).inputs(seed) for seed, count in enumerate((200, 400, 800, 3072))]

    def backbone() -> None:
        for weight, feature in zip(weights, features, strict=True):
            torch.nn.functional.linear(feature, weight)

    result = {"backbone": microseconds([backbone], repeat=8)}
    for arguments in sets:
        side = SideStream(DEVICE)

        def gather(arguments: tuple[Any, ...] = arguments) -> None:
            ops.gather_rows(*arguments)

        def one_after_the_other(gather: Callable[[], None] = gather) -> None:
            gather()
            backbone()

        def side_by_side(gather: Callable[[], None] = gather, side: SideStream = side) -> None:
            with side.fork():
                gather()
            backbone()
            side.join()

        rows = int(arguments[4])
        result[f"gather of {rows:,} rows"] = microseconds([gather], repeat=8)
        result[f"{rows:,} rows, one after the other"] = microseconds([one_after_the_other], repeat=8)
        result[f"{rows:,} rows, side by side"] = microseconds([side_by_side], repeat=8)
    return result


def run_tests(kernels: Path | None) -> None:
    """The unmodified tests on this GPU; a red one ends the program."""
    environment = dict(os.environ)
    if kernels is not None:
        environment["MICROSPEC_KERNELS"] = str(kernels)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "tests/cuda_kernels", "tests/ops"]
    if subprocess.run(command, cwd=ROOT, env=environment).returncode != 0:
        raise SystemExit("A kernel is wrong, so no time is measured.")


def about(bandwidth: float, launch_us: float) -> dict[str, Any]:
    """Where the times come from."""
    return {
        "command": " ".join([Path(sys.executable).name, *(_without_folder(word) for word in sys.argv)]),
        "cuda": torch.version.cuda,
        "compute_capability": "{}.{}".format(*torch.cuda.get_device_capability()),
        "bandwidth_tb_s": bandwidth / 1e12,
        "launch_us": launch_us,
        **provenance(device="cuda"),
    }


def _without_folder(word: str) -> str:
    """A path's last part, so that no record carries the folders of a machine; the script's own path as it is."""
    return Path(word).name if Path(word).is_absolute() else word


def table(record: dict[str, Any]) -> str:
    origin = record["provenance"]
    lines = [
        f"Measured on one {origin['device']} (torch {origin['versions']['torch']}, CUDA {origin['cuda']}) by",
        f"`{origin['command']}`: medians of CUDA-graph replays. A large copy moves",
        f"{origin['bandwidth_tb_s']:.2f} TB/s (read plus written); a launch in a graph takes "
        f"{origin['launch_us']:.2f} us. The floor is the larger of the launch and the bytes at that rate.",
        "`gather_rows` copies other rows in each call, into the one packed buffer that there is in use.",
        "",
        "| op | size | kernel, us | floor, us | TB/s | PyTorch reference, us | target, us |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in record["timings"]:
        lines.append(
            f"| `{row['op']}` | {row['size']} | {row['kernel_us']:.2f} | {row['floor_us']:.2f} "
            f"| {row['terabytes_per_second']:.2f} | {row['pytorch_us']:.1f} | {row['target_us']:.1f} |"
        )
    lines += ["", "The gather beside a drafter's layer (matrix products of Llama-3-8B's sizes, 10 rows):", ""]
    lines += ["| | us |", "|---|---:|"]
    lines += [f"| {name} | {value:.1f} |" for name, value in record["overlap"].items()]
    return "\n".join(lines)


def write_table(readme: Path, text: str) -> None:
    """Replace what stands between the markers."""
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{readme} has no markers {BEGIN} and {END} to write the table between.")
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=Path, help="folder of built kernels; default: as MICROSPEC_KERNELS says")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--readme", type=Path, help="write the table between the markers of this file")
    parser.add_argument("--tested", action="store_true", help="the tests have just passed; do not run them again")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no CUDA device; kernels are timed on a GPU only.")
    if not arguments.tested:
        run_tests(arguments.kernels)
    ops.load("cuda", None if arguments.kernels is None else str(arguments.kernels))
    bandwidth, launch_us = memory_bandwidth(DEVICE), launch_microseconds()
    torch.cuda.empty_cache()
    record = {
        "provenance": about(bandwidth, launch_us),
        "served_by": {name: service.tier for name, service in ops.load("cuda").items()},
        "timings": [asdict(time_case(case, bandwidth, launch_us)) for case in cases()],
        "overlap": overlap(),
    }
    text = table(record)
    print(text)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if arguments.readme:
        write_table(arguments.readme, text)


if __name__ == "__main__":
    main()
