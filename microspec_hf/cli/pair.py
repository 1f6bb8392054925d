"""A target with its tokenizer and drafter, loaded for a command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from microspec_hf import EagleHead, load_drafter
from microspec_hf.cli.console import quiet_loading
from microspec_hf.conversations import Message, chat_ids
from microspec_hf.drafters import find_drafter
from microspec_hf.eagle import check_pair
from microspec_hf.hf import Target
from microspec_hf.models import smollm2


@dataclass(frozen=True)
class Pair:
    """What a command works with; `name` is the target's Hub id, or the last part of its folder."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafter: EagleHead

    def chat_inputs(self, messages: Sequence[Message]) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` `[1, L]` int64 of a conversation, up to where the answer begins."""
        return self._inputs(torch.tensor(chat_ids(self.tokenizer, [messages])))

    def text_inputs(self, text: str) -> dict[str, Tensor]:
        """`input_ids` and `attention_mask` `[1, L]` int64 of a text as it stands."""
        return self._inputs(torch.tensor([self.tokenizer(text)["input_ids"]]))

    def _inputs(self, ids: Tensor) -> dict[str, Tensor]:
        ids = ids.to(self.model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def load_pair(model: str | None, drafter: str, dtype: str, device: str, console: Console) -> Pair:
    """Load target, tokenizer and drafter; a pair that does not fit is refused here.

    Args:
        model: Hub id or folder; None: the small model that needs no hub.
        drafter: Hub id or folder, or `"auto"`.
        dtype: name of a torch dtype, or `"auto"`.
        device: as `device_map`: one device, or `"auto"`.
        console: shows what is being loaded.

    Raises:
        ValueError: target and drafter do not fit, or no drafter is known.
        OSError: a file is missing or cannot be fetched.
    """
    with quiet_loading():
        if model is None:
            with console.status("Fetching SmolLM2-135M-Instruct and converting it (93 MB, only on the first use)"):
                model = str(smollm2())
        _refuse_missing_folder(model)
        with console.status(f"Loading {model}"):
            precision = dtype if dtype == "auto" else getattr(torch, dtype)
            target = AutoModelForCausalLM.from_pretrained(model, dtype=precision, device_map=device).eval()
            tokenizer = AutoTokenizer.from_pretrained(model)
        source = find_drafter(target) if drafter == "auto" else drafter
        with console.status(f"Loading the drafter {source}"):
            head = load_drafter(source, dtype=target.dtype, device=Target(target).head.device)
            check_pair(head, target.config, str(target.config._name_or_path))
    return Pair(name=_short_name(model), model=target, tokenizer=tokenizer, drafter=head)


def _refuse_missing_folder(model: str) -> None:
    """A path that leads nowhere would be taken for a malformed Hub id."""
    looks_like_a_path = model.startswith((".", "/", "~", "\\")) or model.count("/") > 1
    if looks_like_a_path and not Path(model).is_dir():
        raise ValueError(f"There is no folder {model}. Pass a folder with a model, or a Hub id (owner/name).")


def _short_name(model: str) -> str:
    """A Hub id as it is; of a folder the last part, so that no figure carries a machine's paths."""
    parts = model.replace("\\", "/").rstrip("/").split("/")
    return model if len(parts) == 2 and parts[0] not in ("", ".", "..", "~") else parts[-1]
