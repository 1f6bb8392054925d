"""Answering every turn of a prompt under one arm, timed, as a record of the field's form.

A record is what Spec-Bench's `evaluation` writes: `question_id`, `category`, and in `choices[0]` for each turn its
text (`turns`), `new_tokens`, `wall_time` in seconds with the prefill, `decoding_steps` (target passes after the
prefill), and `accept_lengths`, the tokens that each pass of all turns emitted. Beside these stand the arm, `ids`,
`prompt_tokens` and `stats` (`SpeculationStats`; None in a plain arm) of each turn.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from microspec_hf.conversations import Message, chat_ids, user
from microspec_hf.eagle import EagleHead
from microspec_hf.evaluation.arms import Arm
from microspec_hf.evaluation.decoding import GREEDY
from microspec_hf.evaluation.prompts import Prompt, prompt_ids
from microspec_hf.stats import SpeculationStats


@dataclass(frozen=True)
class Decoding:
    """How all arms decode.

    Args:
        max_new_tokens: length limit of each turn's answer.
        temperature: 0 is greedy; otherwise the whole distribution is sampled from.
        seed: of each prompt, when sampling.
    """

    max_new_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}.")

    def arguments(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        if not self.temperature:
            return GREEDY | {"max_new_tokens": self.max_new_tokens}
        sampling = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        return sampling | {"max_new_tokens": self.max_new_tokens}


class Answerer:
    """A target with its tokenizer and drafter, ready to answer.

    Args:
        model, tokenizer, drafter: as loaded.
        decoding: how.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: EagleHead, decoding: Decoding
    ):
        self.model: Any = model
        self.tokenizer, self.drafter, self.decoding = tokenizer, drafter, decoding
        self.context: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def fits(self, ids: Tensor) -> bool:
        """Whether a prompt `[1, L]` leaves room for a whole answer in the target's context."""
        return self.context is None or ids.shape[1] + self.decoding.max_new_tokens <= self.context

    def first_ids(self, prompt: Prompt) -> Tensor:
        """int64 `[1, L]`, what the first turn gives the target to read."""
        return prompt_ids(self.tokenizer, prompt)

    def warm_up(self, arm: Arm, prompt: Prompt, max_new_tokens: int = 16) -> None:
        """Answer a little under an arm, so that nothing is compiled, captured or gathered for the first time later."""
        self._generate(arm, self.first_ids(prompt), max_new_tokens=min(max_new_tokens, self.decoding.max_new_tokens))

    def answer(self, arm: Arm, prompt: Prompt) -> dict[str, Any]:
        """The record of a prompt, see the module's head. A later turn without room in the context ends it."""
        chat: list[Message] = []
        turns: list[dict[str, Any]] = []
        for number, text in enumerate(prompt.turns):
            chat.append(user(text))
            ids = torch.tensor(chat_ids(self.tokenizer, [chat]))
            if not self.fits(ids):
                break
            set_seed(self.decoding.seed + number)
            started = time.perf_counter()
            output = self._generate(arm, ids)
            new = output.sequences[0, ids.shape[1] :].tolist()  # waits for the device
            seconds = time.perf_counter() - started
            answer = self.tokenizer.decode(new, skip_special_tokens=True)
            stats = getattr(output, "stats", None)
            turns.append(_turn(str(answer), new, ids.shape[1], seconds, stats[0] if stats else None))
            chat.append({"role": "assistant", "content": str(answer)})
        choice = {name: [turn[name] for turn in turns] for name in turns[0]} if turns else {}
        accepted = [length for turn in turns for length in turn["accept_lengths"]]
        return {
            "question_id": prompt.id,
            "category": prompt.task,
            "arm": arm.name,
            "choices": [{"index": 0, **choice, "accept_lengths": accepted}],
            "turns_left_out": len(prompt.turns) - len(turns),
        }

    def _generate(self, arm: Arm, ids: Tensor, **changes: Any) -> Any:
        arguments = self.decoding.arguments() | changes
        if arm.config is not None:
            arguments |= {"custom_generate": "microspec", "drafter": self.drafter, "microspec": arm.config}
        elif arm.is_static:
            arguments |= {"cache_implementation": "static"}
        ids = ids.to(self.model.device)
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **arguments)


def turn_stats(record: dict[str, Any]) -> list[SpeculationStats]:
    """The counters of each turn of a record; for a plain arm those of passes that emit one token each."""
    known = {field.name for field in dataclasses.fields(SpeculationStats)}
    choice = record["choices"][0]
    stats = []
    for written, count in zip(choice.get("stats", []), choice.get("new_tokens", []), strict=True):
        plain = {"new_tokens": count, "emitted": [1] * max(0, count - 1)}
        stats.append(SpeculationStats(**{k: v for k, v in (written or plain).items() if k in known}))
    return stats


def _turn(
    text: str, new: list[int], prompt_tokens: int, seconds: float, stats: SpeculationStats | None
) -> dict[str, Any]:
    emitted = [1] * max(0, len(new) - 1) if stats is None else list(stats.emitted)
    return {
        "turns": text,
        "decoding_steps": len(emitted),
        "new_tokens": len(new),
        "wall_time": seconds,
        "accept_lengths": emitted,
        "ids": new,
        "prompt_tokens": prompt_tokens,
        "stats": None if stats is None else dataclasses.asdict(stats),
    }
