"""The loss of an unrolled EAGLE head (HASS; EAGLE-3's training-time test), with EAGLE's loss on features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from microspec_hf.eagle import EagleHead
from microspec_hf.hf import TargetHead
from microspec_hf.training.data import Batch
from microspec_hf.training.decoding import fused_attention

CHUNK = 4096
"""Rows whose logits exist at a time: 4,096 x 49,152 in bfloat16 are 0.4 GB."""


class UnrolledHead(nn.Module):
    """Runs an EAGLE head for several steps on its own features, as it will run when it drafts.

    In step s, row j eats the feature that step s - 1 predicted for position j, and attends to what it would
    find in
    the cache: rows of true features up to j - s + 1, then one row of each step since.

    Args:
        head: the head to train.
        embeddings: the target's token embeddings (frozen).
        unroll: steps.
    """

    def __init__(self, head: EagleHead, embeddings: nn.Module, unroll: int):
        super().__init__()
        self.head = head
        self.unroll = unroll
        self._embeddings = [embeddings]  # in a list, so that the target's parameters are not ours

    def forward(self, batch: Batch, noise: float) -> list[Tensor]:
        """The head's outputs of each step, `[B, R, H]`.

        Args:
            batch: B sequences of R rows.
            noise: amplitude of uniform noise on the true features, relative to their mean magnitude.
        """
        feature = batch.hidden[:, :-1]
        rows, dtype = feature.shape[1], feature.dtype
        with torch.no_grad():
            embedded = self._embeddings[0](batch.next_tokens).to(dtype)
            if noise:
                feature = feature + (torch.rand_like(feature) * 2 - 1) * (noise * feature.abs().mean())
        positions = torch.arange(rows, device=feature.device)[None]
        cache = _UnrolledCache()
        outputs: list[Tensor] = []
        with fused_attention(feature.device):
            for step in range(1, self.unroll + 1):
                mask = unrolled_mask(rows, step, dtype, feature.device)
                outputs.append(self.head(embedded, feature, positions, mask, cache))
                feature = nn.functional.pad(outputs[-1], (0, 0, 1, 0))[:, :-1]  # row j eats what row j - 1 predicted
        return outputs


class _UnrolledCache(Cache):
    """Keeps the keys and values of every step, side by side."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.keys.append(key_states)
        self.values.append(value_states)
        return torch.cat(self.keys, dim=2), torch.cat(self.values, dim=2)


def unrolled_mask(rows: int, step: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive `[1, 1, rows, step * rows]`: which keys row j of a step sees among those of steps 1 .. step.

    Of step 1 the rows up to j - step + 1, of step s >= 2 the one row j - step + s. For step 3, row 5:

        step 1: 0 1 2 3 . .    step 2: . . . . 4 .    step 3: . . . . . 5
    """
    row = torch.arange(rows, device=device)[:, None]
    column = torch.arange(rows, device=device)[None]
    blocks = [column <= row - step + 1] + [column == row - step + s for s in range(2, step + 1)]
    mask = torch.zeros(rows, step * rows, dtype=dtype, device=device)
    return mask.masked_fill_(~torch.cat(blocks, dim=1), torch.finfo(dtype).min)[None, None]


def drafting_loss(
    outputs: Sequence[Tensor],
    batch: Batch,
    head: TargetHead,
    step_decay: float,
    feature_weight: float,
    compiled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss to minimise, `[]`, and for each step cross entropy and share of rows with the target's top token.

    Args:
        outputs: `[B, R, H]` for each step.
        batch: what they were computed from.
        head: the target's LM head, frozen; the distributions are over its whole vocabulary.
        step_decay: weight of step s is step_decay ** (s - 1).
        feature_weight: of the SmoothL1 loss between features and true hidden states.
        compiled: compile the arithmetic on logits.
    """
    teacher = batch.hidden[:, 1:].flatten(0, 1).index_select(0, batch.rows)
    students = torch.stack([output.flatten(0, 1).index_select(0, batch.rows) for output in outputs])
    entropy, agreement = _SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
        students, teacher, head, _compiled_compare() if compiled else _compare
    )
    difference = nn.functional.smooth_l1_loss(
        students.float(), teacher.float().expand(students.shape), reduction="none"
    )
    weights = step_decay ** torch.arange(len(outputs), device=students.device)
    losses = entropy + feature_weight * difference.mean(dim=(1, 2))
    return (weights * losses).sum(), entropy.detach(), agreement


class _SoftCrossEntropy(torch.autograd.Function):
    """Cross entropy of students against the target's distribution over the whole vocabulary, mean over rows.

    The gradient is taken with the logits at hand (the student's distribution minus the target's, times the
    head), so that no `[rows, V]` tensor outlives its chunk. The head is frozen.
    """

    @staticmethod
    def forward(
        ctx: Any, students: Tensor, teacher: Tensor, head: TargetHead, compare: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        steps, rows, _ = students.shape
        losses = torch.zeros(steps, device=students.device)
        agreement = torch.zeros(steps, device=students.device)
        gradient = torch.empty_like(students)
        weight = head.weight
        for start in range(0, rows, CHUNK):
            part = slice(start, min(start + CHUNK, rows))
            wanted = head.project(teacher[part].to(weight.dtype), weight, head.bias)
            normaliser, top = wanted.float().logsumexp(-1, keepdim=True), wanted.argmax(-1)
            for step in range(steps):
                logits = head.project(students[step, part].to(weight.dtype), weight, head.bias)
                loss, hits, delta = compare(logits, wanted, normaliser, top, head.scale, head.softcap)
                losses[step] += loss / rows
                agreement[step] += hits / rows
                gradient[step, part] = (delta @ weight) / rows
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(agreement)
        return losses, agreement

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor, grad_agreement: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_losses[:, None, None].to(gradient.dtype), None, None, None


def _compare(
    logits: Tensor, wanted: Tensor, normaliser: Tensor, top: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed cross entropy, rows with the right top token, and the gradient of the raw logits, `[n, V]`.

    Args:
        logits: `[n, V]` of the student.
        wanted: `[n, V]` of the target, `normaliser` `[n, 1]` their logsumexp, `top` `[n]` their argmax.
        scale, softcap: of the head that made them.
    """
    student = logits.float()
    target = (wanted.float() - normaliser).exp()
    own = student.logsumexp(-1, keepdim=True)
    loss = own.sum() - (target * student).sum()
    hits = (student.argmax(-1) == top).sum()
    delta = (student - own).exp() - target
    if softcap is not None:
        delta = delta * (1 - (student / softcap).square())
    return loss, hits, (delta * scale).to(logits.dtype)


_compiled: list[Callable[..., Any]] = []


def _compiled_compare() -> Callable[..., Any]:
    if not _compiled:
        _compiled.append(torch.compile(_compare, dynamic=True))
    return _compiled[0]
