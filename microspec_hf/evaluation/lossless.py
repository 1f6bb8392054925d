"""Is the text of speculative decoding the text of the target? Prompt by prompt, and how close the choice was
if not.

In float32 every text must be equal. In half precision a pass over a tree rounds differently from a pass over
one token, so that two tokens that are nearly tied can change places, as they can between two correct kernels.
What tells such a tie from a fault is how far the two tokens' scores are apart where the texts part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import PreTrainedModel

from microspec_hf.config import MicroSpecConfig
from microspec_hf.eagle import EagleHead
from microspec_hf.evaluation.decoding import decode, decode_plainly, exact_matmul, next_token_scores
from microspec_hf.evaluation.journal import Journal
from microspec_hf.evaluation.prompts import Prompt, Tokenizer, prompt_ids
from microspec_hf.evaluation.provenance import digest, pair_settings

NEAR_TIE = {torch.float64: 16, torch.float32: 16, torch.bfloat16: 4, torch.float16: 4}
"""A gap is a near tie up to so many roundings of the largest score, `NEAR_TIE[dtype] * eps(dtype) *
max|score|`, over the tokens that have a probability at all: the rows of ids that no text has score as low as they like.

Measured with SmolLM2-135M: between one pass over a text and cached steps, the gaps of the best three tokens
change by at most 9.1 such units in float32 (median 1.6), 2.3 in bfloat16 and 2.1 in float16 (medians 0.4 and
0.3).
"""

IMPOSSIBLE = 104.0
"""So far below the best score a token's probability is 0 in float32."""


@dataclass(frozen=True)
class Difference:
    """Where two texts part.

    Args:
        position: new tokens before it, which are equal.
        plain, microspec: the token of each text there; None where that text has ended.
        logit_gap: by how much the two tokens' scores differ there, from one plain pass over the common text;
            None where a text has ended or a token is forbidden.
        tolerance: the largest gap that rounding explains in this precision.
        is_near_tie: both tokens are within the tolerance of the best score.
    """

    position: int
    plain: int | None
    microspec: int | None
    logit_gap: float | None
    tolerance: float
    is_near_tie: bool

    @property
    def verdict(self) -> str:
        """One phrase for people."""
        return f"differs at a near tie of {self.logit_gap:.2g}" if self.is_near_tie else "differs: a fault"


@dataclass(frozen=True)
class PromptCheck:
    """One prompt under one configuration.

    Args:
        id, task: of the prompt.
        vocabulary: name of the configuration.
        new_tokens: length of the plain text.
        rounds, emitted: rounds of the speculative text, and the tokens that they emitted.
        difference: where the texts part; None: they are equal.
    """

    id: str
    task: str
    vocabulary: str
    new_tokens: int
    rounds: int
    emitted: int
    difference: Difference | None = None

    @property
    def verdict(self) -> str:
        return "identical" if self.difference is None else self.difference.verdict


