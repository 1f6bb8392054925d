"""Tables, analyses, the page and the comparison, on results whose figures are known by hand."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from microspec_hf.cli import app
from microspec_hf.evaluation.analyses import (
    acceptance_by_depth,
    coverage_by_size,
    draft_time,
    oracle_speed,
    sensitivity,
)
from microspec_hf.evaluation.arms import Resources
from microspec_hf.evaluation.comparison import compare_results
from microspec_hf.evaluation.figures import LINES, MARKERS, _styles
from microspec_hf.evaluation.published import PUBLISHED
from microspec_hf.evaluation.report import write_report
from microspec_hf.evaluation.results import arm_figures, main_table, read_results
from tests.evaluation.results import answer, write_results

PROMPTS = [("a", "math"), ("b", "math"), ("c", "code")]


@pytest.fixture
def resources(tmp_path: Path) -> Resources:
    (tmp_path / "ids.json").write_text(json.dumps(list(range(20_000))))
    return Resources(frequency_list=str(tmp_path / "ids.json"), calibrated_list=str(tmp_path / "ids.json"))


@pytest.fixture
def folder(tmp_path: Path, resources: Resources) -> Path:
    """Three prompts; MicroSpec emits 2 + 4, 3 and 1 + 1 tokens in rounds, the whole head 3 + 3, 4 and 2."""
    emitted = {
        "eagle2": [[3, 3], [4], [2]],
        "fr-spec-8k": [[2, 2], [2], [1]],
        "fr-spec-16k": [[3, 2], [3], [1]],
        "microspec": [[2, 4], [3], [1, 1]],
        "microspec:max_rows=1024": [[2, 2], [3], [1, 1]],
    }
    seconds = {"eagle2": 0.5, "fr-spec-8k": 0.4, "fr-spec-16k": 0.4, "microspec": 0.25, "microspec:max_rows=1024": 0.3}
    records = {
        "plain": [answer(n, t, "plain", None, 2.0) for n, t in PROMPTS],
        "plain-static": [answer(n, t, "plain-static", None, 1.0) for n, t in PROMPTS],
    }
    for arm, rounds in emitted.items():
        records[arm] = [
            answer(
                n, t, arm, r, seconds[arm], coverage=0.5 if arm == "microspec" and n == "a" else 1.0, active=len(arm)
            )
            for (n, t), r in zip(PROMPTS, rounds, strict=True)
        ]
    return write_results(tmp_path / "results", records, resources)


def test_figures_of_an_arm(folder: Path) -> None:
    figures = arm_figures(read_results(folder).records["microspec"])
    assert figures["acceptance_length"] == 11 / 5
    assert figures["mean_acceptance_length"] == pytest.approx((3 + 3 + 1) / 3)
    assert (figures["prompts"], figures["turns"], figures["rounds"]) == (3, 3, 5)
    assert figures["coverage"] == pytest.approx((0.5 * 6 + 3 + 2) / 11)
    assert figures["tokens_per_second"] == pytest.approx((7 + 4 + 3) / 0.75)
    assert figures["mean_tokens_per_second"] == pytest.approx((7 + 4 + 3) / 0.25 / 3)
    assert figures["prefill_seconds"] == pytest.approx(0.25 / 4)
    assert figures["prefill_share"] == pytest.approx(0.25)
    plain = arm_figures(read_results(folder).records["plain"])
    assert (plain["acceptance_length"], plain["prefill_share"]) == (1.0, None)


def test_table(folder: Path) -> None:
    rows = {(row["arm"], row["task"]): row for row in main_table(read_results(folder))}
    assert len(rows) == 7 * 3
    ours = rows["microspec", "all"]
    assert ours["relative_acceptance"] == pytest.approx((11 / 5) / (12 / 4))
    assert ours["baseline"] == "plain-static"  # the faster one
    assert ours["speedup"] == pytest.approx(ours["mean_tokens_per_second"] / 11)
    assert rows["plain", "all"]["speedup"] == pytest.approx(0.5)
    assert rows["microspec", "math"]["acceptance_length"] == 9 / 3
    assert rows["microspec", "code"]["relative_acceptance"] == 0.5


def test_table_without_anything_to_compare_with(tmp_path: Path) -> None:
    records = {"microspec": [answer("a", "math", "microspec", [2], 1.0)]}
    results = read_results(write_results(tmp_path / "r", records, Resources()))
    (row, _) = main_table(results)
    assert oracle_speed(results) == []
    assert "there is no plain arm to compare with" in write_report(tmp_path / "r").read_text()
    assert (row["relative_acceptance"], row["speedup"], row["baseline"]) == (None, None, None)


def test_coverage_by_size(tmp_path: Path, resources: Resources) -> None:
    records = {
        "plain": [
            answer("a", "math", "plain", None, 1.0, ids=[99, 5, 5, 7]),
            answer("b", "code", "plain", None, 1.0, ids=[99, 600]),
        ],
        "microspec": [
            answer("a", "math", "microspec", [3], 1.0, coverage=0.5, active=40),
            answer("b", "code", "microspec", [1], 1.0, coverage=1.0, active=80),
        ],
    }
    results = read_results(write_results(tmp_path / "r", records, resources))
    rows = coverage_by_size(results, [5, 8, 600, 7], sizes=(1, 3, 4, 50))
    found = {(r["vocabulary"], r["task"], r["rows"]): r["coverage"] for r in rows}
    assert found == {
        ("list", "math", 1): pytest.approx(2 / 3),  # 5 5 of 5 5 7; no draft precedes 99
        ("list", "math", 3): pytest.approx(2 / 3),
        ("list", "math", 4): 1.0,
        ("list", "code", 1): 0.0,
        ("list", "code", 3): 1.0,
        ("list", "code", 4): 1.0,
        ("list", "all", 1): 0.5,
        ("list", "all", 3): 0.75,
        ("list", "all", 4): 1.0,
        ("microspec", "math", 40.0): 0.5,
        ("microspec", "code", 80.0): 1.0,
        ("microspec", "all", 60.0): pytest.approx(0.625),
    }


def test_acceptance_by_depth(folder: Path) -> None:
    rows = acceptance_by_depth(read_results(folder))
    shares = [row["share"] for row in rows if (row["arm"], row["task"]) == ("microspec", "all")]
    assert shares == [3 / 5, 2 / 5, 1 / 5]
    assert {row["arm"] for row in rows}.isdisjoint({"plain", "plain-static"})


def test_oracle_speed(folder: Path) -> None:
    rows = {row["arm"]: row for row in oracle_speed(read_results(folder))}
    assert list(rows) == ["eagle2", "fr-spec-8k", "fr-spec-16k", "microspec", "microspec:max_rows=1024"]
    full = rows["eagle2"]
    assert full["oracle_tokens_per_second"] == pytest.approx(full["tokens_per_second"])
    small = rows["fr-spec-8k"]
    # A quarter is prefill; rounds that emit 3 tokens and not 7 / 4 leave 7 / 12 of the rest.
    assert small["oracle_tokens_per_second"] == pytest.approx(small["tokens_per_second"] / (0.25 + 0.75 * 7 / 12))


def test_draft_time(folder: Path, tmp_path: Path) -> None:
    assert draft_time(read_results(folder)) == []  # it was not measured
    assert "## Drafting" not in write_report(folder).read_text()
    records = {
        arm: [answer("a", "math", arm, [2, 2], 1.0, draft_ms=4 * ms), answer("b", "code", arm, [3], 1.0, draft_ms=ms)]
        for arm, ms in (("eagle2", 10.0), ("microspec", 4.0))
    }
    timed = write_results(tmp_path / "timed", records, Resources())
    rows = {(row["arm"], row["task"]): row for row in draft_time(read_results(timed))}
    assert rows["microspec", "math"]["draft_ms"] == pytest.approx(16)
    assert rows["microspec", "all"]["draft_ms"] == pytest.approx((2 * 16 + 4) / 3)  # a round counts, not a prompt
    assert rows["microspec", "all"]["change"] == pytest.approx(-0.6)
    text = write_report(timed).read_text()
    assert "| `microspec` | 16.00 | 4.00 | 12.00 | -60.0% |" in text
    assert re.search(r"drafting takes 51\.6% less time than that of eagle2.* \| reproduced \|", text)
    assert re.search(r"drafting takes 20\.3% less time than that of fr-spec-32k.* \| not measured \|", text)
    assert (timed / "figures" / "draft_time.png").exists()


def test_sensitivity(folder: Path) -> None:
    rows = sensitivity(read_results(folder))
    assert [(r["base"], r["option"], r["value"], r["acceptance_length"]) for r in rows] == [
        ("fr-spec", "size", 8192, pytest.approx(7 / 4)),
        ("fr-spec", "size", 16384, pytest.approx(9 / 4)),
        ("microspec", "max_rows", 1024, pytest.approx(9 / 5)),
        ("microspec", "max_rows", 3072, pytest.approx(11 / 5)),
    ]


def test_page(folder: Path, tmp_path: Path) -> None:
    page = write_report(folder, list(range(20_000)), tmp_path / "page")
    text = page.read_text()
    assert page == tmp_path / "page" / "report.md"
    assert "| `microspec` | 3.00 | 1.00 | 2.20 | 73.3% |" in text
    assert "Speed-up: against `plain-static`, the fastest plain arm." in text
    assert "2 prompts longer than the context were skipped, and 3 later turns had no room" in text
    for row in PUBLISHED:  # the papers' figures beside ours
        assert re.search(rf"\| `{row.arm}` \| {row.acceptance_length:.2f} \|", text)
    assert "| `microspec` | 3.59 | 94.5% | 2.28x | 2.20 | 73.3% |" in text
    assert "| `dynaspec-27k` | 3.78 | 99.5% | 2.19x | not measured |" in text
    verdicts = dict(re.findall(r"^\| (.+?) \| (reproduced|\*\*not reproduced\*\*|not measured) \|", text, re.MULTILINE))
    assert verdicts["MicroSpec accepts more than fr-spec-8k"] == "reproduced"
    assert verdicts["MicroSpec accepts more than fr-spec-16k"] == "**not reproduced**"
    assert verdicts["MicroSpec is faster than eagle2"] == "reproduced"
    assert verdicts["MicroSpec is faster than coral-32k"] == "not measured"
    keeps = next(verdict for claim, verdict in verdicts.items() if "paper's share" in claim)
    assert keeps == "**not reproduced**"
    links = re.findall(r"\]\((figures/[^)]+)\)", text)
    assert len(links) == 2 * 5
    for link in links:
        file = tmp_path / "page" / link
        assert file.stat().st_size > 0
        if file.suffix == ".png":
            assert file.read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "page" / "table.csv").open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == 7 * 3
    ours = next(row for row in written if (row["arm"], row["task"]) == ("microspec", "all"))
    assert float(ours["acceptance_length"]) == 11 / 5
    assert next(row for row in written if row["arm"] == "plain")["prefill_share"] == ""


def test_the_same_results_give_the_same_files(folder: Path, tmp_path: Path) -> None:
    for name in "ab":
        write_report(folder, None, tmp_path / name)
    files = sorted(file.relative_to(tmp_path / "a") for file in (tmp_path / "a").rglob("*.*"))
    assert len(files) > 5
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_lines_differ_without_colour() -> None:
    styles = [style for style, _ in zip(_styles(), range(24), strict=False)]
    assert len({(style["linestyle"], style["marker"]) for style in styles}) == len(LINES) * len(MARKERS) == 24


def test_broken_results(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no finished evaluation .*examples/evaluate\.py"):
        read_results(tmp_path)
    file = folder / "microspec.jsonl"
    right = file.read_text()
    file.write_text(right + '{"question_id": "d"}\n')
    with pytest.raises(ValueError, match=r"microspec\.jsonl, line 4: no record of an answer \(KeyError"):
        read_results(folder)
    file.write_text(right + '{"question\n')
    with pytest.raises(ValueError, match=r"microspec\.jsonl, line 4: no record"):
        read_results(folder)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks microspec\.jsonl"):
        read_results(folder)
    (folder / "provenance.json").write_text("{}")
    with pytest.raises(ValueError, match="names no arms"):
        read_results(folder)


# The comparison ------------------------------------------------------------------------------------------------------


def paired(tmp_path: Path, name: str, lengths: list[int], seconds: float) -> Any:
    rows = [answer(f"p{i}", "math", "eagle2", [n, n + 1], seconds) for i, n in enumerate(lengths)]
    return read_results(write_results(tmp_path / name, {"eagle2": rows}, Resources()))


def test_comparison_is_paired(tmp_path: Path) -> None:
    """Prompts differ far more from one another than the two runs do on each; pairs see the difference all the same."""
    lengths = [1, 2, 3, 1, 2, 3, 1, 3] * 3
    one = paired(tmp_path, "one", lengths, 1.0)
    other = paired(tmp_path, "other", [n + (i % 2) for i, n in enumerate(lengths)], 0.5)
    (row,) = compare_results(one, other)
    acceptance = row["acceptance"]
    before, after = sum(2 * n + 1 for n in lengths), sum(2 * (n + i % 2) + 1 for i, n in enumerate(lengths))
    assert acceptance["one"] == before / 48
    assert acceptance["ratio"] == pytest.approx(after / before)
    assert 1 < acceptance["low"] < acceptance["ratio"] < acceptance["high"]
    assert acceptance["is_clear"]
    assert row["speed"]["ratio"] == pytest.approx(2 * (after + 24) / (before + 24))
    assert (row["prompts"], row["identical"]) == (24, 12)
    assert compare_results(one, other) == [row]  # reproducible
    (wider,) = compare_results(one, other, confidence=0.999)
    assert wider["acceptance"]["low"] < acceptance["low"]


def test_interval_covers_what_it_promises(tmp_path: Path) -> None:
    """Two runs over prompts of one law: 1 lies in the 90 % interval in about 90 % of the cases."""
    import random

    generator = random.Random(0)
    inside = 0
    for number in range(60):
        both = [
            paired(tmp_path, f"{number}{side}", [generator.choice([1, 2, 3]) for _ in range(40)], 1.0) for side in "ab"
        ]
        (row,) = compare_results(*both, confidence=0.9, resamples=500)
        inside += not row["acceptance"]["is_clear"]
    assert 46 <= inside <= 60  # 54 expected, standard deviation 2.3


def test_the_same_results_do_not_differ(folder: Path) -> None:
    results = read_results(folder)
    for row in compare_results(results, results):
        assert row["identical"] == row["prompts"] == 3
        assert row["acceptance"]["ratio"] == row["acceptance"]["low"] == row["acceptance"]["high"] == 1.0
        assert not row["acceptance"]["is_clear"]


def test_impossible_comparisons(folder: Path, tmp_path: Path) -> None:
    results = read_results(folder)
    single = {"eagle2": [answer("a", "math", "eagle2", [2], 1.0)]}
    small = read_results(write_results(tmp_path / "small", single, Resources()))
    foreign = {"eagle2:depth=2": single["eagle2"]}
    other = read_results(write_results(tmp_path / "other", foreign, Resources()))
    with pytest.raises(ValueError, match="1 prompts in common; an interval needs at least 2"):
        compare_results(results, small)
    with pytest.raises(ValueError, match="results and other have no arm in common"):
        compare_results(results, other)
    with pytest.raises(ValueError, match=r"other has no arm eagle2\. Its arms: eagle2:depth=2"):
        compare_results(results, other, [("eagle2", "eagle2")])
    with pytest.raises(ValueError, match="confidence must lie between 0 and 1, got 95"):
        compare_results(results, results, confidence=95)


# The commands --------------------------------------------------------------------------------------------------------


def test_commands(folder: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    written = runner.invoke(app, ["report", str(folder)])
    assert written.exit_code == 0, written.output
    assert (folder / "report.md").exists()
    compared = runner.invoke(
        app,
        ["compare", str(folder), str(folder), "--arms", "eagle2,microspec", "--arms", "eagle2", "--json", "-"],
    )
    assert compared.exit_code == 0, compared.output
    record = json.loads(compared.stdout)
    assert [(row["one"], row["other"]) for row in record["rows"]] == [("eagle2", "microspec"), ("eagle2", "eagle2")]
    assert record["rows"][0]["acceptance"]["ratio"] == pytest.approx((11 / 5) / 3)
    assert str(tmp_path) not in json.dumps(record["provenance"])
    assert "results over results, 95% intervals" in compared.stderr
    refused = runner.invoke(app, ["report", str(tmp_path)])
    assert refused.exit_code == 2
    assert "holds no finished evaluation" in refused.stderr
