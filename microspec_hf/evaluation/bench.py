"""How fast each way of decoding is: same prompts, one process, in turn, with the time of a round taken apart.

A round's parts are timed as they run: on a GPU each is captured in a CUDA graph of its own and replayed, elsewhere
it is called.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel

from microspec_hf import loop
from microspec_hf.candidate_generator import MicroSpecCandidateGenerator
from microspec_hf.config import MicroSpecConfig, TreeConfig, VocabularyConfig
from microspec_hf.eagle import EagleHead
from microspec_hf.engine import CudaCapture
from microspec_hf.evaluation.decoding import generate_greedily
from microspec_hf.evaluation.lossless import first_difference
from microspec_hf.hf import Target
from microspec_hf.loop import Text
from microspec_hf.sessions import Plan, Session, open_sessions
from microspec_hf.stats import SpeculationStats
from microspec_hf.verification import TokenRule

STOCK, STATIC, ENGINE, OURS = "plain-stock", "plain-static-compiled", "plain-engine", "microspec"
SLOW = (STOCK, STATIC)
"""Arms that `slow_prompts` bounds."""
STATIC_SIZES = {"fr-spec-32k": 32768, "fr-spec-16k": 16384}
"""Arms of a fixed list, and its ids."""
TREE = TreeConfig()
STOCK_WARM_UP = 32
"""Tokens of an answer that warms up transformers' own decoding, which compiles nothing."""


