"""What the promise's tests share: a setting to ask questions in, comparison of whole outputs, draws that repeat."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from microspec_hf import MicroSpecOutput
from microspec_hf.hf import cache_argument, cache_field
from tests.doubles import Script, random_head, random_prompt, scripted
from tests.tiny import TINY_MODELS

NUM_NEW_TOKENS = 12
TOLERANCE = 1e-4
"""Of scores and logits in float32, where the tiny models' logits reach 30: the passes have other shapes."""


@dataclass(frozen=True)
class Setting:
    """A target, a prompt of seven tokens, and what plain greedy decoding writes behind it."""

    model: PreTrainedModel
    prompt: Tensor
    text: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    @property
    def cache_name(self) -> str:
        """The name of a cache among the arguments and outputs of this release's `generate`."""
        return cache_argument(self.model.forward)

    @property
    def words(self) -> PreTrainedTokenizerFast:
        return tokenizer(self.vocab_size)


@functools.cache
def setting(name: str = "llama", seed: int = 3) -> Setting:
    model = TINY_MODELS[name]()
    prompt = random_prompt(model, seed=seed)
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=48)
    return Setting(model, prompt, tuple(text[0, 7:].tolist()))


@functools.cache
def head_of(model: PreTrainedModel) -> Any:
    return random_head(model)


@functools.cache
def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Single bytes, some of which make up characters of several bytes, then pairs of letters, one token each."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [*"abcdefgh0123456789.,!?"]
    pairs = [first + second for first in "abcd" for second in "abcd"]
    several = [unit for unit in alphabet if not unit.isascii()][:30]
    others = [unit for unit in alphabet if unit not in letters + several]
    units = ["<bos>", "<pad>", *letters, *pairs, *several, *others][:vocab_size]
    made = Tokenizer(models.BPE({unit: i for i, unit in enumerate(units)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", pad_token="<pad>")


# Two calls that should be one -----------------------------------------------------------------------------------------


def call(where: Setting, **ask: Any) -> Any:
    """`generate` on the setting's prompt, greedy and with all outputs unless the question says otherwise."""
    if "inputs" not in ask and "input_ids" not in ask and "inputs_embeds" not in ask:
        ask["inputs"] = where.prompt
    prompt = ask.get("inputs")
    if isinstance(prompt, Tensor):
        ask.setdefault("attention_mask", torch.ones_like(prompt))
    usual = {"max_new_tokens": NUM_NEW_TOKENS, "do_sample": False}
    usual |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    if ask.get("generation_config") is not None:
        usual = {}
    return where.model.generate(**usual | ask)


def speculate(where: Setting, **ask: Any) -> Any:
    """The same call with our strategy."""
    return call(where, **{"custom_generate": "microspec", "drafter": head_of(where.model)} | ask)


def drafts_along(script: Script, expected: Any, unheard: Sequence[int] = ()) -> Any:
    """Within the block, drafts come by the script from the texts of `expected`, an output or ids `[B, L]`.

    `unheard` counts the ids at the beginning of each row that no drafter is told of: padding, and what a cache holds.
    """
    texts = ids_of(expected).tolist()
    return scripted(script, [text[count:] for text, count in zip_longest(texts, unheard, fillvalue=0)])


def unheard(where: Setting, ask: Mapping[str, Any]) -> list[int]:
    """For `drafts_along`: how much of its prompt a question keeps from the drafter."""
    mask, cache = ask.get("attention_mask"), ask.get(where.cache_name)
    if isinstance(mask, Tensor):
        return [int(count) for count in (mask == 0).sum(dim=1)]
    return [] if cache is None else [int(cache.get_seq_length())]


def ids_of(output: Any) -> Tensor:
    """The ids `[B, L]` of an output, of ids, or of one text."""
    if isinstance(output, tuple):
        return torch.tensor([output])
    return output if isinstance(output, Tensor) else output.sequences


def same_output(expected: Any, got: Any) -> None:
    """All that `generate` can return is equal: ids exactly, floats within the rounding of float32."""
    assert ids_of(got).tolist() == ids_of(expected).tolist()
    assert isinstance(got, Tensor) == isinstance(expected, Tensor)
    if isinstance(expected, Tensor):
        return
    assert isinstance(got, MicroSpecOutput) or type(got) is type(expected)
    for field in ("scores", "logits", "hidden_states", "attentions"):
        ours, theirs = got.get(field), expected.get(field)
        assert (ours is None) == (theirs is None), field
        for a, b in zip(_leaves(ours), _leaves(theirs), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def same_cache(expected: Any, got: Any, padding: Sequence[int] = (0,)) -> None:
    """The caches that two outputs return hold the same tokens, with the same keys and values.

    Args:
        padding: for each text, columns of padding on its left, which no mask lets be seen.
    """
    ours, theirs = got[cache_field()], expected[cache_field()]
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert type(ours) is type(theirs)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        forgotten = theirs.get_seq_length() - b.keys.shape[2]  # by a layer that keeps its window only
        for name in ("keys", "values"):
            rows, expected_rows = getattr(a, name), getattr(b, name)
            assert rows.shape == expected_rows.shape
            assert bool(rows.isfinite().all())
            for text, left in enumerate(padding):
                seen = slice(max(0, left - forgotten), None)
                torch.testing.assert_close(
                    rows[text, :, seen], expected_rows[text, :, seen], rtol=TOLERANCE, atol=TOLERANCE
                )


def _leaves(values: Any) -> list[Tensor]:
    """The tensors of nested tuples."""
    if values is None:
        return []
    return [values] if isinstance(values, Tensor) else [leaf for value in values for leaf in _leaves(value)]


def differs(one: Any, other: Any) -> bool:
    """Whether anything that can be returned is different."""
    try:
        same_output(one, other)
    except AssertionError:
        return True
    return False


def accepted_drafts(output: Any) -> bool:
    """Whether some pass of the target gave more than one token, in each text that is long enough to ask."""
    return isinstance(output, Tensor) or all(max(s.emitted) > 1 for s in output.stats if s.new_tokens >= 5)


@contextmanager
def repeatable_draws(seed: int = 0) -> Iterator[None]:
    """Draws that are a function of the distribution, so that two ways of sampling one law give one text.

    Each draw takes the quantile that belongs to the likeliest token; a distribution that is not the plain one shows.
    """

    def draw(probabilities: Tensor, num_samples: int, **_: Any) -> Tensor:
        assert num_samples == 1
        shares = probabilities.double().cumsum(-1)
        quantile = ((probabilities.argmax(-1, keepdim=True) + seed + 1) * 0.6180339887).frac().clamp(0.01, 0.99)
        return (shares < quantile * shares[..., -1:]).sum(-1, keepdim=True)

    with mock.patch.object(torch, "multinomial", draw):
        yield


@contextmanager
def no_work(model: PreTrainedModel) -> Iterator[None]:
    """No layer of the model runs in the block."""
    ran: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, _: ran.append(type(module).__name__))
        for module in model.modules()
        if not isinstance(module, nn.ModuleList)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    assert ran == []


@contextmanager
def failing_pass(model: PreTrainedModel, number: int, error: BaseException) -> Iterator[None]:
    """In the block, the model's second layer raises in its pass of this number, counted from 1."""
    passes = 0

    def fail(*_: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == number:
            raise error

    hook = model.get_decoder().layers[1].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()
