"""Lists of frequent token ids: reading and writing them, and counting new ones.

FR-Spec counts a text corpus; VocabTrim counts what the target, or the drafter, itself emits on calibration
prompts. Both are one count over sequences of ids: `count_token_ids`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Sequences = Iterable[Tensor | Sequence[int]]
"""Token id sequences: int tensors of any shape, or sequences of ints."""


def load_token_ids(path: str | Path) -> tuple[int, ...]:
    """Read a list of token ids, most frequent first; duplicates are dropped.

    Args:
        path: a released FR-Spec file (`freq_*.pt`: a list of ints written by `torch.save`, read without
            running any code in it) or a JSON file with a list of ints.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds something else.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no token id list at {path}. Pass a freq_*.pt file of FR-Spec or a JSON list."
        )
    ids = _read_json(path) if path.suffix == ".json" else _read_torch(path)
    if isinstance(ids, Tensor) and ids.ndim == 1:
        ids = ids.tolist()
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{path} must hold a non-empty list of token ids, got {_describe(ids)}.")
    for place, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{path} must hold token ids, integers from 0 on, got {value!r} at place {place}.")
    return tuple(dict.fromkeys(ids))


def save_token_ids(path: str | Path, token_ids: Sequence[int]) -> None:
    """Write a list that `load_token_ids` reads: as JSON, or as FR-Spec's `.pt` where the path ends so."""
    path, ids = Path(path), [int(i) for i in token_ids]
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(ids) + "\n")
    elif path.suffix == ".pt":
        torch.save(ids, path)
    else:
        raise ValueError(f"A list of token ids is written as .json or .pt, got {path}.")


def count_token_ids(
    sequences: Sequences,
    vocab_size: int,
    size: int | None = None,
    coverage: float = 1.0,
    min_count: int = 1,
) -> tuple[int, ...]:
    """The most frequent ids of a corpus (FR-Spec), most frequent first, ties to the lower id.

    Args:
        sequences: the corpus, tokenized by the target's tokenizer; read once, one sequence at a time.
        vocab_size: ids lie in `0 .. vocab_size - 1`.
        size: how many ids to return at most; None: all that occur.
        coverage: no more ids than make up this share of all tokens, from 0 (exclusive) to 1.
        min_count: only ids that occur so often.

    Returns:
        Ids that occur at least once; fewer than `size` where the corpus has no more.

    Raises:
        ValueError: an id lies outside, nothing was counted, or nothing occurs often enough.
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage must be a share of the tokens, above 0 and at most 1, got {coverage}.")
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sequence in sequences:
        ids = torch.as_tensor(sequence, dtype=torch.int64).flatten().cpu()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            strange = ids[(ids < 0) | (ids >= vocab_size)][0]
            raise ValueError(
                f"The sequences hold token id {strange}, but ids must be from 0 to {vocab_size - 1}. "
                "Tokenize them with the target's tokenizer."
            )
        counts += torch.bincount(ids, minlength=vocab_size)
    if not counts.any():
        raise ValueError("The sequences hold no token ids, so that no list can be counted from them.")
    often, order = counts.sort(descending=True, stable=True)
    before = (often.cumsum(0) - often).double()  # tokens of the ids before each
    num_kept = int(((often >= max(1, min_count)) & (before < coverage * int(counts.sum()))).sum())
    if num_kept == 0:
        raise ValueError(f"No token id occurs {min_count} times; the most frequent one occurs {int(often[0])} times.")
    return tuple(order[:num_kept][:size].tolist())


def emitted_by(model: Any, **generate_arguments: Any) -> Callable[[Tensor], Iterator[Tensor]]:
    """What a target emits, for `calibrate_token_ids`: the new ids of `model.generate` on a prompt.

    Args:
        model: a causal language model with `generate`.
        generate_arguments: passed on, for example `max_new_tokens=256, do_sample=True`.
    """

    def emit(prompt: Tensor) -> Iterator[Tensor]:
        input_ids = torch.as_tensor(prompt, dtype=torch.int64, device=model.device).reshape(1, -1)
        attention_mask = torch.ones_like(input_ids)
        output = model.generate(input_ids=input_ids, attention_mask=attention_mask, **generate_arguments)
        texts = output if isinstance(output, Tensor) else output.sequences
        yield from texts[:, input_ids.shape[1] :]

    return emit


def calibrate_token_ids(
    emit: Callable[[Tensor], Sequences], prompts: Iterable[Tensor], vocab_size: int, size: int | None = None
) -> tuple[int, ...]:
    """The ids that are emitted most on calibration prompts (VocabTrim).

    Args:
        emit: gives the id sequences that come of one prompt: `emitted_by(model)` for what the target says, or
            any other function, for example one that gives the tokens of the trees that a drafter proposed.
        prompts: int64 `[L]` each.
        vocab_size, size: as for `count_token_ids`.
    """
    return count_token_ids((ids for prompt in prompts for ids in emit(prompt)), vocab_size, size)


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error


def _read_torch(path: Path) -> object:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(
            f"{path} could not be read as a list that torch.save wrote, without running code in it: {error}"
        ) from error


def _describe(value: object) -> str:
    return "an empty list" if value == [] else f"a {type(value).__name__}"
