"""A tiny pair on disk, as the commands load it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from microspec_hf import EagleConfig, EagleHead
from tests import tiny


class PairFolders(NamedTuple):
    """Folders of a target with its tokenizer, and of a drafter for it."""

    target: Path
    drafter: Path

    @property
    def arguments(self) -> list[str]:
        """Options that choose this pair and a small tree."""
        pair = ["--model", str(self.target), "--drafter", str(self.drafter)]
        return [*pair, "--tree", "2,3,6", "--device", "cpu"]


def word_tokenizer(size: int = 101) -> PreTrainedTokenizerFast:
    """One token for each of the words w0, w1, ...; any other word is w0."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w100")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] + ' w1 ' }}{% endfor %}"
    return tokenizer


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory: pytest.TempPathFactory) -> PairFolders:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.tiny_llama()
    target.save_pretrained(folder / "target")
    word_tokenizer().save_pretrained(folder / "target")
    torch.manual_seed(0)
    head = EagleHead(
        EagleConfig(
            hidden_size=48,
            intermediate_size=96,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=101,
            max_position_embeddings=512,
        )
    )
    head.save_pretrained(folder / "drafter")
    return PairFolders(folder / "target", folder / "drafter")
