"""Two stages, one call: the target answers, the head learns."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed
from torch import Tensor, nn
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import AutoModelForCausalLM, AutoTokenizer

from microspec_hf.eagle import EagleConfig, EagleHead
from microspec_hf.hf import Target
from microspec_hf.training.config import TrainConfig
from microspec_hf.training.data import Batch, Sequences
from microspec_hf.training.loss import UnrolledHead, drafting_loss
from microspec_hf.training.responses import generate_responses, load_responses

LOOK_EVERY = 20
"""Steps between two looks at figures and clock; a look waits for the device."""

NOT_DECIDING = ("output", "stage", "answer_seconds", "train_seconds", "compile", "cache_features")
"""Options that may change when an unfinished run is taken up again."""


def train(config: TrainConfig) -> dict[str, Any]:
    """Make the answers, train the head, save it to `config.output`; a rerun of the same command goes on.

    Returns:
        The record that is also written to `training.json` in the output folder: options, losses and top-1
        agreement by step for each epoch, and what it ran on. Empty after the answers stage alone.

    Raises:
        ValueError: the target cannot be speculated on, or the work folder holds a run with other options.
    """
    accelerator = Accelerator()
    set_seed(config.seed)
    work = Path(config.output).with_name(Path(config.output).name + ".work")
    dtype = torch.bfloat16 if accelerator.device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(config.target, dtype=dtype).to(accelerator.device).eval()
    model.requires_grad_(False)
    target = Target(model)
    if config.stage in ("answers", "all"):
        tokenizer = AutoTokenizer.from_pretrained(config.target)
        generate_responses(accelerator, target, tokenizer, config, work / "answers")
    if config.stage == "answers":
        return {}
    return _Run(accelerator, target, config, work).train()


def new_head(target: Target, config: TrainConfig) -> EagleHead:
    """A head with the target's shapes; it starts by passing the hidden state through."""
    text = target.config
    rope = getattr(text, "rope_parameters", None) or {}
    head = EagleHead(
        EagleConfig(
            hidden_size=text.hidden_size,
            intermediate_size=config.intermediate_size or text.intermediate_size,
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=text.num_key_value_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            vocab_size=text.vocab_size,
            rms_norm_eps=text.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10_000.0)},
            max_position_embeddings=text.max_position_embeddings,
            target=config.target_name or config.target,
        )
    )
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2:
                # Little comes out of the layer at first, so that the features of later steps are sane.
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.002 if small else 0.02)
        head.fc.weight[:, text.hidden_size :] += torch.eye(text.hidden_size)
    return head


