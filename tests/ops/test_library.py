"""The ops as the dispatcher sees them: schemas, mutation, fixed shapes, CUDA-graph capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from microspec_hf import ops


def example_arguments(name: str, device: str = "cpu", seed: int = 0) -> tuple[Any, ...]:
    """Arguments of a usual size; tensors of one seed are equal on all devices."""
    generator = torch.Generator().manual_seed(seed)

    def ints(*shape: int, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(high, shape, generator=generator).to(device, dtype)

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    if name == "draft_topk":
        return floats(10, 3072), 10
    if name == "topk_candidates":
        return floats(60, 5000), 3
    if name == "build_tree":
        scores = -torch.arange(510, device=device).float() - seed
        parents = torch.arange(510, device=device) - 1
        return scores, ints(510, high=5000), parents, ints(1, high=5000), 60
    if name == "gather_rows":
        slots = torch.randperm(64, generator=generator)[:20].to(device)
        count = torch.tensor([7 + seed], dtype=torch.int32, device=device)
        return floats(64, 16), floats(100, 16), ints(20, high=100), slots, count
    if name == "window_update":
        slot_of = torch.full((500,), -1, dtype=torch.int32, device=device)
        token_of = torch.full((48,), -1, dtype=torch.int32, device=device)
        slot_of[3], token_of[0] = 0, 3
        usage = torch.zeros(48, dtype=torch.int32, device=device)
        ring = torch.full((47,), -1, dtype=torch.int32, device=device)
        clock = torch.zeros(1, dtype=torch.int64, device=device)
        pinned = torch.arange(48, device=device) < 1
        return slot_of, token_of, usage, ring, clock, ints(100, high=500) - 20 * seed, pinned, True
    assert name == "compact_kv"
    path = torch.tensor([0, 2, 5 + seed, 9 + seed], device=device)
    return [floats(1, 2, 40, 8), floats(1, 2, 40, 8)], path, torch.tensor([20 + seed], device=device)


def tensors(values: Any) -> list[Tensor]:
    """All tensors of an argument tuple or a result, in order."""
    if isinstance(values, Tensor):
        return [values]
    return [t for v in values for t in tensors(v)] if isinstance(values, list | tuple) else []


def call(name: str, arguments: tuple[Any, ...]) -> list[Tensor]:
    """Results and arguments after the call, on the CPU."""
    result = getattr(torch.ops.microspec, name)(*arguments)
    return [t.cpu() for t in (*tensors(result), *tensors(arguments))]


@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_schema_says_what_is_written(name: str) -> None:
    """Mutations, aliases and abstract shapes as declared; a kernel under the schema is held to the same."""
    op = getattr(torch.ops.microspec, name).default
    torch.library.opcheck(op, example_arguments(name), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_no_host_read_and_fixed_shapes(name: str) -> None:
    """Tensors without data: a read back to the host, or a shape that hangs on values, fails on them."""
    arguments = example_arguments(name)
    shapes = [(t.shape, t.dtype) for t in call(name, arguments)]

    def without_data(value: Any) -> Any:
        if isinstance(value, list):
            return [without_data(v) for v in value]
        return value.to("meta") if isinstance(value, Tensor) else value

    bare = tuple(without_data(value) for value in arguments)
    result = getattr(torch.ops.microspec, name)(*bare)
    assert [(t.shape, t.dtype) for t in (*tensors(result), *tensors(bare))] == shapes


def test_meta_tensors_do_find_host_reads() -> None:
    """The test above can fail: what it looks for raises."""
    bare = torch.zeros(3, device="meta")
    for read in (
        lambda: bare.sum().item(),
        lambda: bare.nonzero(),
        lambda: bare[bare > 0],
        lambda: bare.unique(),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read()


@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_compiles_without_a_graph_break(name: str) -> None:
    expected = call(name, example_arguments(name))
    compiled = torch.compile(getattr(torch.ops.microspec, name), backend="aot_eager", fullgraph=True)
    arguments = example_arguments(name)
    result = compiled(*arguments)
    for actual, wanted in zip((*tensors(result), *tensors(arguments)), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_status_names_every_op() -> None:
    assert ops.status().keys() == ops.SCHEMAS.keys()


@pytest.mark.parametrize(("used", "expected"), [([-1, -1, -1], 0), ([4, -1, -1], 1), ([-1, 7, -1], 2), ([1, 2, 3], 3)])
def test_used_slots(used: list[int], expected: int) -> None:
    assert ops.used_slots(torch.tensor(used, dtype=torch.int32)) == expected
    assert ops.used_slots(torch.tensor(used, dtype=torch.int32, device="meta")) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ops.SCHEMAS)
def test_captured_and_replayed_on_new_values(name: str) -> None:
    """A CUDA graph of the op gives, for other values in the same buffers, what the CPU gives."""
    static = example_arguments(name, "cuda")
    run = getattr(torch.ops.microspec, name)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(*static)
    for seed in (1, 2):
        for buffer, value in zip(tensors(static), tensors(example_arguments(name, seed=seed)), strict=True):
            buffer.copy_(value)
        if name == "build_tree":  # the one plain number that is not a tensor stays as captured
            assert static[4] == 60
        graph.replay()
        expected = call(name, example_arguments(name, seed=seed))
        for actual, wanted in zip((*tensors(result), *tensors(static)), expected, strict=True):
            torch.testing.assert_close(actual.cpu(), wanted)
