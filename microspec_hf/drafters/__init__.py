"""Which drafter belongs to which target: what `drafter="auto"` looks up.

The drafter of SmolLM2-135M-Instruct is shipped with the package; the others are Hub repositories of the EAGLE and
FR-Spec authors.
"""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

SMOLLM2 = Path(__file__).parent / "smollm2-135m-instruct"

KNOWN: dict[str, str | Path] = {
    "SmolLM2-135M-Instruct": SMOLLM2,
    "Meta-Llama-3-8B-Instruct": "yuhuili/EAGLE-LLaMA3-Instruct-8B",
    "Llama-3.1-8B-Instruct": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
    "Llama-3.2-1B-Instruct": "thunlp/LLaMA3.2-Instruct-1B-FR-Spec",
    "Qwen2-7B-Instruct": "yuhuili/EAGLE-Qwen2-7B-Instruct",
    "vicuna-7b-v1.3": "yuhuili/EAGLE-Vicuna-7B-v1.3",
    "Llama-2-7b-chat-hf": "yuhuili/EAGLE-llama2-chat-7B",
}
"""Last part of a target's name to its drafter."""


def find_drafter(model: PreTrainedModel) -> str | Path:
    """The drafter of a known target, by the last part of the name that the model was loaded under.

    Raises:
        ValueError: the name is not in the table.
    """
    name = str(getattr(model.config, "_name_or_path", "") or "")
    try:
        return KNOWN[Path(name).name]
    except KeyError:
        raise ValueError(
            f'drafter="auto" knows no drafter for the target {name or "without a name"!r}. '
            f"Known targets: {', '.join(KNOWN)}. Pass drafter=<Hub id, folder or EagleHead>."
        ) from None
