"""Write the tables of the README and of the drafter's card from the result files, so that no figure is typed by hand.

    python examples/readme_tables.py           # rewrites both
    python examples/readme_tables.py --check   # says whether it is up to date (exit code 1: it is not)

Result files are made by `microspec demo --json examples/results/demo_cpu.json` (one more file for each further
machine: `demo_cpu_NAME.json`), `examples/acceptance.py` and
`microspec check --json examples/results/check_float32.json`. A file that does not exist gives no row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from microspec_hf.cli.bench import same_text_lines
from microspec_hf.drafters import KNOWN, SMOLLM2
from microspec_hf.evaluation import OVERALL

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
ENGINE = ROOT / "docs" / "engine.md"
RESULTS = ROOT / "examples" / "results"


def render(readme: str, results: Path = RESULTS) -> str:
    """The README with every generated block made anew."""
    return _fill(readme, {"results": results_block(results), "drafters": drafters_block()})


def render_card(card: str, results: Path = RESULTS) -> str:
    """The shipped drafter's model card likewise."""
    acceptance = _acceptance_table(_read(results / "acceptance_smollm2.json"))
    return _fill(card, {"acceptance": acceptance or "Not measured yet.\n", "training": training_block()})


def render_engine(page: str, results: Path = RESULTS) -> str:
    """The page about the engine likewise."""
    bench = _read(results / "bench_llama-3-8b.json")
    parts = _parts_table(bench) + "\n" + _kernels_table(_read(results / "round_llama-3-8b.json"))
    return _fill(page, {"bench": _bench_table(bench), "parts": parts})


def training_block() -> str:
    """Top-1 agreement with the target on held-out prompts, by step of the head on its own features."""
    record = json.loads((SMOLLM2 / "training.json").read_text(encoding="utf-8"))
    rows = [
        [str(epoch["epoch"]), *(f"{share:.1%}" for share in epoch["heldout_agreement"])] for epoch in record["epochs"]
    ]
    last = record["epochs"][-1]
    caption = (
        f"{last['sequences']:,} answers, {last['steps']:,} steps of {record['config']['batch_tokens']:,} tokens on "
        f"{record['provenance']['device']}; top-1 agreement with the target on {last['heldout_rows']:,} held-out rows:"
    )
    return f"{caption}\n\n" + _table(["epoch", *(f"step {n}" for n in range(1, len(rows[0])))], rows)


def _fill(text: str, blocks: dict[str, str]) -> str:
    for name, block in blocks.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"The text must hold the lines {begin.strip()} and {end} once each.")
        head, rest = text.split(begin)
        text = head + begin + block + end + rest.split(end)[1]
    return text


def results_block(results: Path) -> str:
    """Speed, acceptance and equality, as far as they were measured."""
    tables = [
        table
        for table in (
            _bench_table(_read(results / "bench_llama-3-8b.json")),
            *(_demo_table(_read(file)) for file in sorted(results.glob("demo_cpu*.json"))),
            _acceptance_table(_read(results / "acceptance_smollm2.json")),
            _check_table(_read(results / "check_float32.json")),
        )
        if table
    ]
    return "\n".join(tables) or "No result file is there yet; see `examples/readme_tables.py`.\n"


def drafters_block() -> str:
    """What `drafter="auto"` knows."""
    rows = [
        [
            f"`{target}`",
            "shipped with the package" if drafter == SMOLLM2 else f"[`{drafter}`](https://hf.co/{drafter})",
        ]
        for target, drafter in KNOWN.items()
    ]
    return _table(["target", "drafter"], rows)


def _bench_table(bench: dict[str, Any] | None) -> str:
    if bench is None:
        return ""
    arms = {arm["arm"]: arm for arm in bench["arms"]}
    base = "plain-static-compiled" if "plain-static-compiled" in arms else next(iter(arms))
    rows = []
    for name, arm in arms.items():
        parts = [arm.get(part) for part in ("round_ms", "draft_ms", "verify_ms", "rest_ms", "host_gap_ms")]
        rows.append(
            [
                f"`{name}`",
                f"{arm['tokens_per_second']:.0f}",
                f"{arm['decode_tokens_per_second']:.0f}",
                f"{arm['decode_tokens_per_second'] / arms[base]['decode_tokens_per_second']:.2f}x",
                f"{arm['acceptance_length']:.2f}",
                *("" if part is None else f"{part:.2f}" for part in parts),
                f"{arm['share_of_floor']:.0%}",
                str(arm["prompts"]),
            ]
        )
    caption = (
        f"`microspec bench` on {bench['provenance']['device']}: {bench['label']}, "
        f"{_argument(bench, 'dtype')}, batch 1, greedy, {_argument(bench, 'max_new_tokens')} new tokens, "
        f"{_argument(bench, 'repeats')} measured passes over the prompts; milliseconds of a round and its parts:"
    )
    ratio = "x static" if base == "plain-static-compiled" else f"x {base}"
    header = ["arm", "tok/s", "without prefill", ratio, "tokens a round", "round", "draft", "verify", "rest"]
    table = _table([*header, "host gap", "of the floor", "prompts"], rows)
    texts = same_text_lines([arm for name, arm in arms.items() if name == "microspec" and "same_text_as" in arm])
    return "\n\n".join([caption, table.rstrip("\n"), *texts]) + "\n"


