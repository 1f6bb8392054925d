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
        require_one_of(self, "optimizer", "muon", "adamw")
        require_one_of(self, "cache_features", "auto", "always", "never")
        require_one_of(self, "stage", "answers", "train", "all")
        require_count(self, "max_prompt_tokens", "max_new_tokens", "answer_tokens", "epochs", "batch_tokens", "unroll")
        require_limit(self, "max_prompts", "answer_seconds", "train_seconds", "intermediate_size")
        require_positive(self, "learning_rate", "temperature", "clip", "step_decay")
        for name in ("sampled", "feature_weight", "noise"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)!r}.")
        require_share(self, "heldout", "warmup")


def require_one_of(config: object, name: str, *choices: str) -> None:
    """Refuse an option with another value."""
    if getattr(config, name) not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {getattr(config, name)!r}.")


def require_count(config: object, *names: str) -> None:
    """Refuse options below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)!r}.")


def require_limit(config: object, *names: str) -> None:
    """Refuse options that are neither None nor above 0."""
    for name in names:
        if getattr(config, name) is not None and getattr(config, name) <= 0:
            raise ValueError(f"{name} must be more than 0 or left out, got {getattr(config, name)!r}.")


def require_positive(config: object, *names: str) -> None:
    """Refuse options that are not above 0."""
    for name in names:
        if getattr(config, name) <= 0:
            raise ValueError(f"{name} must be more than 0, got {getattr(config, name)!r}.")


def require_share(config: object, *names: str) -> None:
    """Refuse options outside of 0 (inclusive) to 1 (exclusive)."""
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise ValueError(f"{name} must be a share from 0 to below 1, got {getattr(config, name)!r}.")
