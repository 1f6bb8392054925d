"""When a text ends: `generate`'s stopping criteria, asked token by token."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria


class Stops:
    """`generate`'s stopping criteria; the two that every call has are answered without touching the device.

    Args:
        criteria: as `generate` assembled them.
        shows_scores: whether they are given the scores so far, as `generate` gives them with `output_scores`.
    """

    def __init__(self, criteria: StoppingCriteriaList, shows_scores: bool = False):
        self.shows_scores = shows_scores
        self.max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=math.inf)
        eos = [c for c in criteria if type(c) is EosTokenCriteria]
        self.ids = frozenset(i for c in eos for i in c.eos_token_id.flatten().tolist())
        self.others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]

    def __call__(self, ids: Tensor, token: int, scores: Any) -> bool:
        # Every custom criterion is asked, also after another has said stop: plain generate does so, and some count.
        answers = [bool(torch.as_tensor(criterion(ids[None], scores)).all()) for criterion in self.others]
        return ids.shape[0] >= self.max_length or token in self.ids or any(answers)


class _WithoutStopStrings(GenerationConfig):
    """Does not take over the stop strings of the model's own generation config, as `generate` has every other do.

    `generate` would make their criterion itself, for which it needs the tokenizer that it does not hand to a callable.
    """

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs: Any) -> dict[str, Any]:
        kwargs.pop("stop_strings", None)
        return super().update(defaults_only, allow_custom_entries, **kwargs)  # type: ignore[no-any-return, no-untyped-call]


def without_stop_strings(generation_config: GenerationConfig | None = None, **arguments: Any) -> dict[str, Any]:
    """The arguments of a `generate` call that leaves stop strings alone."""
    config = _WithoutStopStrings()  # type: ignore[no-untyped-call]
    if generation_config is None:
        named = {name: value for name, value in arguments.items() if value is not None}
        left = config.update(**named)
        arguments = {name: value for name, value in arguments.items() if name not in named or name in left}
    else:
        vars(config).update(copy.deepcopy(vars(generation_config)), stop_strings=None)
    return arguments | {"generation_config": config}
