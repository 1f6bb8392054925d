"""Conversations as token ids."""

from __future__ import annotations

from microspec_hf.conversations import chat_ids, user
from tests.cli.conftest import word_tokenizer

TEMPLATE = "{% for m in messages %}w90 {{ m['content'] }} w91 {% endfor %}{% if add_generation_prompt %}w92{% endif %}"


def test_chat_template_is_applied() -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    reply = {"role": "assistant", "content": "w8"}
    chats = [[user("w5")], [user("w6 w7"), reply, user("w9")]]
    wanted = [[90, 5, 91, 92], [90, 6, 7, 91, 90, 8, 91, 90, 9, 91, 92]]
    assert chat_ids(tokenizer, chats) == wanted
    assert tokenizer.apply_chat_template(chats[1], add_generation_prompt=True, return_dict=False) == wanted[1]


def test_conversation_without_a_template() -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = None
    assert chat_ids(tokenizer, [[user("w3"), user("w4")], [user("w5")]]) == [[3, 4], [5]]
