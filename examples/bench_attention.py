"""Time tree attention on a GPU at the shapes of known models, against PyTorch's attention with a mask, and its floor.

    python examples/bench_attention.py --json attention.json

Medians over replays of a CUDA graph that holds 32 layers with buffers of their own, divided by 32: in a round keys
and values are not in the cache. `--sweep` tries other tiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_kernels import DEVICE, launch_microseconds, microseconds
from torch import Tensor

from microspec_hf.evaluation import provenance
from microspec_hf.evaluation.bench import memory_bandwidth
from microspec_hf.hf import Sight, additive_mask
from microspec_hf.ops import triton_attention
from microspec_hf.ops.triton_attention import Tiles

LAYERS, CAPACITY = 32, 4096
SHAPES = {"Llama-3-8B": (32, 8, 128), "Llama-3.2-1B": (32, 8, 64), "Gemma-3-270M": (4, 1, 256)}
SWEEP = {
    1: [Tiles(16, columns, 4, 2, waves) for columns in (32, 64, 128) for waves in (1, 2, 4)],
    60: [
        Tiles(rows, columns, warps, 2, waves)
        for rows, warps in ((64, 4), (128, 8), (128, 4))
        for columns in (32, 64, 128)
        for waves in (1, 2)
    ],
}
"""For how many rows which other tiles are tried."""


def layers(heads: int, kv_heads: int, head_dim: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries of 64 rows, keys and values for each layer."""
    shape = (1, kv_heads, CAPACITY, head_dim)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    return [
        (
            torch.randn(1, heads, 64, head_dim, **options),
            torch.randn(shape, **options),
            torch.randn(shape, **options),
        )
        for _ in range(LAYERS)
    ]


def sight(num_rows: int, length: int) -> Sight:
    """A chain: how many ancestors a row has does not change the work."""
    words = torch.tensor([(1 << (row + 1)) - 1 for row in range(num_rows)], device="cuda")
    return Sight(
        torch.tensor([length], device="cuda"),
        words[None, :, None],
        torch.arange(num_rows, device="cuda")[None],
        torch.zeros(1, dtype=torch.int64, device="cuda"),
    )


def time_shape(
    name: str, num_rows: int, length: int, buffers: Any, bandwidth: float, sweep: list[Tiles]
) -> dict[str, Any]:
    _, kv_heads, head_dim = SHAPES[name]
    seen, scale = sight(num_rows, length), head_dim**-0.5
    view = length + num_rows
    positions = (seen.length[:, None] + seen.depths).expand(1, num_rows)
    mask = additive_mask(seen.positions(view), positions, None, torch.bfloat16)

    def ours(tiles: Tiles | None = None) -> list[Callable[[], Any]]:
        return [
            functools.partial(
                triton_attention.tree_attention,
                q[:, :, :num_rows],
                k,
                v,
                seen.length,
                seen.first,
                seen.ancestors[..., 0],
                seen.depths,
                scale,
                tiles=tiles,
            )
            for q, k, v in buffers
        ]

    theirs = [
        lambda q=q, k=k, v=v: torch.nn.functional.scaled_dot_product_attention(
            q[:, :, :num_rows], k[:, :, :view], v[:, :, :view], attn_mask=mask, scale=scale, enable_gqa=True
        )
        for q, k, v in buffers
    ]
    floor = 2 * view * kv_heads * head_dim * 2 / bandwidth * 1e6
    row: dict[str, Any] = {
        "model": name,
        "rows": num_rows,
        "length": length,
        "tree_attention_us": microseconds(ours(), replays=30),
        "pytorch_us": microseconds(theirs, replays=30),
        "floor_us": floor,
    }
    if sweep:
        found = {}
        for tiles in sweep:
            try:
                found[str(dataclasses.astuple(tiles))] = microseconds(ours(tiles), replays=20)
            except Exception as error:  # too much shared memory, say
                found[str(dataclasses.astuple(tiles))] = float("inf")
                print(f"{tiles}: {type(error).__name__}", file=sys.stderr)
        row["tiles"] = dict(sorted(found.items(), key=lambda item: item[1])[:6])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--sweep", action="store_true", help="also try other tiles for trees at two lengths")
    arguments = parser.parse_args()
    bandwidth, launch = memory_bandwidth(DEVICE), launch_microseconds()
    torch.cuda.empty_cache()
    rows = []
    for name, shape in SHAPES.items():
        buffers = layers(*shape)
        for num_rows in (1, 10, 60):
            for length in (128, 600, 2000):
                is_swept = arguments.sweep and name == "Llama-3-8B" and length == 600
                sweep = SWEEP.get(num_rows, []) if is_swept else []
                rows.append(time_shape(name, num_rows, length, buffers, bandwidth, sweep))
                times = ", ".join(
                    f"{what} {rows[-1][f'{what}_us']:.2f}" for what in ("tree_attention", "pytorch", "floor")
                )
                print(f"{name}, {num_rows} rows, {length} long: {times}")
                for tiles, time in rows[-1].get("tiles", {}).items():
                    print(f"    {tiles}: {time:.2f} us")
        del buffers
        torch.cuda.empty_cache()
    record = {"provenance": provenance(device="cuda", dtype="bfloat16"), "launch_us": launch, "rows": rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