@dataclass(frozen=True)
class LosslessReport:
    """What `check_lossless` found.

    Args:
        dtype: precision of the target.
        max_new_tokens: length limit of the texts.
        checks: one for each prompt and configuration.
    """

    dtype: str
    max_new_tokens: int
    checks: tuple[PromptCheck, ...]

    @property
    def num_prompts(self) -> int:
        """Prompts that were checked under every configuration."""
        return len({check.id for check in self.checks})

    @property
    def num_faults(self) -> int:
        """Texts that differ by more than rounding explains."""
        return sum(check.difference is not None and not check.difference.is_near_tie for check in self.checks)

    @property
    def identical(self) -> bool:
        """Whether texts were checked and every one is equal."""
        return self.verdict == "identical"

    @property
    def verdict(self) -> str:
        """`identical`, or that of the worst difference: a fault, else the near tie with the largest gap.

        "nothing checked" without any check.
        """
        return _worst(self.checks)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: `records` with the counts of each configuration, `differences` with every place."""
        by_vocabulary: dict[str, list[PromptCheck]] = {}
        for check in self.checks:
            by_vocabulary.setdefault(check.vocabulary, []).append(check)
        return {
            "dtype": self.dtype,
            "max_new_tokens": self.max_new_tokens,
            "prompts": self.num_prompts,
            "identical": self.identical,
            "verdict": self.verdict,
            "records": [_record(vocabulary, checks) for vocabulary, checks in by_vocabulary.items()],
            "differences": [
                {"id": c.id, "task": c.task, "vocabulary": c.vocabulary, "verdict": c.verdict} | asdict(c.difference)
                for c in self.checks
                if c.difference is not None
            ],
        }


def check_lossless(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    drafter: EagleHead,
    prompts: Sequence[Prompt],
    configurations: MicroSpecConfig | Mapping[str, MicroSpecConfig],
    max_new_tokens: int,
    journal: Path | None = None,
    progress: bool = False,
    seconds: float | None = None,
) -> LosslessReport:
    """Compare greedy decoding with plain greedy `generate`, on the first turn of every prompt.

    The plain text of a prompt is generated once and compared with every configuration. float32 products are
    computed in float32 meanwhile, never in TF32.

    Args:
        model: the target, in the precision to check.
        tokenizer: the target's, or a function that gives a prompt's ids int64 `[1, L]`.
        drafter: its EAGLE head.
        prompts: with ids that are unique.
        configurations: one, or several by name.
        max_new_tokens: length limit of each text.
        journal: a file of finished prompts: an interrupted check goes on where it stopped, and processes with
            shares of the prompts may have it in common.
        progress: show a progress bar.
        seconds: begin no further prompt after so long; the report is then of the finished prompts. With a
            journal a later call goes on; with 0 it only reads what is finished.

    Raises:
        ValueError: there is nothing to check, two prompts have one id, or the journal belongs to another
        check.
    """
    if isinstance(configurations, MicroSpecConfig):
        configurations = {configurations.vocabulary.kind: configurations}
    if not prompts or not configurations:
        raise ValueError("There is nothing to check: pass at least one prompt and one configuration.")
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise ValueError("Two prompts have the same id; each needs one of its own, by which results are kept.")

    dtype = str(model.dtype).removeprefix("torch.")
    kept = Journal(journal, _settings(model, drafter, configurations, max_new_tokens))
    finished = {(check.id, check.vocabulary): check for check in map(_from_row, kept.rows)}
    started = time.monotonic()
    with exact_matmul(), tqdm(total=len(prompts), desc=f"check {dtype}", disable=not progress) as bar:
        for prompt in prompts:
            missing = {name: c for name, c in configurations.items() if (prompt.id, name) not in finished}
            if missing and seconds is not None and time.monotonic() - started >= seconds:
                continue  # later prompts may be finished, by another process
            if missing:
                ids = prompt_ids(tokenizer, prompt)
                for check in _check_prompt(model, drafter, prompt, ids, missing, max_new_tokens):
                    finished[check.id, check.vocabulary] = check
                    kept.append(asdict(check))
            bar.update()
            bar.set_postfix_str(f"{sum(check.difference is not None for check in finished.values())} differ")
    complete = [p for p in prompts if all((p.id, name) in finished for name in configurations)]
    checks = [finished[prompt.id, name] for prompt in complete for name in configurations]
    return LosslessReport(dtype, max_new_tokens, tuple(checks))


def _check_prompt(
    model: PreTrainedModel,
    drafter: EagleHead,
    prompt: Prompt,
    ids: Tensor,
    configurations: Mapping[str, MicroSpecConfig],
    max_new_tokens: int,
) -> Iterator[PromptCheck]:
    plain = decode_plainly(model, ids, max_new_tokens)
    for name, config in configurations.items():
        new, stats = decode(model, drafter, ids, config, max_new_tokens)
        yield PromptCheck(
            id=prompt.id,
            task=prompt.task,
            vocabulary=name,
            new_tokens=len(plain),
            rounds=stats.rounds,
            emitted=sum(stats.emitted),
            difference=first_difference(model, ids, plain, new),
        )


def first_difference(
    model: PreTrainedModel, ids: Tensor, plain: Sequence[int], microspec: Sequence[int]
) -> Difference | None:
    """Where two continuations of a prompt part, and how close the choice was there; None if they are equal.

    Args:
        ids: the prompt, int64 `[1, L]`.
        plain, microspec: the new tokens of both texts.
    """
    if list(plain) == list(microspec):
        return None
    pairs = zip(plain, microspec, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(microspec)))
    ours = microspec[position] if position < len(microspec) else None
    theirs = plain[position] if position < len(plain) else None
    if ours is None or theirs is None:
        return Difference(position, theirs, ours, None, 0.0, is_near_tie=False)
    text = torch.cat([ids, torch.tensor([plain[:position]], dtype=ids.dtype, device=ids.device)], dim=1)
    scores = next_token_scores(model, text)
    best = scores[scores.isfinite()].max()
    possible = scores[scores.isfinite() & (scores > best - IMPOSSIBLE)]
    tolerance = NEAR_TIE[model.dtype] * torch.finfo(model.dtype).eps * float(possible.abs().max())
    gap = abs(float(scores[theirs]) - float(scores[ours]))
    shortfall = float(best) - float(scores[[theirs, ours]].min())
    # A token that a processor forbids has no finite score, and is no tie with anything.
    known = math.isfinite(shortfall)
    return Difference(position, theirs, ours, gap if known else None, tolerance, shortfall <= tolerance)


def _record(vocabulary: str, checks: Sequence[PromptCheck]) -> dict[str, Any]:
    different = [check.difference for check in checks if check.difference is not None]
    rounds = sum(check.rounds for check in checks)
    return {
        "vocabulary": vocabulary,
        "prompts": len(checks),
        "identical": len(checks) - len(different),
        "near_ties": sum(difference.is_near_tie for difference in different),
        "faults": sum(not difference.is_near_tie for difference in different),
        "verdict": _worst(checks),
        "new_tokens": sum(check.new_tokens for check in checks),
        "acceptance_length": sum(check.emitted for check in checks) / rounds if rounds else 0.0,
    }


def _worst(checks: Sequence[PromptCheck]) -> str:
    if not checks:
        return "nothing checked"
    different = [check.difference for check in checks if check.difference is not None]
    if not different:
        return "identical"
    return max(different, key=lambda d: (not d.is_near_tie, d.logit_gap or 0.0)).verdict


def _from_row(row: Mapping[str, Any]) -> PromptCheck:
    difference = row["difference"] and Difference(**row["difference"])
    return PromptCheck(**{**row, "difference": difference})


def _settings(
    model: PreTrainedModel,
    drafter: EagleHead,
    configurations: Mapping[str, MicroSpecConfig],
    max_new_tokens: int,
) -> dict[str, Any]:
    """What the texts depend on; a journal serves only runs for which all of it is the same."""
    return pair_settings(model, drafter) | {
        "configurations": {name: digest(config.to_dict()) for name, config in configurations.items()},
        "max_new_tokens": max_new_tokens,
    }
