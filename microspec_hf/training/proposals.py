"""What a drafter proposes along the target's answers: VocabTrim's calibration on the drafter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from microspec_hf import ops
from microspec_hf.eagle import EagleHead
from microspec_hf.hf import Target
from microspec_hf.training.data import Sequences
from microspec_hf.training.loss import UnrolledHead

CHUNK = 1024
"""Rows whose logits exist at a time."""


@torch.no_grad()
def proposals(
    target: Target,
    drafter: EagleHead,
    answers: dict[str, Tensor],
    top_k: int = 10,
    unroll: int = 3,
    batch_tokens: int = 8192,
) -> Iterator[Tensor]:
    """The ids that a drafter with the whole LM head finds best behind every token of the answers.

    Args:
        target, drafter: a pair.
        answers: as `load_responses` reads them.
        top_k: children of a node in the drafter's trees.
        unroll: levels: the drafter goes on from its own features so often.
        batch_tokens: tokens of one pass, padding included.

    Yields:
        int64 `[rows, top_k]`.
    """
    unrolled = UnrolledHead(drafter, target.embeddings, unroll).eval()
    sequences = Sequences(answers["ids"], answers["length"], answers["prompt"], target)
    for batch in sequences.batches(sequences.groups(batch_tokens, range(len(sequences)))):
        for output in unrolled(batch, 0.0):
            rows = output.flatten(0, 1).index_select(0, batch.rows)
            for part in rows.split(CHUNK):
                yield ops.topk_candidates(target.head(part), top_k)
