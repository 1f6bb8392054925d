"""Train a router for the arms CORAL and DynaSpec.

    python examples/train_router.py --kind coral --target HuggingFaceTB/SmolLM2-135M-Instruct \
        --drafter my-drafter --answers my-drafter.work/answers --output my-coral --groups 12

The answers are those that `microspec train` made on the training prompts; prompts that the drafter's training held out
are held out here too. Without a GPU, `--max_answers 500` keeps it to minutes.
"""

from __future__ import annotations

from typing import Any

from transformers import HfArgumentParser

from microspec_hf.training.router import RouterTrainConfig, train_router


def main(config: RouterTrainConfig) -> None:
    """Train, and say what came out."""
    record = train_router(config)
    print(f"{record['num_parameters']:,} parameters, {record['num_bytes'] / 2**20:.1f} MiB, ", end="")
    print(f"{record['share_of_lm_head']:.1%} of the LM head; {record['steps']} steps in {record['seconds']} s.")
    for chosen, recall in record["recall"].items():
        print(f"target's token in the best {chosen} groups: {', '.join(f'{share:.1%}' for share in recall)} (by step)")
    print(f"Wrote {config.output}")


if __name__ == "__main__":
    options: Any = RouterTrainConfig
    main(*HfArgumentParser(options).parse_args_into_dataclasses())
