"""Train an EAGLE head for a target on the target's own answers.

    accelerate launch examples/train_drafter.py --target HuggingFaceTB/SmolLM2-135M-Instruct \
        --prompts prompts.jsonl.gz --output my-drafter

Prompts are JSON lines with a "prompt"; never train on prompts that you evaluate on. A rerun of the same
command goes on where it stopped. With several processes each answers and trains on its share.
"""

from typing import Any

from transformers import HfArgumentParser

from microspec_hf.training import TrainConfig, train

if __name__ == "__main__":
    options: Any = TrainConfig
    (config,) = HfArgumentParser(options).parse_args_into_dataclasses()
    train(config)