@dataclass(frozen=True)
class BenchArm:
    """One way to decode.

    Args:
        name: of the arm.
        arguments: of `generate`.
        config: of speculation; None: plain decoding, by transformers or by our engine.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    config: MicroSpecConfig | None = None


@dataclass
class Run:
    """One answer: new tokens, seconds of the call, and our counters where our loop ran."""

    ids: list[int]
    seconds: float
    stats: SpeculationStats | None

    @property
    def passes(self) -> int:
        """Target passes behind the prompt."""
        return len(self.ids) - 1 if self.stats is None else self.stats.rounds + self.stats.plain_steps

    def decode_seconds(self, prefill: float) -> float:
        """Seconds behind the first token, which `prefill` brought where nobody counted."""
        return self.seconds - prefill if self.stats is None else self.stats.decode_seconds


def left_out(device: torch.device, static_ids: Sequence[int] = ()) -> dict[str, str]:
    """Arms that cannot take part with these options, and why."""
    reasons = {
        name: f"it needs a static list of {size:,} ids, got {len(static_ids):,}"
        for name, size in STATIC_SIZES.items()
        if len(static_ids) < size
    }
    if device.type == "cpu":
        reasons[STATIC] = "transformers compiles its static decoding on accelerators only"
    return reasons


def bench_arms(head: EagleHead, static_ids: Sequence[int] = ()) -> list[BenchArm]:
    """All arms but those that are `left_out`."""

    def tree_arm(name: str, vocabulary: VocabularyConfig) -> BenchArm:
        config = MicroSpecConfig(tree=TREE, vocabulary=vocabulary, fallback=False)
        return BenchArm(name, {"custom_generate": "microspec", "drafter": head, "microspec": config}, config)

    missing = left_out(head.device, static_ids)
    static = [
        tree_arm(name, VocabularyConfig("static", tuple(static_ids), size))
        for name, size in STATIC_SIZES.items()
        if name not in missing
    ]
    arms = [
        BenchArm(STOCK),
        BenchArm(STATIC, {"cache_implementation": "static"}),
        BenchArm(ENGINE, {"custom_generate": "microspec"}),
        tree_arm("eagle-2", VocabularyConfig("full")),
        *static,
        tree_arm("microspec-same-stream", VocabularyConfig(overlap=False)),
        tree_arm(OURS, VocabularyConfig()),
    ]
    return [arm for arm in arms if arm.name not in missing]


def run_arm(model: Any, arm: BenchArm, ids: Tensor, max_new_tokens: int) -> Run:
    """Answer a prompt int64 `[1, L]` greedily."""
    started = time.perf_counter()
    output = generate_greedily(model, ids, max_new_tokens=max_new_tokens, **arm.arguments)
    new = output.sequences[0, ids.shape[1] :].tolist()  # waits for the device
    stats = getattr(output, "stats", None)
    return Run(new, time.perf_counter() - started, stats[0] if stats else None)


def bench(
    model: PreTrainedModel,
    head: EagleHead,
    arms: Sequence[BenchArm],
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    repeats: int,
    slow_prompts: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Measure all arms over all prompts, in turn; see `record_of` for what comes out.

    Args:
        model: the target.
        head: its drafter.
        arms: who takes part.
        prompts: int64 `[1, L]` each.
        max_new_tokens: of an answer.
        repeats: how often everything is done; the order of the arms turns from one to the next.
        slow_prompts: the arms in `SLOW` answer only so many of the prompts.
        tell: is told what is being done.
    """
    startup: dict[str, float] = {}
    prefill: dict[str, float] = {}
    for arm in arms:
        tell(f"{arm.name}: warm-up")
        # The longest prompt and answer first: what is compiled or captured for them serves the shorter ones.
        by_length = sorted(prompts[:slow_prompts] if arm.name in SLOW else prompts, key=lambda ids: -ids.shape[1])
        longest = by_length[0]
        warm_up = min(max_new_tokens, STOCK_WARM_UP) if arm.name == STOCK else max_new_tokens
        first = run_arm(model, arm, longest, warm_up)
        for ids in (*by_length, longest):  # every length is slower when it is new
            later = run_arm(model, arm, ids, warm_up)
        if model.device.type == "cuda" and later.stats is not None and not later.stats.is_captured:
            raise RuntimeError(f"The rounds of {arm.name} run eagerly on a GPU; the log says why.")
        startup[arm.name] = max(0.0, first.seconds - later.seconds)
        firsts = [run_arm(model, arm, longest, 1).seconds for _ in range(3)] if arm.name in SLOW else [0.0]
        prefill[arm.name] = statistics.median(firsts)

    runs: dict[str, list[list[Run]]] = {arm.name: [] for arm in arms}
    for repeat in range(repeats):
        turn = repeat % len(arms)
        for arm in [*arms[turn:], *arms[:turn]]:
            tell(f"{arm.name}: repeat {repeat + 1} of {repeats}")
            chosen = prompts[:slow_prompts] if arm.name in SLOW else prompts
            runs[arm.name].append([run_arm(model, arm, ids, max_new_tokens) for ids in chosen])

    records = []
    for arm in arms:
        tell(f"{arm.name}: parts of a round")
        parts = round_parts(model, head, arm, prompts[0])
        records.append(record_of(arm, runs[arm.name], startup[arm.name], prefill[arm.name], parts))
    tell("Where texts part")
    texts = {name: [run.ids for run in repeats[0]] for name, repeats in runs.items()}
    for record in records:
        record["same_text_as"] = {
            name: same_texts(model, prompts, texts[name], texts[record["arm"]])
            for name in (STOCK, ENGINE)
            if name in texts
        }
    return records


def record_of(
    arm: BenchArm, repeats: Sequence[Sequence[Run]], startup: float, prefill: float, parts: dict[str, float]
) -> dict[str, Any]:
    """What is written of an arm: medians over repeats, with the lowest and highest."""
    everything = [run for runs in repeats for run in runs]
    counted = [run.stats for run in everything if run.stats is not None]
    emitted = [n for stats in counted for n in stats.emitted]
    seconds = [sum(run.decode_seconds(prefill) for run in runs) for runs in repeats]
    measured = {
        "tokens_per_second": [sum(len(run.ids) for run in runs) / sum(run.seconds for run in runs) for runs in repeats],
        "decode_tokens_per_second": [
            sum(len(run.ids) - 1 for run in runs) / time for runs, time in zip(repeats, seconds, strict=True)
        ],
        "round_ms": [1e3 * time / sum(run.passes for run in runs) for runs, time in zip(repeats, seconds, strict=True)],
    }
    figures = {name: statistics.median(values) for name, values in measured.items()}
    return {
        "arm": arm.name,
        **figures,
        **{f"{name}_range": [min(values), max(values)] for name, values in measured.items()},
        "acceptance_length": sum(emitted) / len(emitted) if emitted else 1.0,
        **dict.fromkeys(("draft_ms", "verify_ms", "rest_ms", "device_ms")),
        **parts,
        "host_gap_ms": figures["round_ms"] - parts["device_ms"] if parts else None,
        "coverage": statistics.mean(stats.coverage for stats in counted) if emitted else None,
        "mean_active_vocabulary": statistics.mean(s.mean_active_vocabulary for s in counted) if emitted else None,
        "is_captured": all(stats.is_captured for stats in counted) if counted else None,
        "startup_seconds": startup,
        "prompts": len(repeats[0]),
        "new_tokens": sum(len(run.ids) for run in repeats[0]),
    }