def _parts_table(bench: dict[str, Any] | None) -> str:
    """What each part of a MicroSpec round takes beyond the bytes of its weights."""
    if bench is None:
        return ""
    arm = next(arm for arm in bench["arms"] if arm["arm"] == "microspec")
    verify = 1e3 * bench["target_bytes"] / bench["bandwidth"]
    parts = [
        ("target pass", arm["verify_ms"], verify),
        ("six drafter passes and the tree", arm["draft_ms"], arm["floor_ms"] - verify),
        ("everything else on the device", arm["rest_ms"], 0.0),
        ("host", arm["host_gap_ms"], 0.0),
    ]
    parts.sort(key=lambda part: part[2] - part[1])
    parts.append(("round", arm["round_ms"], arm["floor_ms"]))
    rows = [[name, f"{time:.2f}", f"{floor:.2f}", f"{time - floor:.2f}"] for name, time, floor in parts]
    return _table(["part of a round", "ms", "floor", "above it"], rows)


def _kernels_table(profile: dict[str, Any] | None, most: int = 14) -> str:
    if profile is None:
        return ""
    rows = [
        [f"`{kernel['kernel'][:70]}`", str(kernel["calls"]), f"{kernel['us']:.0f}", f"{kernel['share']:.1%}"]
        for kernel in profile["kernels"][:most]
    ]
    caption = f"The kernels of one round, {profile['launches']} launches, the longest first:"
    return f"{caption}\n\n" + _table(["kernel", "calls", "us", "share"], rows)


def _demo_table(demo: dict[str, Any] | None) -> str:
    if demo is None:
        return ""
    tree = demo["tree"]
    caption = (
        f"`microspec demo` on {demo['provenance']['device']}: {demo['model']}, {demo['dtype']}, "
        f"{demo['threads']} threads, {len(demo['prompts'])} prompts, {demo['max_new_tokens']} new tokens, "
        f"medians of {demo['repeats']}, prefill included; {demo['vocabulary']} vocabulary, tree of depth "
        f"{tree['depth']} with {tree['num_nodes']} nodes."
    )
    figures = {
        "plain tok/s": f"{demo['plain_tokens_per_second']:.1f}",
        "MicroSpec tok/s": f"**{demo['tokens_per_second']:.1f}**",
        "speed-up": f"**{demo['speedup']:.2f}x**",
        "tokens a pass": f"{demo['acceptance_length']:.2f}",
        "active rows": f"{demo['mean_active_vocabulary']:,.0f}",
        "coverage": f"{demo['coverage']:.1%}",
        "same text": "yes" if demo["identical"] else "no",
    }
    return f"{caption}\n\n" + _table(list(figures), [list(figures.values())])


def _acceptance_table(acceptance: dict[str, Any] | None) -> str:
    if acceptance is None:
        return ""
    records = acceptance["records"]
    columns = [*(t for t in dict.fromkeys(r["task"] for r in records) if t != OVERALL), OVERALL]
    rows = []
    for vocabulary in dict.fromkeys(r["vocabulary"] for r in records):
        by_task = {r["task"]: r for r in records if r["vocabulary"] == vocabulary}
        lengths = [f"{by_task[task]['acceptance_length']:.2f}" for task in columns]
        overall = by_task[OVERALL]
        rows.append(
            [
                f"`{vocabulary}`",
                *lengths[:-1],
                f"**{lengths[-1]}**",
                f"{overall['mean_active_vocabulary']:,.0f}",
                f"{overall['coverage']:.1%}",
            ]
        )
    caption = (
        f"Tokens a pass by task (`examples/acceptance.py`; {Path(_argument(acceptance, 'target')).name}, "
        f"{_argument(acceptance, 'dtype')}, depth {_argument(acceptance, 'depth')}, "
        f"{_argument(acceptance, 'nodes')} nodes, top-k {_argument(acceptance, 'top_k')}; "
        f"{_num_prompts(records)} prompts, {_argument(acceptance, 'max_new_tokens')} new tokens, greedy):"
    )
    return f"{caption}\n\n" + _table(["draft vocabulary", *columns, "active rows", "coverage"], rows)


def _num_prompts(records: Sequence[dict[str, Any]]) -> int:
    """How many prompts the records over all tasks are of."""
    return max(int(record["prompts"]) for record in records if record["task"] == OVERALL)


def _check_table(check: dict[str, Any] | None) -> str:
    if check is None:
        return ""
    rows = [
        [f"`{r['vocabulary']}`", *(str(r[n]) for n in ("prompts", "identical", "near_ties", "faults"))]
        for r in check["records"]
    ]
    caption = (
        f"Greedy text against plain `generate`, {check['dtype']}, {check['max_new_tokens']} new tokens "
        f"({_argument(check, 'command')}):"
    )
    return f"{caption}\n\n" + _table(
        ["draft vocabulary", "prompts", "same ids", "parted at a near tie", "other differences"], rows
    )


def _argument(result: dict[str, Any], name: str) -> Any:
    return result["provenance"]["arguments"][name]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def main(arguments: Sequence[str]) -> int:
    stale = 0
    pages = {README: render, SMOLLM2 / "README.md": render_card, ENGINE: render_engine}
    for path, make in pages.items():
        current = path.read_text(encoding="utf-8")
        if (wanted := make(current)) == current:
            continue
        if "--check" in arguments:
            print(f"{path.relative_to(ROOT)} is out of date: run without --check.")
            stale = 1
        else:
            path.write_text(wanted, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
