"""Options that several commands share, and what they mean as a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from microspec_hf import MicroSpecConfig, TreeConfig
from microspec_hf.evaluation import parse_vocabulary
from microspec_hf.evaluation.decoding import GREEDY

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="ID|FOLDER",
        help="Target: Hub id or folder. Default: SmolLM2-135M-Instruct, fetched and converted on first use.",
    ),
]
Drafter = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        metavar="ID|FOLDER",
        help='EAGLE head: Hub id or folder; "auto": the one known for the target.',
    ),
]
Vocabulary = Annotated[
    str,
    typer.Option(
        "--vocabulary",
        metavar="KIND",
        help="Draft vocabulary: full (EAGLE-2), dynamic (MicroSpec), static[:SIZE] (FR-Spec, VocabTrim).",
    ),
]
StaticList = Annotated[
    Path | None,
    typer.Option(
        "--static-list",
        metavar="FILE",
        help="Ids of a static vocabulary: FR-Spec's freq_*.pt or a JSON list.",
    ),
]
Tree = Annotated[
    str | None,
    typer.Option(
        "--tree",
        metavar="auto|DEPTH,TOP_K,NODES",
        help="Draft tree; auto measures this machine. Default: auto on a CPU, the paper's 5,10,60 on a GPU.",
    ),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16", "auto"],
    typer.Option("--dtype", help="Precision of target and drafter; auto: as the target was saved."),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda, cuda:1, auto (spread). Default: cuda if there is one."),
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", min=1, help="Length limit of an answer, in tokens.")
]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the figures with their provenance; - is stdout."),
]
Sample = Annotated[
    bool, typer.Option("--sample", help="Sample from the target's distribution; otherwise greedy decoding.")
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", "-t", help="Sampling temperature; implies --sample.")
]
TopK = Annotated[int | None, typer.Option("--top-k", min=0, help="Sample among the k likeliest tokens; 0: all.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Sample within this share of the probability mass.")]
Seed = Annotated[int, typer.Option("--seed", help="Random seed of sampling.")]


def speculation(
    vocabulary: str, static_list: Path | None = None, tree: str | None = None, device: str = "cpu"
) -> MicroSpecConfig:
    """The configuration that `--vocabulary`, `--static-list` and `--tree` describe.

    Raises:
        ValueError: one of them cannot be read; the sentence names the forms that can.
    """
    if vocabulary.startswith("static") and static_list is None:
        raise ValueError(
            f"--vocabulary {vocabulary} needs --static-list FILE: a released FR-Spec freq_*.pt, or a JSON "
            "list that microspec_hf.vocabulary.save_token_ids wrote."
        )
    return MicroSpecConfig(tree=parse_tree(tree, device), vocabulary=parse_vocabulary(vocabulary, static_list))


def parse_tree(text: str | None, device: str = "cpu") -> TreeConfig | Literal["auto"]:
    """`auto`, or `DEPTH,TOP_K,NODES`; None is the device's default."""
    if text is None:
        return "auto" if device == "cpu" else TreeConfig()
    if text == "auto":
        return "auto"
    try:
        depth, top_k, nodes = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--tree must be auto or DEPTH,TOP_K,NODES such as 5,10,60, got {text!r}.") from None
    return TreeConfig(depth=depth, top_k=top_k, num_nodes=nodes)


def default_device(device: str | None) -> str:
    """The device asked for, else the GPU if there is one."""
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def sampling(sample: bool, temperature: float | None, top_k: int | None, top_p: float | None) -> dict[str, object]:
    """Arguments of `generate` for sampling, or for greedy decoding whatever the model's own defaults are.

    Raises:
        ValueError: top-k or top-p without sampling.
    """
    if not sample and temperature is None:
        if top_k is not None or top_p is not None:
            raise ValueError("--top-k and --top-p shape a distribution to sample from; add --sample or --temperature.")
        return dict(GREEDY)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    return {"do_sample": True} | {name: value for name, value in given.items() if value is not None}
