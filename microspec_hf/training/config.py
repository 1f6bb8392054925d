"""Options of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TrainConfig:
    """What to train and how long.

    Args:
        target: Hub id or folder of the target.
        prompts: JSON lines (plain or gzip) with a `prompt` and optionally a `lang`.
        output: folder of the finished head; answers and the state of an unfinished run lie beside it, in
            OUTPUT.work.
        target_name: the Hub id that the head's config.json names, when `target` is a local folder.
        languages: keep prompts of these languages only (all if not given).
        max_prompts: keep so many prompts, drawn with the seed (all if not given).
        max_prompt_tokens: longer prompts are skipped and counted, never cut.
        max_new_tokens: length of an answer.
        temperature: of the sampled answers; every prompt has one greedy and `sampled` sampled answers.
        sampled: sampled answers for each prompt.
        answer_seconds: start no further batch of answers after so many seconds (no limit if not given).
        answer_tokens: tokens in one batch of answers, prompt and answer together; the KV cache holds them
            all.
        epochs: passes over the answers.
        train_seconds: end the training after so many seconds, learning rate included, if the epochs take
            longer.
        batch_tokens: tokens in one step of the optimisation and one process, padding included.
        learning_rate: at its highest.
        warmup: share of the steps in which the learning rate rises; then it falls along a cosine to zero.
        clip: largest norm of the gradient.
        seed: of prompts, answers, weights and the order of batches.
        optimizer: `"muon"` (for matrices; AdamW for the rest) or `"adamw"`.
        unroll: steps of the head on its own features.
        step_decay: weight of step s is step_decay ** (s - 1).
        feature_weight: of the SmoothL1 loss on features, beside the cross entropy.
        noise: amplitude of the uniform noise on the first step's features, relative to their mean magnitude.
        heldout: share of the prompts that is never trained on.
        intermediate_size: width of the head's MLP (the target's if not given).
        cache_features: keep the target's hidden states of all answers on the device: `"always"`, `"never"`
            (compute them for every batch anew), or `"auto"`: if they fit into half of its free memory.
        compile: compile the loss with torch.compile (on CUDA only, if not given).
        stage: `"answers"`, `"train"` or `"all"`.
    """

    target: str
    prompts: str
    output: str
    target_name: str | None = None
    languages: list[str] | None = None
    max_prompts: int | None = None
    max_prompt_tokens: int = 1024
    max_new_tokens: int = 256
    temperature: float = 0.8
    sampled: int = 1
    answer_seconds: float | None = None
    answer_tokens: int = 600_000
    epochs: int = 8
    train_seconds: float | None = None
    batch_tokens: int = 16384
    learning_rate: float = 2e-3
    warmup: float = 0.03
    clip: float = 1.0
    seed: int = 0
    optimizer: str = "muon"
    unroll: int = 3
    step_decay: float = 0.8
    feature_weight: float = 0.1
    noise: float = 0.1
    heldout: float = 0.01
    intermediate_size: int | None = None
    cache_features: str = "auto"
    compile: bool | None = field(default=None)
    stage: str = "all"

    def __post_init__(self) -> None:
        self._one_of("optimizer", "muon", "adamw")
        self._one_of("cache_features", "auto", "always", "never")
        self._one_of("stage", "answers", "train", "all")
        for name in (
            "max_prompt_tokens",
            "max_new_tokens",
            "answer_tokens",
            "epochs",
            "batch_tokens",
            "unroll",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)!r}.")
        for name in ("max_prompts", "answer_seconds", "train_seconds", "intermediate_size"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0 or left out, got {getattr(self, name)!r}.")
        for name in ("learning_rate", "temperature", "clip", "step_decay"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name)!r}.")
        for name in ("sampled", "feature_weight", "noise"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}.")
        for name in ("heldout", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be a share from 0 to below 1, got {getattr(self, name)!r}.")

    def _one_of(self, name: str, *choices: str) -> None:
        if getattr(self, name) not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {getattr(self, name)!r}.")
