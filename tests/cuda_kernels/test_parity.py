"""Every kernel equals the reference: on fresh random inputs, on awkward sizes, and where orders could break.

The reference runs on the CPU, so that a fault which both sides shared on a GPU would show. Memory that the kernels
allocate is poisoned first: an element that nobody writes does not pass as right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from microspec_hf import ops
from microspec_hf.ops import loading, reference

HALF = [torch.float16, torch.bfloat16]
FLOATS = pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=["fp16", "bf16", "fp32"])


def poison(device: torch.device) -> None:
    """Leave garbage in the memory that the allocator hands out next."""
    if device.type == "cuda":
        blocks = [torch.full((size,), 0x5A, dtype=torch.uint8, device=device) for size in (512, 4096, 65536) * 8]
        del blocks


def compare(name: str, device: torch.device, *arguments: Any) -> list[Tensor]:
    """Call the kernel on copies on its device and the reference on the CPU; compare results and mutations.

    Returns what the reference gave.
    """
    expected_arguments, actual_arguments = _copies(arguments, torch.device("cpu")), _copies(arguments, device)
    service = loading.load(device)[name]
    assert service.supports is not None
    assert service.supports(name, *actual_arguments), "the kernel would leave this call to the reference"
    poison(device)
    actual = _tensors((service(*actual_arguments), actual_arguments))
    expected = _tensors((getattr(reference, name)(*expected_arguments), expected_arguments))
    for got, wanted in zip(actual, expected, strict=True):
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        if (
            name == "draft_topk" and got.dtype == torch.float32 and got is actual[0]
        ):  # scores are sums of exponentials, in an order of the kernel's own
            torch.testing.assert_close(got.cpu(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
        else:
            assert torch.equal(_bits(got.cpu()), _bits(wanted)), (name, got.cpu(), wanted)
    return expected


def _bits(tensor: Tensor) -> Tensor:
    """Comparable also where it is NaN."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _copies(values: Any, device: torch.device) -> Any:
    if isinstance(values, Tensor):
        return values.to(device, copy=True)
    return type(values)(_copies(v, device) for v in values) if isinstance(values, list | tuple) else values


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [t for v in values for t in _tensors(v)] if isinstance(values, list | tuple) else []


