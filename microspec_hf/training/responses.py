"""The target's own answers to prompts: what an EAGLE head is trained on."""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from microspec_hf.conversations import chat_ids, user
from microspec_hf.hf import Target
from microspec_hf.training.config import TrainConfig
from microspec_hf.training.decoding import continue_prompts

logger = logging.getLogger(__name__)

WIDTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Prompts are padded to the next of these lengths, or multiples of 1,024; a batch has one length."""

DECIDING = (
    "languages",
    "max_prompts",
    "max_prompt_tokens",
    "max_new_tokens",
    "temperature",
    "answer_tokens",
    "seed",
)
"""Options that decide which answers a file holds; a rerun must have the same."""


@dataclass(frozen=True)
class _Batch:
    """Prompts that are answered together: the file's name, the padded length, numbers of the prompts."""

    name: str
    width: int
    prompts: list[int]
    sampled: bool
    seed: int


def read_prompts(path: str | Path, languages: Sequence[str] | None = None) -> list[str]:
    """The `prompt` of every JSON line of a plain or gzip file, in the languages asked for.

    Raises:
        ValueError: a line that is not a JSON object with a `prompt`; the message names its number.
    """
    opener = gzip.open if str(path).endswith(".gz") else open
    prompts = []
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                prompt, language = str(row["prompt"]), row.get("lang")
            except (json.JSONDecodeError, TypeError, KeyError) as error:
                raise ValueError(
                    f'{path}, line {number}: expected a JSON object with a "prompt", got {error}.'
                ) from error
            if languages is None or language in languages:
                prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} has no prompt" + (f" in {', '.join(languages)}." if languages else "."))
    return prompts


def generate_responses(
    accelerator: Accelerator,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    folder: Path,
) -> None:
    """Write the answers to `folder`, one file a batch; finished files are skipped, so that a rerun goes on.

    The processes of `accelerator` share the batches. A file holds `ids` int32 (prompts and answers, end to
    end), and for each sequence its `length`, the length of its `prompt`, and the `index` of its prompt.

    Raises:
        ValueError: the folder holds answers that were made with other options.
    """
    _refuse_other_answers(accelerator, config, folder)
    batches = list(_plan(accelerator, tokenizer, config))
    mine = batches[accelerator.process_index :: accelerator.num_processes]
    stops = _stop_ids(target, tokenizer)
    started, tokens = time.perf_counter(), 0
    progress = tqdm(mine, desc="answers", unit="batch", disable=not accelerator.is_main_process)
    for batch, prompts in progress:
        file = folder / f"{batch.name}.safetensors"
        if file.exists():
            continue
        if config.answer_seconds is not None and time.perf_counter() - started > config.answer_seconds:
            break
        torch.manual_seed(batch.seed)
        temperature = config.temperature if batch.sampled else None
        answers = continue_prompts(target, prompts, batch.width, config.max_new_tokens, stops, temperature)
        unfinished = file.with_suffix(".part")
        save_file(_pack(batch.prompts, prompts, answers), unfinished)
        unfinished.rename(file)
        tokens += sum(map(len, answers))
        progress.set_postfix_str(
            f"{tokens / (time.perf_counter() - started):,.0f} tokens/s, {tokens / 1e6:.1f}M tokens"
        )
    accelerator.wait_for_everyone()


def load_responses(folder: Path) -> dict[str, Tensor]:
    """All answers of a folder, concatenated: `ids`, `length`, `prompt`, `index`; see `generate_responses`.

    Raises:
        ValueError: there are none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f'{folder} holds no answers. Make them first: stage "answers" or "all".')
    parts = [load_file(file) for file in files]
    return {name: torch.cat([part[name] for part in parts]) for name in ("ids", "length", "prompt", "index")}


def _plan(
    accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase, config: TrainConfig
) -> Iterator[tuple[_Batch, list[list[int]]]]:
    """Every batch and its prompts; the same on all processes."""
    texts = read_prompts(config.prompts, config.languages)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(config.seed))
    chosen = sorted(order[: config.max_prompts].tolist())
    ids = dict(zip(chosen, chat_ids(tokenizer, [[user(texts[i])] for i in chosen]), strict=True))
    kept = {i: tokens for i, tokens in ids.items() if len(tokens) <= config.max_prompt_tokens}
    if accelerator.is_main_process and len(kept) < len(ids):
        logger.warning("Skipped %d prompts of more than %d tokens.", len(ids) - len(kept), config.max_prompt_tokens)
    for batch in _batches({i: len(tokens) for i, tokens in kept.items()}, config):
        yield batch, [kept[i] for i in batch.prompts]


def _batches(lengths: dict[int, int], config: TrainConfig) -> Iterator[_Batch]:
    """Batches of about equal prompt lengths, greedy ones first, shuffled so that a time limit cuts evenly."""
    groups: dict[int, list[int]] = {}
    for i, length in lengths.items():
        width = next((width for width in WIDTHS if width >= length), -(-length // 1024) * 1024)
        groups.setdefault(width, []).append(i)
    generator = torch.Generator().manual_seed(config.seed)
    for answer in range(1 + config.sampled):
        batches = []
        for width, members in groups.items():
            size = max(1, config.answer_tokens // (width + config.max_new_tokens))
            batches += [(width, members[start : start + size]) for start in range(0, len(members), size)]
        for number in torch.randperm(len(batches), generator=generator).tolist():
            width, members = batches[number]
            seed = config.seed + 100_000 * answer + number
            yield _Batch(f"{answer}-{number:05d}", width, members, sampled=answer > 0, seed=seed)


def _pack(index: list[int], prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Tensor]:
    ids = [token for pair in zip(prompts, answers, strict=True) for part in pair for token in part]
    return {
        "ids": torch.tensor(ids, dtype=torch.int32),
        "length": torch.tensor([len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]),
        "prompt": torch.tensor([len(p) for p in prompts]),
        "index": torch.tensor(index),
    }


def _refuse_other_answers(accelerator: Accelerator, config: TrainConfig, folder: Path) -> None:
    values = dataclasses.asdict(config)
    wanted = {name: values[name] for name in DECIDING} | {"prompts": Path(config.prompts).name}
    file = folder / "answers.json"
    if file.exists():
        found = json.loads(file.read_text())
        if differences := [name for name in wanted if found.get(name) != wanted[name]]:
            raise ValueError(
                f"{folder} holds answers that were made with "
                + ", ".join(f"{name}={found.get(name)!r} (now {wanted[name]!r})" for name in differences)
                + ". Use the same options, another output, or remove the folder."
            )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(wanted, indent=1) + "\n")
    accelerator.wait_for_everyone()


def _stop_ids(target: Target, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    stops = target.model.generation_config.eos_token_id if target.model.generation_config else None
    stops = tokenizer.eos_token_id if stops is None else stops
    if stops is None:
        return []
    return list(stops) if isinstance(stops, (list, tuple)) else [int(stops)]
