"""A tiny target with a tokenizer in a folder, and prompts for it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import tiny

EOS = 1


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose token i is the word wi; some of its answers end early, by w1."""
    folder = tmp_path_factory.mktemp("target")
    model = tiny.tiny_llama()
    model.config.eos_token_id = model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = EOS
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(model.config.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{EOS}").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 prompts of 3 to 40 words, every fourth of them in another language."""
    rng = random.Random(0)
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {
            "prompt": " ".join(f"w{rng.randrange(2, 101)}" for _ in range(rng.randrange(3, 41))),
            "lang": "de" if number % 4 == 3 else "en",
        }
        for number in range(40)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
