"""What the measuring examples share: options, processes, devices, loading, result files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from microspec_hf import EagleHead, MicroSpecConfig, TreeConfig, load_drafter
from microspec_hf.eagle import check_pair
from microspec_hf.evaluation import Prompt, parse_vocabulary, provenance, read_prompts, select_prompts
from microspec_hf.evaluation.widened import COSTS

RESULTS = Path(__file__).parent / "results"
Item = TypeVar("Item")


def option(help: str, default: Any = MISSING) -> Any:
    """A field of a dataclass that `HfArgumentParser` reads."""
    return HfArg(default=default, help=help)


@dataclass
class Options:
    """Options of every measurement: a pair, prompts, draft vocabularies and a tree."""

    target: str = option("Hub id or folder of the target.")
    drafter: str = option("Hub id or folder of its EAGLE head.")
    data: str | None = option("Folder with Spec-Bench and HumanEval, or one file of prompts.", default=None)
    tasks: str | None = option("Tasks, with commas between (default: all).", default=None)
    per_task: int | None = option("First prompts of each task (default: all).", default=None)
    max_new_tokens: int = option("Length limit of an answer, in tokens.", default=128)
    vocabularies: str = option("full, dynamic, static:SIZE; commas between.", default="full,dynamic")
    static_list: str | None = option("File with the ids of static vocabularies.", default=None)
    depth: int = option("Depth of the tree.", default=5)
    nodes: int = option("Nodes of the tree, root included.", default=60)
    top_k: int = option("Children of a node.", default=10)
    dtype: str = option("Precision: float32, float64, bfloat16 or float16.", default="float32")
    device: str | None = option("cpu or cuda (default: cuda if there is one).", default=None)
    output: str | None = option("Result file (default: a name in examples/results).", default=None)

    def configurations(self) -> dict[str, MicroSpecConfig]:
        """One for each of the vocabularies, by its name; every pass drafts, whatever times are measured."""
        tree = TreeConfig(depth=self.depth, top_k=self.top_k, num_nodes=self.nodes)
        names = self.vocabularies.split(",")
        return {name: MicroSpecConfig(tree, parse_vocabulary(name, self.static_list), fallback=False) for name in names}

    def prompts(self) -> list[Prompt]:
        """The prompts of the tasks asked for."""
        if self.data is None:
            raise SystemExit("--data is needed: the folder with the prompts of Spec-Bench and HumanEval.")
        tasks = self.tasks.split(",") if self.tasks else None
        return select_prompts(read_prompts(self.data), tasks, self.per_task)


SHORTEN_TEXT = (
    "Explain in a few sentences how a bicycle stays upright, and write a Python function that reverses a list."
)
"""The text on which layers of a target are compared that `--deep shorten` leaves out."""


class Pair(NamedTuple):
    """What is measured."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: EagleHead


def start() -> PartialState:
    """This process among those that `accelerate launch` or `torchrun` started.

    They exchange results over the CPU, so that more processes than GPUs are possible: a small model leaves a
    GPU idle between two kernels, time that other processes can use.
    """
    # Without a long timeout a process that is done early gives up on the others.
    return PartialState(cpu=True, timeout=timedelta(days=1))


def share(state: PartialState, items: Sequence[Item]) -> list[Item]:
    """Every n-th item: the part of this process."""
    return list(items[state.process_index :: state.num_processes])


def load(state: PartialState, options: Options) -> Pair:
    """Target, tokenizer and drafter on the device of this process; a pair that does not fit is refused."""
    dtype = precision(options.dtype)
    device = _device(state, options.device)
    model: Any = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype)
    head = load_drafter(options.drafter, dtype=dtype, device=device)
    check_pair(head, model.config, str(model.config._name_or_path))
    return Pair(model.to(device).eval(), AutoTokenizer.from_pretrained(options.target), head)


def precision(name: str) -> torch.dtype:
    """The dtype that --dtype names."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SystemExit(f"--dtype must name a precision such as float32 or bfloat16, got {name!r}.")
    return dtype


def require_cost(cost: str, deep: str) -> None:
    """Refuse what --cost and --deep cannot mean."""
    if deep not in ("refuse", "spread", "shorten"):
        raise SystemExit(f"--deep is refuse, spread or shorten, got {deep!r}.")
    if cost not in COSTS:
        raise SystemExit(f"--cost is one of {', '.join(COSTS)}, got {cost!r}.")


def write_result(output: Path, result: dict[str, Any], /, **arguments: Any) -> None:
    """Write a result with where it comes from."""
    output.parent.mkdir(parents=True, exist_ok=True)
    record = {"provenance": provenance(**arguments)} | result
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"Wrote {output}")


def _device(state: PartialState, kind: str | None) -> torch.device:
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda":  # GPUs are dealt out in turn
        return torch.device("cuda", state.local_process_index % torch.cuda.device_count())
    return torch.device(kind)
