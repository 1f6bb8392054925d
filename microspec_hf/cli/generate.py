"""`microspec generate`: one answer, streamed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from transformers import set_seed

from microspec_hf.cli import options
from microspec_hf.cli.compare import Answer, answer_with_microspec
from microspec_hf.cli.console import check_json_file, open_console, write_json
from microspec_hf.cli.pair import load_pair
from microspec_hf.cli.streaming import AcceptedTextStreamer
from microspec_hf.conversations import user
from microspec_hf.evaluation import provenance


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from stdin.")],
    model: options.Model = None,
    drafter: options.Drafter = "auto",
    vocabulary: options.Vocabulary = "dynamic",
    static_list: options.StaticList = None,
    tree: options.Tree = None,
    max_new_tokens: options.MaxNewTokens = 256,
    sample: options.Sample = False,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
    json: options.JsonFile = None,
) -> None:
    """Answer one prompt, with accepted drafts in green, and say how well speculation went."""
    check_json_file(json)
    console = open_console(json)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise ValueError("The prompt is empty. Pass a text, or - to read one from stdin.")
    where = options.default_device(device)
    config = options.speculation(vocabulary, static_list, tree, where)
    arguments = options.sampling(sample, temperature, top_k, top_p)
    pair = load_pair(model, drafter, dtype, where, console)
    inputs = pair.text_inputs(text) if raw else pair.chat_inputs([user(text)])
    set_seed(seed)
    answer = answer_with_microspec(
        pair.model,
        pair.drafter,
        config,
        inputs,
        max_new_tokens,
        AcceptedTextStreamer(console, pair.tokenizer),
        **arguments,
    )
    console.print(figures_line(answer), style="dim")
    assert answer.stats is not None
    record = {
        "text": pair.tokenizer.decode(answer.ids, skip_special_tokens=True),
        "ids": answer.ids,
        "seconds": answer.seconds,
        "tokens_per_second": len(answer.ids) / answer.seconds,
        "acceptance_length": answer.stats.acceptance_length,
        "mean_active_vocabulary": answer.stats.mean_active_vocabulary,
        "stats": answer.stats.to_dict(),
    }
    settings = {"model": pair.name, "vocabulary": vocabulary, "max_new_tokens": max_new_tokens, "seed": seed}
    write_json(json, record | {"provenance": provenance(command="generate", **settings, **arguments)})


def figures_line(answer: Answer) -> str:
    """One line about an answer: how fast, how many tokens a pass, how few rows of the LM head."""
    stats = answer.stats
    assert stats is not None
    return (
        f"{len(answer.ids)} tokens, {len(answer.ids) / answer.seconds:.1f} tok/s, "
        f"{stats.acceptance_length:.2f} tokens a pass, {stats.mean_active_vocabulary:.0f} active rows"
    )
