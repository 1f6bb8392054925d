"""Train a router for the arms CORAL and DynaSpec, on the answers that a drafter was trained on."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import AutoModelForCausalLM

from microspec_hf.eagle import EagleHead, check_pair, load_drafter
from microspec_hf.hf import Target, TargetHead
from microspec_hf.training.config import (
    require_count,
    require_limit,
    require_one_of,
    require_positive,
    require_share,
)
from microspec_hf.training.data import Batch, Sequences
from microspec_hf.training.loss import UnrolledHead
from microspec_hf.training.responses import load_responses
from microspec_hf.training.trainer import held_out
from microspec_hf.vocabulary import RouterConfig, VocabularyRouter, cluster_rows, coral_partition

CHUNK = 1024
"""Rows whose distribution over the whole vocabulary exists at a time."""


@dataclass(frozen=True)
class RouterTrainConfig:
    """What to train and how long.

    Args:
        kind: `"coral"` (equal groups of consecutive ids) or `"dynaspec"` (clusters of the head's rows).
        target: Hub id or folder of the target.
        drafter: Hub id or folder of its EAGLE head.
        answers: folder of the answers that the drafter was trained on, as `microspec train` leaves it.
        output: folder of the finished router.
        target_name: the name that the router's config.json gives the target, when `target` is a local folder.
        groups: parts of the vocabulary.
        width: units of the router's hidden layer.
        unroll: steps of the drafter on its own features; the router learns from the outputs of each.
        epochs: passes over the answers.
        max_answers: train on so many answers only, drawn with the seed (all if not given).
        batch_tokens: tokens in one step of the optimisation, padding included.
        learning_rate: at its highest; it falls along a cosine to zero.
        heldout: share of the prompts that is never trained on; take the drafter's, so that the same ones are held out.
        seed: of the weights, the clusters and the order of batches.
        device: where to train (CUDA if there is one, if not given).
    """

    kind: str
    target: str
    drafter: str
    answers: str
    output: str
    target_name: str | None = None
    groups: int = 64
    width: int = 256
    unroll: int = 3
    epochs: int = 1
    max_answers: int | None = None
    batch_tokens: int = 8192
    learning_rate: float = 2e-3
    heldout: float = 0.01
    seed: int = 0
    device: str | None = None

    def __post_init__(self) -> None:
        require_one_of(self, "kind", "coral", "dynaspec")
        require_count(self, "groups", "width", "unroll", "epochs", "batch_tokens")
        require_limit(self, "max_answers")
        require_positive(self, "learning_rate")
        require_share(self, "heldout")


def train_router(config: RouterTrainConfig, progress: bool = True) -> dict[str, Any]:
    """Part the vocabulary, train the router, and save both to `config.output`.

    The router sees what it will see when it drafts, the drafter's outputs, and learns the mass that the target gives
    to each group there (cross entropy).

    Args:
        progress: whether to show a bar.

    Returns:
        The record that is also written to `training.json` in the output folder: options, size and cost of the router,
        losses, and `recall`: for each number of chosen groups, the share of held-out rows whose top token of the
        target lies in one of them, by step of the drafter on its own features.

    Raises:
        ValueError: the target cannot be speculated on, the drafter does not fit it, or there are no answers.
    """
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(config.target, dtype=dtype)
    target = Target(model.to(device).eval().requires_grad_(False))
    drafter = load_drafter(config.drafter, dtype=dtype, device=device).requires_grad_(False)
    check_pair(drafter, target.config, str(model.config._name_or_path))
    answers = load_responses(Path(config.answers))
    torch.manual_seed(config.seed)
    router = _new_router(config, target, answers).to(device)
    record = _Run(config, target, drafter, router, answers).train(progress)
    output = Path(config.output)
    router.requires_grad_(False).save(output)
    (output / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def router_loss(logits: Tensor, mass: Tensor) -> Tensor:
    """Cross entropy `[]` of a router, mean over rows.

    Args:
        logits: `[R, G]` of the router.
        mass: `[R, G]`, the target's probability of each group, which sums to 1.
    """
    return -(mass * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()


def group_mass(head: TargetHead, hidden: Tensor, group_of: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """The target's probability of each group, fp32 `[R, G]`, and the group of its top token, int64 `[R]`.

    Args:
        hidden: `[R, H]`, true hidden rows.
        group_of: int64 `[V]`.
    """
    masses, tops = [], []
    for rows in hidden.split(CHUNK):
        logits = head(rows.to(head.dtype)).float()
        mass = logits.new_zeros(rows.shape[0], num_groups)
        masses.append(mass.index_add_(1, group_of, logits.softmax(dim=-1)))
        tops.append(group_of[logits.argmax(dim=-1)])
    return torch.cat(masses), torch.cat(tops)


def _new_router(config: RouterTrainConfig, target: Target, answers: dict[str, Tensor]) -> VocabularyRouter:
    vocab_size = target.vocab_size
    sizes = RouterConfig(
        kind="coral" if config.kind == "coral" else "dynaspec",
        hidden_size=target.hidden_size,
        vocab_size=vocab_size,
        num_groups=config.groups,
        width=config.width,
        target=config.target_name or Path(config.target).name,
    )
    if sizes.kind == "coral":
        return VocabularyRouter(sizes, *coral_partition(vocab_size, config.groups))
    everyone = torch.arange(vocab_size, device=target.head.device)
    # Texts of held-out prompts order ids within a cluster too; they are 1 % and decide nothing else.
    counts = torch.bincount(answers["ids"].long(), minlength=vocab_size)
    return VocabularyRouter(sizes, *cluster_rows(target.head.rows(everyone), config.groups, counts, config.seed))


class _Run:
    """The optimisation: the drafter's outputs, the target's masses, and the loop over them."""

    def __init__(
        self,
        config: RouterTrainConfig,
        target: Target,
        drafter: EagleHead,
        router: VocabularyRouter,
        answers: dict[str, Tensor],
    ):
        self.config, self.target, self.router = config, target, router
        self.unrolled = UnrolledHead(drafter, target.embeddings, config.unroll).eval()
        self.group_of = router.group_of()
        self.sequences = Sequences(answers["ids"], answers["length"], answers["prompt"], target)
        held = held_out(answers["index"][self.sequences.kept], config.heldout)
        training = (~held).nonzero()[:, 0].tolist()
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(config.seed)).tolist()
        self.training = [training[i] for i in sorted(order[: config.max_answers])]
        self.testing = held.nonzero()[:, 0].tolist()
        if not self.training:
            raise ValueError(f"{config.answers} holds no answer of at least two tokens to train on.")

    def train(self, progress: bool) -> dict[str, Any]:
        started = time.perf_counter()
        config = self.config
        epochs = [
            self.sequences.groups(config.batch_tokens, self.training, config.seed + n) for n in range(config.epochs)
        ]
        optimizer = torch.optim.AdamW(self.router.parameters(), lr=config.learning_rate)
        total = sum(map(len, epochs))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 + 0.5 * math.cos(math.pi * n / total))
        losses: list[list[float]] = []
        with tqdm(total=total, desc="router", disable=not progress) as bar:
            for groups in epochs:
                epoch = torch.zeros(2, device=self.target.device)
                for batch in self.sequences.batches(groups):
                    students, mass, _ = self._rows(batch)
                    loss = router_loss(self.router(students.flatten(0, 1)), mass.repeat(config.unroll, 1))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    schedule.step()
                    epoch += torch.stack([loss.detach(), torch.ones_like(loss)])
                    bar.update()
                losses.append([round(float(epoch[0] / epoch[1]), 4)])
        head_numbers = self.target.vocab_size * self.target.hidden_size
        return {
            "config": {**dataclasses.asdict(config)} | {n: Path(getattr(config, n)).name for n in _FOLDERS},
            "num_parameters": self.router.num_parameters,
            "num_bytes": self.router.num_bytes,
            "share_of_lm_head": self.router.num_parameters / head_numbers,
            "answers": len(self.training),
            "steps": total,
            "loss": [loss for (loss,) in losses],
            "seconds": round(time.perf_counter() - started, 1),
            "device": self.target.device.type,
            **self._evaluate(),
        }

    @torch.no_grad()
    def _rows(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The drafter's outputs fp32 `[steps, M, H]`; the masses `[M, G]` and top groups `[M]` they should lead to."""
        outputs = self.unrolled(batch, 0.0)
        students = torch.stack([output.flatten(0, 1).index_select(0, batch.rows) for output in outputs]).float()
        teacher = batch.hidden[:, 1:].flatten(0, 1).index_select(0, batch.rows)
        return students, *group_mass(self.target.head, teacher, self.group_of, self.router.config.num_groups)

    @torch.no_grad()
    def _evaluate(self) -> dict[str, Any]:
        """How often the right group is among the first n, on prompts that were never trained on."""
        num_groups = self.router.config.num_groups
        ranks = torch.zeros(self.config.unroll, num_groups, dtype=torch.int64, device=self.target.device)
        for batch in self.sequences.batches(self.sequences.groups(self.config.batch_tokens, self.testing)):
            students, _, top = self._rows(batch)
            for step, rows in enumerate(students):
                order = self.router(rows).argsort(dim=-1, descending=True, stable=True)
                rank = (order == top[:, None]).int().argmax(dim=-1)
                ranks[step] += torch.bincount(rank, minlength=num_groups)
        total = ranks.sum(dim=1, keepdim=True)
        recall = (ranks.cumsum(dim=1) / total.clamp(min=1)).T.tolist()
        shown = sorted({1, num_groups, *(2**n for n in range(1, 20) if 2**n < num_groups)})
        return {
            "heldout_rows": int(total[0]),
            "recall": {str(n): [round(share, 4) for share in recall[n - 1]] for n in shown} if int(total[0]) else {},
        }


_FOLDERS = ("target", "drafter", "answers", "output")
