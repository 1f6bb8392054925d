"""`microspec chat`: a conversation on the terminal."""

from __future__ import annotations

from typing import Annotated

import typer
from transformers import set_seed

from microspec_hf.cli import options
from microspec_hf.cli.compare import answer_with_microspec
from microspec_hf.cli.console import open_console
from microspec_hf.cli.generate import figures_line
from microspec_hf.cli.pair import load_pair
from microspec_hf.cli.streaming import AcceptedTextStreamer
from microspec_hf.conversations import user


def chat(
    model: options.Model = None,
    drafter: options.Drafter = "auto",
    vocabulary: options.Vocabulary = "dynamic",
    static_list: options.StaticList = None,
    tree: options.Tree = None,
    max_new_tokens: options.MaxNewTokens = 512,
    system: Annotated[str | None, typer.Option(help="System prompt; default: the chat template's own.")] = None,
    sample: options.Sample = False,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = None,
) -> None:
    """Talk to a model; accepted drafts are green, and each answer ends with its speed.

    /new forgets the conversation, /exit (or Ctrl-D) leaves.
    """
    console = open_console()
    where = options.default_device(device)
    config = options.speculation(vocabulary, static_list, tree, where)
    arguments = options.sampling(sample, temperature, top_k, top_p)
    pair = load_pair(model, drafter, dtype, where, console)
    if pair.tokenizer.chat_template is None:
        raise ValueError(f"{pair.name} has no chat template, so it is no chat model. Use: microspec generate --raw ...")
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    set_seed(seed)
    console.print(f"{pair.name} listens. /new forgets the conversation, /exit leaves.", style="dim")
    while True:
        try:
            question = console.input("[bold]> ").strip()
        except EOFError:
            console.print()
            return
        if question == "/exit":
            return
        if question == "/new":
            messages = list(beginning)
        elif question:
            messages.append(user(question))
            answer = answer_with_microspec(
                pair.model,
                pair.drafter,
                config,
                pair.chat_inputs(messages),
                max_new_tokens,
                AcceptedTextStreamer(console, pair.tokenizer),
                **arguments,
            )
            console.print(figures_line(answer), style="dim")
            text = pair.tokenizer.decode(answer.ids, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": str(text)})
