"""The examples run, and the README says what the result files say."""

from __future__ import annotations

import json
import runpy
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import microspec_hf
from microspec_hf import EagleConfig, EagleHead
from microspec_hf.drafters import KNOWN, SMOLLM2

ROOT = Path(__file__).parent.parent
HUB_FOLDER = ROOT / "examples" / "hub" / "microspec"


@pytest.fixture(scope="module")
def readme_tables() -> ModuleType:
    spec = spec_from_file_location("readme_tables", ROOT / "examples" / "readme_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def head() -> EagleHead:
    """A random drafter for the tiny Llama."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    return EagleHead(EagleConfig(**sizes, head_dim=8, vocab_size=101, max_position_embeddings=512)).eval()


def test_quickstart(smollm2_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"), run_name="__main__")
    shown = capsys.readouterr().out
    first, rest = shown.split("MicroSpec, ")
    plain = first.partition(":\n")[2]
    assert first.startswith("plain, ")
    assert len(plain) > 100
    assert rest.partition(":\n")[2].startswith(plain)  # the same text
    assert "tokens a pass" in rest


def test_hub_folder_gives_the_plain_text(tiny_llama: PreTrainedModel, head: EagleHead) -> None:
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    expected = tiny_llama.generate(ids, max_new_tokens=12, do_sample=False)
    output: Any = tiny_llama.generate(
        ids,
        max_new_tokens=12,
        do_sample=False,
        custom_generate=str(HUB_FOLDER),
        trust_remote_code=True,
        drafter=head,
        microspec={"tree": {"depth": 2, "top_k": 3, "num_nodes": 6}, "vocabulary": "full"},
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, expected)
    assert output.stats[0].tree == {"depth": 2, "top_k": 3, "num_nodes": 6}


def test_hub_folder_serves_streamers_and_stop_strings(tiny_llama: PreTrainedModel, head: EagleHead) -> None:
    seen: list[int] = []

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            seen.extend(value.flatten().tolist())

        def end(self) -> None:
            seen.append(-1)

    ids = torch.tensor([[2, 7, 1]])
    output = tiny_llama.generate(
        ids,
        max_new_tokens=6,
        do_sample=False,
        streamer=Streamer(),
        custom_generate=str(HUB_FOLDER),
        trust_remote_code=True,
        drafter=head,
    )
    assert seen == [*output[0].tolist(), -1]
    with pytest.raises(ValueError, match="tokenizer"):
        tiny_llama.generate(
            ids, stop_strings=["x"], custom_generate=str(HUB_FOLDER), trust_remote_code=True, drafter=head
        )


def test_hub_folder_is_not_run_without_trust(tiny_llama: PreTrainedModel, head: EagleHead) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        tiny_llama.generate(torch.tensor([[1]]), custom_generate=str(HUB_FOLDER), trust_remote_code=False, drafter=head)


def test_hub_requirements_are_met_by_this_release() -> None:
    requirement = (HUB_FOLDER / "custom_generate" / "requirements.txt").read_text().strip()
    assert requirement == f"microspec_hf>={microspec_hf.__version__}"


def test_hub_card_is_tagged_as_transformers_expects() -> None:
    assert "  - custom_generate\n" in (HUB_FOLDER / "README.md").read_text().split("---")[1]


def test_readme_is_what_the_result_files_say(readme_tables: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == readme_tables.render(readme), "run: python examples/readme_tables.py"


def test_readme_names_every_known_drafter(readme_tables: ModuleType) -> None:
    block = readme_tables.drafters_block()
    assert len(block.splitlines()) == len(KNOWN) + 2
    assert all(f"`{target}`" in block for target in KNOWN)
    assert all(str(drafter) in block for drafter in KNOWN.values() if drafter != SMOLLM2)
    assert str(SMOLLM2) not in block


def test_tables_show_the_figures_of_the_files(readme_tables: ModuleType, tmp_path: Path) -> None:
    def write(name: str, result: dict[str, Any], **arguments: Any) -> None:
        provenance = {"arguments": arguments, "device": "A CPU"}
        (tmp_path / name).write_text(json.dumps(result | {"provenance": provenance}))

    assert "No result file" in readme_tables.results_block(tmp_path)
    demo = {
        "model": "m",
        "dtype": "float32",
        "threads": 2,
        "max_new_tokens": 48,
        "repeats": 3,
        "identical": True,
    }
    demo |= {"vocabulary": "dynamic", "prompts": [{}] * 5, "tree": {"depth": 3, "num_nodes": 12}}
    demo |= {"plain_tokens_per_second": 20.04, "tokens_per_second": 40.08, "speedup": 2.0}
    demo |= {"acceptance_length": 3.456, "mean_active_vocabulary": 1234.5, "coverage": 0.9612}
    write("demo_cpu.json", demo)
    row = "| 20.0 | **40.1** | **2.00x** | 3.46 | 1,234 | 96.1% | yes |"
    assert row in readme_tables.results_block(tmp_path).splitlines()
    write("demo_cpu_other.json", demo | {"speedup": 1.25})
    lines = readme_tables.results_block(tmp_path).splitlines()
    assert row in lines
    assert row.replace("2.00x", "1.25x") in lines

    records = [
        {"vocabulary": v, "task": t, "acceptance_length": length, "prompts": 2}
        | {"coverage": 0.5, "mean_active_vocabulary": 600.0}
        for v in ("full", "dynamic")
        for t, length in (("qa", 2.0), ("all", 3.0))
    ]
    settings = {
        "target": "x/m",
        "dtype": "float32",
        "depth": 5,
        "nodes": 60,
        "top_k": 10,
        "max_new_tokens": 128,
    }
    write("acceptance_smollm2.json", {"records": records}, **settings)
    lines = readme_tables.results_block(tmp_path).splitlines()
    assert "| draft vocabulary | qa | all | active rows | coverage |" in lines
    assert "| `full` | 2.00 | **3.00** | 600 | 50.0% |" in lines

    counts = {"prompts": 644, "identical": 643, "near_ties": 1, "faults": 0}
    check = {"dtype": "float32", "max_new_tokens": 64, "records": [{"vocabulary": "full"} | counts]}
    write("check_float32.json", check, command="check")
    assert "| `full` | 644 | 643 | 1 | 0 |" in readme_tables.results_block(tmp_path).splitlines()


def test_bench_tables_show_the_figures_of_the_files(readme_tables: ModuleType, tmp_path: Path) -> None:
    plain = {"arm": "plain-stock", "tokens_per_second": 40.0, "decode_tokens_per_second": 50.0}
    plain |= {"acceptance_length": 1.0, "round_ms": 20.0, "share_of_floor": 0.2, "prompts": 1}
    ours = {"arm": "microspec", "tokens_per_second": 400.0, "decode_tokens_per_second": 450.0}
    ours |= {"acceptance_length": 3.636, "round_ms": 8.08, "share_of_floor": 0.5, "prompts": 7, "floor_ms": 4.0}
    ours |= {"draft_ms": 1.5, "verify_ms": 5.0, "rest_ms": 1.25, "host_gap_ms": 0.33}
    arguments = {"dtype": "bfloat16", "max_new_tokens": 256, "repeats": 2}
    provenance = {"arguments": arguments, "device": "A GPU"}
    bench = {"label": "a pair", "arms": [plain, ours], "target_bytes": 12e9, "bandwidth": 4e12}
    (tmp_path / "bench_llama-3-8b.json").write_text(json.dumps(bench | {"provenance": provenance}))
    kernels = [{"kernel": "gemm", "calls": 32, "us": 2000.0, "share": 0.8}]
    (tmp_path / "round_llama-3-8b.json").write_text(json.dumps({"kernels": kernels, "launches": 500}))
    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    lines = readme_tables.render_engine(page, tmp_path).splitlines()
    assert "| `plain-stock` | 40 | 50 | 1.00x | 1.00 | 20.00 |  |  |  |  | 20% | 1 |" in lines
    assert "| `microspec` | 400 | 450 | 9.00x | 3.64 | 8.08 | 1.50 | 5.00 | 1.25 | 0.33 | 50% | 7 |" in lines
    assert any("| x plain-stock |" in line for line in lines)
    assert "| target pass | 5.00 | 3.00 | 2.00 |" in lines
    assert "| `gemm` | 32 | 2000 | 80.0% |" in lines


def test_readme_without_its_markers_is_refused(readme_tables: ModuleType) -> None:
    with pytest.raises(ValueError, match="results:begin"):
        readme_tables.render("# no markers\n")
