"""Train an EAGLE head for a target on the target's own answers.

`train(TrainConfig(...))` does both stages: the target answers the prompts (`responses`), then the head learns
to go on from the target's hidden states (`trainer`).
"""

from microspec_hf.training.config import TrainConfig
from microspec_hf.training.responses import generate_responses, load_responses, read_prompts
from microspec_hf.training.trainer import train

__all__ = ["TrainConfig", "generate_responses", "load_responses", "read_prompts", "train"]