class _Run:
    """The optimisation: everything it is made of, and its loop over epochs."""

    def __init__(self, accelerator: Accelerator, target: Target, config: TrainConfig, work: Path):
        self.accelerator, self.target, self.config, self.work = accelerator, target, config, work
        self.main = accelerator.is_main_process
        self.compiled = accelerator.device.type == "cuda" if config.compile is None else config.compile
        answers = load_responses(work / "answers")
        self.sequences = Sequences(answers["ids"], answers["length"], answers["prompt"], target)
        held = held_out(answers["index"][self.sequences.kept], config.heldout)
        self.training, self.testing = (~held).nonzero()[:, 0].tolist(), held.nonzero()[:, 0].tolist()
        if config.cache_features == "always" or (config.cache_features == "auto" and self.sequences.fits()):
            self.sequences.cache_features(4 * config.batch_tokens, self.main)

        head = new_head(target, config)
        model = UnrolledHead(head, target.embeddings, config.unroll)
        optimizers = _optimizers(head, config)
        self.model, *self.optimizers = accelerator.prepare(model, *optimizers)
        self.steps_an_epoch = self._groups(0)[1]
        self.progress = 0.0  # share of the run that is done, by steps or by time
        self.step = 0
        self.record = self._resume()

    def train(self) -> dict[str, Any]:
        """Run the epochs that are left, and save the head."""
        while len(self.record["epochs"]) < self.config.epochs and self.progress < 1:
            result = self._epoch(len(self.record["epochs"]))
            self.record["epochs"].append(result)
            self.accelerator.print(json.dumps(result))
            self._save_state()
        if self.main:
            head: Any = self.accelerator.unwrap_model(self.model).head
            output = Path(self.config.output)
            saved = EagleHead(head.config)
            nn.Module.to(saved, torch.bfloat16)
            saved.load_state_dict(head.state_dict())
            saved.save_pretrained(output)
            (output / "training.json").write_text(json.dumps(self.record, indent=1) + "\n")
        self.accelerator.wait_for_everyone()
        return self.record

    def _epoch(self, epoch: int) -> dict[str, Any]:
        started = time.perf_counter()
        before = sum(result["seconds"] for result in self.record["epochs"])
        groups, steps = self._groups(epoch)
        bar = tqdm(total=steps, desc=f"epoch {epoch + 1}/{self.config.epochs}", disable=not self.main)
        figures, done = torch.zeros(2, self.config.unroll, device=self.target.device), 0
        shown = figures.clone()
        self.model.train()
        for batch in self.sequences.batches(groups):
            figures += self._optimise(batch)
            done += 1
            bar.update()
            if done % LOOK_EVERY == 0:
                bar.set_postfix_str(_figures((figures - shown) / LOOK_EVERY))
                shown = figures.clone()
                self._look_at_clock(before + time.perf_counter() - started)
            if self.progress >= 1:
                break
        bar.close()
        entropy, agreement = (figures / done).tolist()
        return {
            "epoch": epoch + 1,
            "steps": self.step,
            "loss": _rounded(entropy),
            "agreement": _rounded(agreement),
            **self._evaluate(),
            "sequences": len(self.training),
            "seconds": round(time.perf_counter() - started, 1),
        }

    def _optimise(self, batch: Batch) -> Tensor:
        with self._autocast():
            outputs = self.model(batch, self.config.noise)
        loss, entropy, agreement = drafting_loss(
            outputs,
            batch,
            self.target.head,
            self.config.step_decay,
            self.config.feature_weight,
            self.compiled,
        )
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.config.learning_rate * self._rate()
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.progress = max(self.progress, self.step / (self.config.epochs * self.steps_an_epoch))
        return torch.stack([entropy, agreement])

    @torch.no_grad()
    def _evaluate(self) -> dict[str, Any]:
        """Cross entropy and top-1 agreement by step on the prompts that were never trained on."""
        self.model.eval()
        sums = torch.zeros(2, self.config.unroll, device=self.target.device)
        rows = torch.zeros(1, device=self.target.device)
        groups = self.sequences.groups(self.config.batch_tokens, self.testing)
        for batch in self.sequences.batches(groups[self.accelerator.process_index :: self.accelerator.num_processes]):
            with self._autocast():
                outputs = self.accelerator.unwrap_model(self.model)(batch, 0.0)
            _, entropy, agreement = drafting_loss(outputs, batch, self.target.head, 1.0, 0.0, self.compiled)
            sums += torch.stack([entropy, agreement]) * batch.rows.shape[0]
            rows += batch.rows.shape[0]
        sums, rows = self.accelerator.reduce(sums), self.accelerator.reduce(rows)
        entropy, agreement = (sums / rows.clamp(min=1)).tolist()
        return {
            "heldout_loss": _rounded(entropy),
            "heldout_agreement": _rounded(agreement),
            "heldout_rows": int(rows),
        }

    def _groups(self, epoch: int) -> tuple[list[list[int]], int]:
        """This process' batches of an epoch, as many as every other process has."""
        groups = self.sequences.groups(self.config.batch_tokens, self.training, self.config.seed + epoch)
        count = self.accelerator.num_processes
        if len(groups) < count:
            raise ValueError(
                f"{len(self.training)} answers make {len(groups)} batches of {self.config.batch_tokens} "
                "tokens, too few "
                f"for {count} processes. Answer more prompts, or lower batch_tokens."
            )
        steps = len(groups) // count
        return groups[self.accelerator.process_index :: count][:steps], steps

    def _rate(self) -> float:
        """Share of the learning rate: up over the warm-up, then down along a cosine."""
        warm, done = self.config.warmup, min(1.0, self.progress)
        if done < warm:
            return (done + 1e-3) / (warm + 1e-3)
        return 0.5 * (1 + math.cos(math.pi * (done - warm) / (1 - warm)))

    def _look_at_clock(self, seconds: float) -> None:
        if self.config.train_seconds is not None:
            share = torch.tensor([seconds / self.config.train_seconds], device=self.target.device)
            # All processes must stop at the same step: the main one's clock decides.
            self.progress = max(self.progress, float(broadcast(share)))

    def _autocast(self) -> Any:
        half = self.target.dtype == torch.bfloat16
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=half)

    def _save_state(self) -> None:
        self.accelerator.save_state(str(self.work / "state"))
        self.record["progress"], self.record["steps"] = self.progress, self.step
        if self.main:
            (self.work / "training.json").write_text(json.dumps(self.record, indent=1))
        self.accelerator.wait_for_everyone()

    def _resume(self) -> dict[str, Any]:
        """The record of the run so far; loads its state when there is one."""
        file = self.work / "training.json"
        if not file.exists():
            return {
                "config": _portable(self.config),
                "provenance": _provenance(self.accelerator),
                "epochs": [],
            }
        record: dict[str, Any] = json.loads(file.read_text())
        now = _portable(self.config)
        if differences := [k for k in now if k not in NOT_DECIDING and record["config"].get(k) != now[k]]:
            raise ValueError(
                f"{self.work} holds a run with other options: "
                + ", ".join(f"{name}={record['config'].get(name)!r} (now {now[name]!r})" for name in differences)
                + f". Use the same options, another output, or remove {file.name} and state there."
            )
        self.accelerator.load_state(str(self.work / "state"))
        self.progress, self.step = record["progress"], record["steps"]
        return record


def held_out(index: Tensor, share: float) -> Tensor:
    """bool, which prompts are held out: by a hash of their number, so that all answers of a prompt are."""
    return (index.long() * 2654435761 % 2**32) < share * 2**32


def _optimizers(head: EagleHead, config: TrainConfig) -> list[torch.optim.Optimizer]:
    matrices = [p for p in head.parameters() if p.ndim == 2]
    others = [p for p in head.parameters() if p.ndim != 2]
    options: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": 0.0}
    if config.optimizer == "adamw":
        return [torch.optim.AdamW(matrices + others, betas=(0.9, 0.95), **options)]
    return [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options),
        torch.optim.AdamW(others, betas=(0.9, 0.95), **options),
    ]


def _figures(values: Tensor) -> str:
    entropy, agreement = values.tolist()
    return f"loss {' '.join(f'{v:.2f}' for v in entropy)}, top-1 {' '.join(f'{v:.0%}' for v in agreement)}"


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 4) for value in values]


def _portable(config: TrainConfig) -> dict[str, Any]:
    """The configuration without the folders of the machine it ran on."""
    values = dataclasses.asdict(config)
    return values | {k: Path(values[k]).name for k in ("target", "prompts", "output")}


def _provenance(accelerator: Accelerator) -> dict[str, Any]:
    device = accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": name,
        "processes": accelerator.num_processes,
    }