def rows_of_all_kinds(num_rows: int, num_columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random rows, and rows where an order can break: ties, NaN, infinities, all alike, sorted."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(num_rows, num_columns, generator=generator)
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda row: row,
        lambda row: row.round(),
        lambda row: torch.where(torch.rand(row.shape, generator=generator) < 0.3, math.nan, row),
        lambda row: torch.full_like(row, -math.inf),
        lambda row: torch.full_like(row, math.nan),
        lambda row: torch.zeros_like(row) * torch.where(row > 0, 1.0, -1.0),  # +0 and -0
        lambda row: row.sort().values,
        lambda row: row.sort(descending=True).values,
        lambda row: torch.where(torch.arange(num_columns) < num_columns // 7, row, -math.inf),
        lambda row: torch.where(torch.arange(num_columns) == num_columns - 1, math.inf, row),
        lambda row: torch.where(torch.rand(row.shape, generator=generator) < 0.01, math.inf, row),
    ]
    return torch.stack([kinds[i % len(kinds)](row) for i, row in enumerate(logits)]).to(dtype)


class TestSelection:
    @FLOATS
    @pytest.mark.parametrize(
        ("columns", "k"),
        [(1, 1), (5, 5), (64, 10), (131, 10), (1000, 16), (3072, 10), (3072, 1), (4096, 64), (4093, 20)],
    )
    def test_draft_topk(self, device: torch.device, dtype: torch.dtype, columns: int, k: int) -> None:
        compare("draft_topk", device, rows_of_all_kinds(12, columns, dtype, seed=columns), k)

    @FLOATS
    @pytest.mark.parametrize(
        ("columns", "k"),
        [(1, 1), (7, 7), (131, 3), (4096, 1), (32768, 3), (50257, 3), (49152, 10), (65544, 64)],
    )
    def test_topk_candidates(self, device: torch.device, dtype: torch.dtype, columns: int, k: int) -> None:
        rows = rows_of_all_kinds(11, columns, dtype, seed=columns)
        (ids, _) = compare("topk_candidates", device, rows, k)
        # Only one kind of row is free of NaN and infinities for certain; its first id is PyTorch's argmax.
        assert ids[0, 0] == rows[0].argmax()

    @pytest.mark.parametrize(("columns", "k"), [(128256, 3), (151936, 3), (262144, 5), (300001, 3)])
    def test_topk_candidates_of_real_vocabularies(self, device: torch.device, columns: int, k: int) -> None:
        """Several tiles a row; with a cluster of blocks where the chip has them; more tiles than a cluster."""
        compare("topk_candidates", device, rows_of_all_kinds(11, columns, torch.bfloat16, seed=columns), k)

    @given(
        rows=st.lists(st.lists(st.sampled_from([0.0, 1.0, 2.0, -1.0, math.nan, -math.inf]), min_size=9, max_size=9)),
        k=st.integers(1, 9),
    )
    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_ties_everywhere(self, device: torch.device, rows: list[list[float]], k: int) -> None:
        logits = torch.tensor(rows).reshape(-1, 9)
        compare("draft_topk", device, logits, k)
        compare("topk_candidates", device, logits, k)


def random_candidates(top_k: int, depth: int, seed: int, peaked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores, tokens and parents of a drafting round, its beam included; peaked rows tie with their parents."""
    generator = torch.Generator().manual_seed(seed)

    def log_probabilities(rows: int) -> Tensor:
        logits = torch.randn(rows, 50, generator=generator) * (30.0 if peaked else 2.0)
        return logits.log_softmax(-1).topk(top_k).values

    scores, parents = [log_probabilities(1)[0]], [torch.full((top_k,), -1)]
    beam, beam_scores, first = torch.arange(top_k), scores[0], top_k
    for _ in range(depth):
        level = beam_scores[:, None] + log_probabilities(top_k)
        scores.append(level.flatten())
        parents.append(beam.repeat_interleave(top_k))
        beam_scores, best = level.flatten().topk(top_k)
        beam, first = first + best, first + top_k * top_k
    flat = torch.cat(scores)
    tokens = torch.randint(128256, flat.shape, generator=generator)
    return flat, tokens, torch.cat(parents), torch.tensor([seed + 3])


class TestBuildTree:
    @pytest.mark.parametrize("peaked", [False, True])
    @pytest.mark.parametrize(
        ("top_k", "depth", "num_nodes"),
        [
            (2, 2, 6),
            (10, 5, 60),
            (10, 5, 1),
            (10, 5, 64),
            (1, 7, 8),
            (8, 3, 30),
            (12, 6, 64),
            (16, 6, 60),
            (20, 9, 64),
        ],
    )
    def test_random_rounds(self, device: torch.device, top_k: int, depth: int, num_nodes: int, peaked: bool) -> None:
        for seed in range(4):
            compare("build_tree", device, *random_candidates(top_k, depth, seed, peaked), num_nodes)

    def test_missing_candidates(self, device: torch.device) -> None:
        """Fewer candidates than nodes: the rest have no score, no token, and the lowest numbers."""
        scores, tokens, parents, root = random_candidates(10, 5, 1, peaked=False)
        for kept in (0, 1, 30, 59, 60, 200):
            missing = torch.arange(len(scores)) >= kept
            compare("build_tree", device, scores.masked_fill(missing, -math.inf), tokens, parents, root, 60)

    def test_all_alike(self, device: torch.device) -> None:
        scores, tokens, parents, root = random_candidates(10, 5, 1, peaked=False)
        for value in (0.0, -math.inf, math.nan):
            compare("build_tree", device, torch.full_like(scores, value), tokens, parents, root, 60)


class TestGatherRows:
    @pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("width", [(), (1,), (3,), (64,), (896,), (1000,), (4096,), (5120,)], ids=str)
    @pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
    def test_rows(
        self, device: torch.device, dtype: torch.dtype, width: tuple[int, ...], index_dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(len(width))
        weight = torch.randn(301, *width, generator=generator).to(dtype)
        rows = torch.randint(301, (97,), generator=generator).to(index_dtype)
        rows[0], rows[1] = 0, 300
        slots = torch.randperm(128, generator=generator)[:97].to(index_dtype)
        for count in (0, 1, 40, 97):
            out = torch.full((128, *width), -7.0, dtype=dtype)
            if count < 97:
                rows[count:], slots[count:] = -1, -1  # behind the count anything may stand
            compare("gather_rows", device, out, weight, rows, slots, torch.tensor([count], dtype=torch.int32))
            rows = torch.randint(301, (97,), generator=generator).to(index_dtype)
            slots = torch.randperm(128, generator=generator)[:97].to(index_dtype)

    def test_rows_that_start_anywhere(self, device: torch.device) -> None:
        """A view whose first row is not aligned to 16 bytes."""
        storage = torch.randn(8 * 20 + 1, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
        weight = storage[1:].view(20, 8)
        out = torch.zeros(4, 8, dtype=torch.bfloat16, device=device)
        rows, slots = torch.tensor([19, 5], device=device), torch.tensor([0, 2], device=device)
        loading.load(device)["gather_rows"](
            out, weight, rows, slots, torch.tensor([2], dtype=torch.int32, device=device)
        )
        assert torch.equal(out[[0, 2]], weight[[19, 5]])
        assert not out[[1, 3]].any()


class TestWindowUpdate:
    @pytest.mark.parametrize("stream", [False, True], ids=["lru", "stream"])
    @pytest.mark.parametrize(
        ("vocab_size", "num_slots", "num_pinned", "num_candidates"),
        [
            (14, 5, 2, 9),
            (50, 50, 3, 40),
            (300, 33, 1, 64),
            (4000, 100, 4, 240),
            (4000, 1025, 0, 240),
            (128256, 3072, 5, 240),
            (128256, 8192, 512, 1024),
            (70, 1, 1, 33),
            (70, 1, 0, 1),
        ],
    )
    def test_long_runs(
        self,
        device: torch.device,
        vocab_size: int,
        num_slots: int,
        num_pinned: int,
        num_candidates: int,
        stream: bool,
    ) -> None:
        """State goes from call to call on both sides; ids by a skewed law; the ring wraps many times."""
        generator = torch.Generator().manual_seed(num_slots)
        pinned = torch.arange(num_slots) < num_pinned
        token_of = torch.full((num_slots,), -1, dtype=torch.int32)
        token_of[:num_pinned] = torch.randperm(vocab_size, generator=generator)[:num_pinned].int()
        slot_of = torch.full((vocab_size,), -1, dtype=torch.int32)
        slot_of[token_of[:num_pinned].long()] = torch.arange(num_pinned, dtype=torch.int32)
        room = num_slots - num_pinned
        state = [
            slot_of,
            token_of,
            torch.zeros(num_slots, dtype=torch.int32),
            torch.full((room if stream else 0,), -1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int64),
        ]
        for _ in range(30):
            spread = torch.rand(num_candidates, generator=generator) ** 3
            candidates = (vocab_size * spread).long()
            is_padding = torch.rand(num_candidates, generator=generator) < 0.1
            candidates = torch.where(is_padding, -1, candidates)
            candidates[0], candidates[-1] = 0, vocab_size - 1
            results = compare("window_update", device, *state, candidates, pinned, stream)
            state = results[3:8]
        assert int(state[4]) > 20 * num_candidates

    @pytest.mark.parametrize("num_old", [1, 100, 300])
    def test_ids_that_were_last_seen_long_ago(self, device: torch.device, num_old: int) -> None:
        """Recency is spread over millions of places, and nearly all of it lies in a few thousand."""
        vocab_size, num_slots, clock = 20000, 3072, 40_000_000
        generator = torch.Generator().manual_seed(num_old)
        token_of = torch.randperm(vocab_size, generator=generator)[:num_slots].int()
        slot_of = torch.full((vocab_size,), -1, dtype=torch.int32)
        slot_of[token_of.long()] = torch.arange(num_slots, dtype=torch.int32)
        usage = clock - 1 - torch.randperm(5000, generator=generator)[:num_slots].int()
        usage[:num_old] = 7 * torch.randperm(1000, generator=generator)[:num_old].int()
        ring, pinned = torch.full((0,), -1, dtype=torch.int32), torch.zeros(num_slots, dtype=torch.bool)
        candidates = torch.randperm(vocab_size, generator=generator)[:240]
        state = [slot_of, token_of, usage, ring, torch.tensor([clock])]
        results = compare("window_update", device, *state, candidates, pinned, False)
        assert int(results[2][0]) > 150

    @given(data=st.data())
    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_small_windows(self, device: torch.device, data: st.DataObject) -> None:
        vocab_size = data.draw(st.integers(1, 14))
        num_slots = data.draw(st.integers(1, vocab_size))
        num_pinned = data.draw(st.integers(0, num_slots))
        stream = data.draw(st.booleans())
        ids = data.draw(st.permutations(range(vocab_size)))
        token_of = torch.tensor([*ids[:num_pinned], *[-1] * (num_slots - num_pinned)], dtype=torch.int32)
        slot_of = torch.full((vocab_size,), -1, dtype=torch.int32)
        slot_of[token_of[:num_pinned].long()] = torch.arange(num_pinned, dtype=torch.int32)
        ring = torch.full((num_slots - num_pinned if stream else 0,), -1, dtype=torch.int32)
        usage, clock = torch.zeros(num_slots, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        state = [slot_of, token_of, usage, ring, clock]
        pinned = torch.arange(num_slots) < num_pinned
        for _ in range(data.draw(st.integers(1, 5))):
            candidates = data.draw(st.lists(st.integers(-2, vocab_size + 1), max_size=30))
            results = compare(
                "window_update", device, *state, torch.tensor(candidates, dtype=torch.int64), pinned, stream
            )
            state = results[3:8]


class TestCompactKV:
    @pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
    @pytest.mark.parametrize(("heads", "head_dim"), [(1, 1), (2, 3), (8, 128), (4, 64), (3, 80)])
    def test_paths(self, device: torch.device, dtype: torch.dtype, heads: int, head_dim: int) -> None:
        generator = torch.Generator().manual_seed(heads)
        buffers = [torch.randn(1, heads, 90, head_dim, generator=generator).to(dtype) for _ in range(5)]
        for path in ([0], [0, 1, 2], [0, 1, 3, 9, 22, 41, 59], [0, 7, 7, 7, 7, 7, 7], [3, 2, 1, 0]):
            compare("compact_kv", device, buffers, torch.tensor(path), torch.tensor([30]))

    def test_layers_of_two_shapes(self, device: torch.device) -> None:
        buffers = [torch.randn(1, heads, 40, 16) for heads in (2, 2, 1, 1, 2)]
        compare("compact_kv", device, buffers, torch.tensor([0, 2, 3]), torch.tensor([11]))

    def test_near_the_end(self, device: torch.device) -> None:
        buffers = [torch.randn(1, 2, 8, 16)]
        compare("compact_kv", device, buffers, torch.tensor([0, 1, 1, 1, 1, 1, 1]), torch.tensor([6]))

    def test_many_layers(self, device: torch.device) -> None:
        """More buffers than one launch has room for."""
        buffers = [torch.randn(1, 1, 10, 4) for _ in range(500)]
        compare("compact_kv", device, buffers, torch.tensor([0, 2, 5]), torch.tensor([1]))


class TestRefusals:
    """Launchers check what they are given and say both sides."""

    def test_messages(self, device: torch.device) -> None:
        call = {name: service.function for name, service in loading.load(device).items()}
        wide = torch.zeros(2, 8, device=device).t()
        with pytest.raises(RuntimeError, match=r"draft_topk: logits must be contiguous, got shape \(8, 2\)"):
            call["draft_topk"](wide, 1)
        with pytest.raises(RuntimeError, match="k must be from 1 to 8, got 9"):
            call["topk_candidates"](torch.zeros(2, 8, device=device), 9)
        with pytest.raises(RuntimeError, match=r"topk_candidates: logits must have 2 dimension.*\(8,\)"):
            call["topk_candidates"](torch.zeros(8, device=device), 1)
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        count = torch.ones(1, dtype=torch.int32, device=device)
        out = torch.zeros(3, 2, device=device)
        with pytest.raises(RuntimeError, match="weight must be Float, got Half"):
            call["gather_rows"](out, torch.zeros(4, 2, dtype=torch.float16, device=device), rows, rows, count)
        with pytest.raises(RuntimeError, match="count must be Int, got Long"):
            call["gather_rows"](out, out.clone(), rows, rows, rows)
        with pytest.raises(RuntimeError, match=r"got \(3, 2\) and \(4, 3\)"):
            call["gather_rows"](out, torch.zeros(4, 3, device=device), rows, rows, count)
        scores = torch.zeros(4, device=device)
        with pytest.raises(RuntimeError, match="tokens must have length 4, got 1"):
            call["build_tree"](scores, rows, rows, rows, 3)
        with pytest.raises(RuntimeError, match="path must be Long, got Int"):
            call["compact_kv"]([torch.zeros(1, 1, 4, 2, device=device)], count, rows)

    def test_other_calls_go_to_the_reference(self, device: torch.device) -> None:
        """What a kernel does not take is served all the same, by PyTorch."""
        logits = torch.randn(3, 5000, dtype=torch.float64, device=device)
        scores, slots = ops.draft_topk(logits, 4)
        expected = reference.draft_topk(logits, 4)
        assert torch.equal(slots, expected[1])
        assert torch.equal(scores, expected[0])


@pytest.mark.gpu
def test_every_stream_is_the_current_one(cuda_build: Any) -> None:
    """Kernels run on the stream that is current: after a slow kernel of that stream, not beside it."""
    ops.load("cuda", str(cuda_build))
    weight = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    out = torch.zeros(16, 4096, device="cuda")
    rows = torch.arange(16, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        product = weight
        for _ in range(20):
            product = product @ weight / 64
        ops.gather_rows(out, product, rows, rows, torch.full((1,), 16, dtype=torch.int32, device="cuda"))
    stream.synchronize()
    assert torch.equal(out, product[:16])
    ops.forget()
