"""Conversations as a target reads them."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
"""`role` and `content`."""


def user(text: str) -> Message:
    """What a user says."""
    return {"role": "user", "content": text}


def chat_ids(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Sequence[Message]]) -> list[list[int]]:
    """Token ids of conversations in the chat template, up to where the answer begins.

    A tokenizer without a chat template gets the bare texts, a line each.
    """
    if tokenizer.chat_template is None:
        texts = ["\n".join(message["content"] for message in chat) for chat in chats]
        return list(tokenizer(texts)["input_ids"])
    rendered = tokenizer.apply_chat_template([list(chat) for chat in chats], add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])  # the template has written them