def same_texts(
    model: PreTrainedModel, prompts: Sequence[Tensor], plain: Sequence[list[int]], texts: Sequence[list[int]]
) -> dict[str, Any]:
    """How many texts are equal, of those that both have, and each place where two part, see `Difference`."""
    pairs = list(zip(prompts, plain, texts, strict=False))
    found = [first_difference(model, ids, theirs, ours) for ids, theirs, ours in pairs]
    differences = {index: difference for index, difference in enumerate(found) if difference is not None}
    return {
        "equal": len(pairs) - len(differences),
        "of": len(pairs),
        "near_ties": sum(difference.is_near_tie for difference in differences.values()),
        "differences": [{"prompt": index} | asdict(difference) for index, difference in differences.items()],
    }


def round_parts(model: PreTrainedModel, head: EagleHead, arm: BenchArm, prompt: Tensor) -> dict[str, float]:
    """Milliseconds of one round: `draft_ms`, `verify_ms`, `rest_ms`, `device_ms`; empty for arms that are not ours.

    The round is of the arm's latest text where its session is kept, else of one that begins with the prompt. The rest
    is what remains of the whole; work beside the drafter's, on the side stream, can make it smaller than its kernels.
    """
    if "custom_generate" not in arm.arguments:
        return {}
    target = Target(model)
    plan = _plan(target, head, arm)
    drafts = plan.head is not None
    with open_sessions(target, plan) as [session], torch.no_grad():
        text = Text(session.drafter, TokenRule(LogitsProcessorList(), do_sample=False), session.state)
        if session.state.ids.shape[0]:
            session.cache.length = session.state.num_cached
            session.drafter.commit(session.state.num_cached, 1)
        else:
            ids = prompt[0].to(target.device)
            loop.prefill(session.target, text, ids, session.cache, plan.config.prefill_chunk, loop.NOTHING)
            loop.step(session.target, [text], session.cache, draft=drafts)
            session.drafter.reserve(0)
            session.cache.reserve(session.cache.length + session.drafter.tree.num_nodes)
        keep = _kept(session)
        tree = loop._draft(text, drafts, None)

        def verify() -> Tensor:
            hidden, _ = loop._target_pass(session.target, [text], [tree], session.cache)
            return loop._logits(session.target, hidden)

        draft_ms = _milliseconds(lambda: loop._draft(text, drafts, None), keep, session) if drafts else 0.0
        verify_ms = _milliseconds(verify, keep, session)
        device_ms = _milliseconds(
            lambda: loop._decide(session.target, [text], session.cache, loop.NOTHING, drafts), keep, session
        )
    return {
        "draft_ms": draft_ms,
        "verify_ms": verify_ms,
        "rest_ms": device_ms - draft_ms - verify_ms,
        "device_ms": device_ms,
    }


def _plan(target: Target, head: EagleHead, arm: BenchArm) -> Plan:
    """The plan of the arm's calls."""
    eos: Any = target.model.generation_config.eos_token_id
    stop_ids = sorted({eos} if isinstance(eos, int) else set(eos or ()))
    config = arm.config or MicroSpecConfig()
    drafter = None if arm.config is None else head
    return Plan(drafter, config, TREE, stop_ids, num_rows=1, length=0, is_capturable=True)


