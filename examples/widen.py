"""Write a widened pair: the cost of a large target and its drafter, with the texts of a small pair.

    python examples/widen.py --target HuggingFaceTB/SmolLM2-135M-Instruct --drafter <folder> \\
        --cost llama-3-8b --output widened

`widened/target` and `widened/drafter` are then loaded like any other pair. Speeds measured with them are those of
Llama-3-8B at the acceptance of SmolLM2, and must be labelled so (see `microspec_hf.evaluation.widened`). One layer
is in memory at a time.

SmolLM2 has 30 layers, more than Llama-3.2-1B and Qwen2-7B. For these costs either keeps exactly one of the two:

    --deep spread    the text: the large target's parameters in 30 layers
    --deep shorten   the cost: SmolLM2 without the layers that matter least, another target with texts of its own
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from measuring import SHORTEN_TEXT, option, require_cost
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from microspec_hf import load_drafter
from microspec_hf.evaluation.widened import COSTS, Widening, match_depth


@dataclass
class Arguments:
    """Command-line options."""

    target: str = option("Hub id or folder of the small target.")
    drafter: str = option("Hub id or folder of its EAGLE head.")
    output: str = option("Folder for target/ and drafter/.")
    cost: str = option(f"Shapes to take: {', '.join(COSTS)}.", default="llama-3-8b")
    deep: str = option("A target with too many layers: refuse, spread or shorten.", default="refuse")
    dtype: str = option("Precision of the pair: bfloat16, float32 or float64.", default="bfloat16")
    seed: int = option("Seed of the weights that nothing live reads.", default=0)


def main(arguments: Arguments) -> None:
    """Widen, layer by layer."""
    require_cost(arguments.cost, arguments.deep)
    # In float32, so that weights are rounded once, to the precision of the pair.
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    head = load_drafter(arguments.drafter, torch.float32, "cpu")
    ids = tokenizer(SHORTEN_TEXT, return_tensors="pt")["input_ids"]
    model, cost = match_depth(model, arguments.cost, arguments.deep, ids)
    widening = Widening(model, head, cost, getattr(torch, arguments.dtype), arguments.seed)

    target, drafter = Path(arguments.output) / "target", Path(arguments.output) / "drafter"
    widening.target_config.save_pretrained(target)
    model.generation_config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    write(target, widening.target_tensors())
    widening.drafter_config.save_pretrained(drafter)
    write(drafter, widening.drafter_tensors())
    print(f"Wrote {target} and {drafter}: {cost}")


def write(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors as they come, a file for each layer and for what lies between layers, and their index."""
    file_of: dict[str, str] = {}
    size = 0
    for number, part in enumerate(parts(tensors)):
        file = f"model-{number:05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(part, file)
        size += sum(tensor.nbytes for tensor in part.values())
    index = {"metadata": {"total_size": size}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def parts(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The tensors of one layer together, each other one by itself."""
    for _, part in groupby(tensors, key=lambda item: _layer(item[0])):
        yield dict(part)


def _layer(name: str) -> str:
    """`model.layers.3` of a tensor of that layer, else its own name."""
    head, found, rest = name.partition("layers.")
    return head + found + rest.partition(".")[0] if found else name


if __name__ == "__main__":
    main(*HfArgumentParser(Arguments).parse_args_into_dataclasses())  # type: ignore[arg-type]