def _kept(session: Session) -> list[tuple[Tensor, Tensor]]:
    """What a round moves on, and copies to put back, so that every repetition is the same round."""
    moving = [session.state.root, session.state.length]
    if isinstance(session.drafter, MicroSpecCandidateGenerator):
        moving += [session.drafter.num_rows, session.drafter.num_pending]
    return [(part, part.clone()) for part in moving]


def _milliseconds(
    function: Callable[[], Any], keep: list[tuple[Tensor, Tensor]], session: Session, repeats: int = 30
) -> float:
    """Median time of a function on the session's device."""
    on_gpu = session.target.device.type == "cuda"
    function()
    run = CudaCapture()(function)[1] if on_gpu else function
    times: list[float] = []
    for _ in range(repeats if on_gpu else 3):
        for part, before in keep:
            part.copy_(before)
        if on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            started = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def memory_bandwidth(device: torch.device, gigabytes: float = 4.0) -> float:
    """Bytes read and written per second by a kernel that copies a large buffer; a memcpy may use another engine."""
    source = torch.rand(int(gigabytes * 2**30 / 4), device=device)
    target = torch.empty_like(source)

    def seconds() -> float:
        started = time.perf_counter()
        torch.neg(source, out=target)
        target[:1].tolist()  # waits for the device
        return time.perf_counter() - started

    return 2 * source.numel() * 4 / min(seconds() for _ in range(5))


def bytes_of_pass(target: Target) -> int:
    """Bytes of weights that one target pass reads: its decoder without the embeddings, and its head."""
    embedding = {id(weight) for weight in target.embeddings.parameters()}
    decoder = {id(weight): weight for weight in target.decoder.parameters() if id(weight) not in embedding}
    return sum(int(weight.nbytes) for weight in decoder.values()) + int(target.head.weight.nbytes)


def bytes_of_drafting(head: nn.Module, tree: TreeConfig, active_rows: float, row_bytes: int) -> float:
    """Bytes of weights that the drafter's passes of a round read."""
    return (tree.depth + 1) * (sum(weight.nbytes for weight in head.parameters()) + active_rows * row_bytes)


def profile_round(model: PreTrainedModel, arm: BenchArm, ids: Tensor) -> dict[str, Any]:
    """Kernels of one replayed round of an arm: name, calls and microseconds, the longest first; none on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    run_arm(model, arm, ids, 48)
    kind = "CUDA" if model.device.type == "cuda" else "CPU"
    with profile(activities=[getattr(ProfilerActivity, kind)]) as profiler:
        run_arm(model, arm, ids, 48)
    events = sorted(
        (event for event in profiler.events() if event.device_type.name == "CUDA"),
        key=lambda event: event.time_range.start,
    )
    return round_of(
        [(event.name, event.time_range.start, event.time_range.end) for event in events],
        ends=lambda name: "Memcpy DtoH" in name,
    )


def round_of(events: Sequence[tuple[str, float, float]], ends: Callable[[str], bool]) -> dict[str, Any]:
    """The kernels of the median round among device events (name, start, end in microseconds)."""
    borders = [i for i, (name, _, _) in enumerate(events) if ends(name)]
    rounds = [events[a + 1 : b] for a, b in itertools.pairwise(borders) if b > a + 1]
    if not rounds:
        return {"kernels": [], "busy_us": 0.0, "launches": 0}
    rounds.sort(key=lambda part: part[-1][2] - part[0][1])
    chosen = rounds[len(rounds) // 2]
    totals: dict[str, list[float]] = {}
    for name, start, end in chosen:
        entry = totals.setdefault(name, [0, 0.0])
        entry[0] += 1
        entry[1] += end - start
    busy = sum(time for _, time in totals.values())
    kernels = [
        {"kernel": name, "calls": int(calls), "us": time, "share": time / busy}
        for name, (calls, time) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]
    return {"kernels": kernels, "busy_us": busy, "launches": len(chosen)}
