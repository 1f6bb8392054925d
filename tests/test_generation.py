"""`generate(..., custom_generate="microspec")` gives what plain `generate` gives, whatever is drafted."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
    pipeline,
)

import microspec_hf
from microspec_hf import MicroSpecConfig, TreeConfig, VocabularyConfig
from microspec_hf.hf import Target, cache_argument
from tests.doubles import (
    SCRIPTS,
    Script,
    alternately_right,
    controlled_pair,
    last_branch_right,
    nan_head,
    perfect,
    plain,
    proposing,
    random_head,
    random_prompt,
    random_tree,
    scripted,
    speculate,
    wrong,
)
from tests.promises.support import same_cache
from tests.tiny import TINY_MODELS, tiny_llama, tiny_mistral

NUM_NEW_TOKENS = 24

VOCABULARIES: dict[str, Any] = {
    "full": "full",
    "static": {"kind": "static", "token_ids": tuple(range(0, 97, 2))},
    "dynamic": {"kind": "dynamic", "max_rows": 40},
}


@functools.cache
def target(name: str, attention: str = "eager") -> PreTrainedModel:
    return TINY_MODELS[name](attn_implementation=attention)


@functools.cache
def written(name: str, attention: str = "eager", seed: int = 0, length: int = 7) -> Tensor:
    """A plain greedy text, longer than any test needs."""
    model = target(name, attention)
    return plain(model, random_prompt(model, length, seed), max_new_tokens=NUM_NEW_TOKENS + 16)


def prompt_of(model: PreTrainedModel) -> Tensor:
    return random_prompt(model)


def assert_same(
    model: PreTrainedModel, prompt: Tensor, script: Script, *, text: Tensor | None = None, **arguments: Any
) -> Any:
    """Plain and speculative text agree; the script proposes along `text`, by default the plain text of the call.

    Returns:
        the statistics of the call.
    """
    expected = plain(model, prompt, **arguments)
    with scripted(script, expected if text is None else text):
        output = speculate(model, prompt, return_dict_in_generate=True, **arguments)
    assert output.sequences.tolist() == expected.tolist()
    [stats] = output.stats
    assert stats.new_tokens == expected.shape[1] - prompt.shape[1]
    return stats


# Targets, attention, vocabularies, drafters ------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_text_is_that_of_the_target(name: str, attention: str, vocabulary: str, script: str) -> None:
    if name == "gemma2" and attention == "sdpa":
        pytest.skip("transformers' sdpa does not cap Gemma-2's scores: refused in 5.24, ignored in 5.17")
    model = target(name, attention)
    text = written(name, attention)
    num_new = NUM_NEW_TOKENS  # the prompt has 7 tokens and the windows 8: the text runs beyond them
    with scripted(SCRIPTS[script], text):
        output = speculate(
            model,
            prompt_of(model),
            max_new_tokens=num_new,
            microspec={"vocabulary": VOCABULARIES[vocabulary]},
            return_dict_in_generate=True,
        )
    assert output.sequences.tolist() == text[:, : 7 + num_new].tolist()
    length = output.stats[0].acceptance_length
    if script in ("perfect", "last_branch_right", "with_holes"):
        assert length == 7  # every right branch was taken to its end
    elif script in ("wrong", "nothing"):
        assert length == 1
    else:
        assert 1 < length < 7


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("name", TINY_MODELS)
def test_text_does_not_depend_on_a_real_head(name: str, vocabulary: str) -> None:
    model = target(name)
    got = speculate(model, prompt_of(model), max_new_tokens=16, microspec={"vocabulary": VOCABULARIES[vocabulary]})
    assert got.tolist() == written(name)[:, : 7 + 16].tolist()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_head_that_knows_the_target_is_accepted(vocabulary: str) -> None:
    model, head = controlled_pair(scale=0.1)
    prompt = prompt_of(model)
    output = speculate(
        model,
        prompt,
        drafter=head,
        max_new_tokens=30,
        microspec={"vocabulary": VOCABULARIES[vocabulary]},
        return_dict_in_generate=True,
    )
    assert output.sequences.tolist() == plain(model, prompt, max_new_tokens=30).tolist()
    assert output.stats[0].acceptance_length > (2 if vocabulary == "full" else 1.3)


@pytest.mark.parametrize("seed", range(8))
def test_text_of_random_trees(seed: int) -> None:
    model = target("mistral", "sdpa")
    text = written("mistral", "sdpa", seed)
    with scripted(random_tree(seed, num_nodes=40), text):
        got = speculate(model, text[:, :7], max_new_tokens=NUM_NEW_TOKENS)
    assert got.tolist() == text[:, : 7 + NUM_NEW_TOKENS].tolist()


TREES = [
    TreeConfig(depth, top_k, num_nodes)
    for depth in (0, 1, 2, 5)
    for top_k in (1, 4, 10)
    for num_nodes in (1, 8, 60)
    if num_nodes - 1 <= top_k + depth * top_k**2
]


@pytest.mark.parametrize("tree", TREES, ids=lambda t: f"depth{t.depth}-top{t.top_k}-nodes{t.num_nodes}")
def test_text_does_not_depend_on_the_tree_or_the_window(tree: TreeConfig) -> None:
    model, head = controlled_pair(scale=0.1)
    prompt = prompt_of(model)
    expected = plain(model, prompt, max_new_tokens=10).tolist()
    for max_rows in (1, 16, 3072):
        config = MicroSpecConfig(tree=tree, vocabulary=VocabularyConfig(max_rows=max_rows))
        assert speculate(model, prompt, drafter=head, max_new_tokens=10, microspec=config).tolist() == expected


@pytest.mark.parametrize(
    "options",
    [
        {"window": "stream"},
        {"verify_nodes": "path"},
        {"prompt_candidates": 0},
        {"verify_candidates": 0},
        {"prompt_candidates": 0, "verify_candidates": 0, "max_rows": 5, "window": "stream"},
        {"prompt_candidates": 500, "verify_candidates": 500},
        {"floor": 4, "token_ids": (3, 1, 4, 15, 9)},
    ],
    ids=str,
)
def test_text_does_not_depend_on_the_options_of_the_window(options: dict[str, Any]) -> None:
    model, head = controlled_pair(scale=0.1)
    prompt = prompt_of(model)
    got = speculate(model, prompt, drafter=head, max_new_tokens=12, microspec={"vocabulary": options})
    assert got.tolist() == plain(model, prompt, max_new_tokens=12).tolist()


def test_auto_tree() -> None:
    model = tiny_llama()
    prompt = prompt_of(model)
    output = speculate(model, prompt, max_new_tokens=8, microspec={"tree": "auto"}, return_dict_in_generate=True)
    assert output.sequences.tolist() == plain(model, prompt, max_new_tokens=8).tolist()
    assert TreeConfig(**output.stats[0].tree).num_nodes > 1


def test_a_head_that_answers_nan_changes_nothing() -> None:
    model = target("llama")
    for vocabulary in VOCABULARIES.values():
        output = speculate(
            model,
            prompt_of(model),
            drafter=nan_head(model),
            max_new_tokens=12,
            microspec={"vocabulary": vocabulary},
            return_dict_in_generate=True,
        )
        assert output.sequences.tolist() == written("llama")[:, : 7 + 12].tolist()
        assert output.stats[0].acceptance_length == 1


@pytest.mark.parametrize("name", TINY_MODELS)
def test_float64(name: str) -> None:
    model = TINY_MODELS[name](dtype=torch.float64)
    assert_same(model, prompt_of(model), alternately_right, max_new_tokens=16)


def test_equal_logits_in_float32_choose_the_lower_id_as_plain_greedy_does() -> None:
    """Plain `generate` compares float32 logits, also of a float64 model."""
    model = tiny_llama(dtype=torch.float64)
    prompt = prompt_of(model)
    text = plain(model, prompt, max_new_tokens=6)[0, 7:].tolist()
    token = min(text[:4])
    twin = next(i for i in range(100, 0, -1) if i not in text)
    assert token < twin
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[token] * (1 + 1e-12)
    assert_same(model, prompt, perfect, max_new_tokens=6)
    assert speculate(model, prompt, max_new_tokens=6)[0, 7:].tolist() == text


# Lengths and prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_new", range(1, 12))
@pytest.mark.parametrize("script", [perfect, last_branch_right])
def test_max_new_tokens(num_new: int, script: Script) -> None:
    assert_same(target("llama"), prompt_of(target("llama")), script, text=written("llama"), max_new_tokens=num_new)


@pytest.mark.parametrize("max_length", [8, 12, 14])
def test_max_length(max_length: int) -> None:
    assert_same(target("llama"), prompt_of(target("llama")), perfect, text=written("llama"), max_length=max_length)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_prompt_of_one_token(name: str) -> None:
    model = target(name)
    prompt = torch.tensor([[10]])
    assert_same(model, prompt, perfect, max_new_tokens=14)
    assert speculate(model, prompt, max_new_tokens=8).tolist() == plain(model, prompt, max_new_tokens=8).tolist()


@pytest.mark.parametrize("chunk", [1, 5, 16, 37, 512])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_prompt_in_chunks(name: str, chunk: int) -> None:
    model = target(name)
    prompt = random_prompt(model, length=37)
    expected = plain(model, prompt, max_new_tokens=10)
    with scripted(last_branch_right, expected):
        got = speculate(model, prompt, max_new_tokens=10, microspec={"prefill_chunk": chunk})
    assert got.tolist() == expected.tolist()
    real = speculate(model, prompt, max_new_tokens=4, microspec={"prefill_chunk": chunk})
    assert real.tolist() == expected[:, : 37 + 4].tolist()


def test_inputs_by_name_position_and_generation_config() -> None:
    model, head = target("llama"), random_head(target("llama"))
    prompt = prompt_of(model)
    expected = written("llama")[:, : 7 + 5].tolist()
    ask = {"custom_generate": "microspec", "drafter": head}
    config = GenerationConfig(max_new_tokens=5, do_sample=False)
    assert model.generate(prompt, config, **ask).tolist() == expected
    assert model.generate(inputs=prompt, generation_config=config, **ask).tolist() == expected
    assert model.generate(input_ids=prompt, max_new_tokens=5, do_sample=False, **ask).tolist() == expected


# Stops -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [perfect, last_branch_right, wrong])
@pytest.mark.parametrize("index", range(9))
def test_end_token_at_every_index_of_a_block(index: int, script: Script) -> None:
    text = written("llama", seed=3)
    model, prompt = target("llama"), text[:, :7]
    end = int(text[0, 7 + index])
    stats = assert_same(model, prompt, script, text=text, max_new_tokens=20, eos_token_id=end, pad_token_id=0)
    assert stats.new_tokens <= index + 1


def test_list_of_end_tokens_and_end_token_of_the_model() -> None:
    text = written("llama", seed=3)
    model, prompt = tiny_llama(attn_implementation="eager"), text[:, :7]
    ends = [int(text[0, 7 + 9]), int(text[0, 7 + 4])]
    stats = assert_same(model, prompt, perfect, text=text, max_new_tokens=20, eos_token_id=ends, pad_token_id=0)
    assert stats.new_tokens <= 5

    model.generation_config.eos_token_id = ends
    model.generation_config.pad_token_id = 0
    assert assert_same(model, prompt, perfect, text=text, max_new_tokens=20).new_tokens == stats.new_tokens


def test_refused_end_token_is_just_a_token() -> None:
    text = written("llama", seed=3)
    end = next(i for i in range(101) if i not in text)
    stats = assert_same(
        target("llama"), text[:, :7], proposing(end), text=text, max_new_tokens=20, eos_token_id=end, pad_token_id=0
    )
    assert stats.acceptance_length > 6


def test_min_new_tokens() -> None:
    text = written("llama", seed=3)
    end = int(text[0, 7 + 2])
    for script in (perfect, proposing(end)):
        stats = assert_same(
            target("llama"), text[:, :7], script, max_new_tokens=20, min_new_tokens=9, eos_token_id=end, pad_token_id=0
        )
        assert stats.new_tokens >= 9


class StopOnToken(StoppingCriteria):
    """Looks at the last token and at nothing else, so that a stop inside a block is easily missed."""

    def __init__(self, token: int):
        self.token, self.calls = token, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("index", range(7))
def test_criterion_that_looks_at_the_last_token(index: int) -> None:
    text = written("llama", seed=3)
    model, prompt = target("llama"), text[:, :7]
    calls = []
    for decode in (plain, speculate):
        criterion = StopOnToken(int(text[0, 7 + index]))
        with scripted(perfect, text):
            got = decode(model, prompt, max_new_tokens=20, stopping_criteria=StoppingCriteriaList([criterion]))
        calls.append((got.tolist(), criterion.calls))
    assert calls[0] == calls[1]


def test_max_time() -> None:
    model, prompt = target("llama"), prompt_of(target("llama"))
    stats = assert_same(model, prompt, perfect, text=written("llama"), max_new_tokens=20, max_time=1e-9)
    assert stats.new_tokens == 1


@functools.cache
def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """The printable characters, then pairs of letters, one token each."""
    units = [chr(code) for code in range(32, 127)] + ["ab", "cd", "ef", "gh", "ij", "kl"]
    made = Tokenizer(models.BPE({unit: i for i, unit in enumerate(units[:vocab_size])}, merges=[]))
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("custom_generate", ["microspec", microspec_hf.generate], ids=["name", "callable"])
def test_stop_strings(custom_generate: Any) -> None:
    text = written("llama", seed=3)
    model, prompt, words = target("llama"), text[:, :7], tokenizer(101)
    third, fourth = words.convert_ids_to_tokens(text[0, 7 + 2 : 7 + 4].tolist())
    for stop in (third, ["nowhere", third + fourth], ["nowhere"]):
        expected = plain(model, prompt, max_new_tokens=12, stop_strings=stop, tokenizer=words)
        with scripted(perfect, text):
            got = speculate(
                model,
                prompt,
                max_new_tokens=12,
                stop_strings=stop,
                tokenizer=words,
                custom_generate=custom_generate,
            )
        assert got.tolist() == expected.tolist()
        assert (got.shape[1] < 7 + 12) == (stop != ["nowhere"])


@pytest.mark.parametrize("where", ["argument", "model"])
def test_stop_strings_of_a_generation_config(where: str) -> None:
    text = written("llama", seed=3)
    model, words = tiny_llama(attn_implementation="eager"), tokenizer(101)
    stop = words.convert_ids_to_tokens(int(text[0, 7 + 2]))
    arguments: dict[str, Any] = {"tokenizer": words}
    if where == "argument":
        arguments["generation_config"] = GenerationConfig(max_new_tokens=12, stop_strings=[stop], do_sample=False)
    else:
        model.generation_config.stop_strings = [stop]
        arguments["max_new_tokens"] = 12
    stats = assert_same(model, text[:, :7], perfect, text=text, **arguments)
    assert stats.new_tokens == 3


# Processors --------------------------------------------------------------------------------------------------------


class EveryThirdTokenIsEven(LogitsProcessor):
    """Depends on how often it was called: right only if it is called once for each token, in order."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.append(input_ids[0].tolist())
        if len(self.prefixes) % 3 == 0:
            scores = scores.clone()
            scores[:, 1::2] = -torch.inf
        return scores


def _only_larger_than_the_last(batch: int, ids: Tensor) -> list[int]:
    return [*range(int(ids[-1]) % 50, 101)]


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram": {"no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": [[5], [7, 9], [11, 3]]},
    "suppress": {"suppress_tokens": list(range(0, 60))},
    "begin_suppress": {"begin_suppress_tokens": list(range(0, 60))},
    "sequence_bias": {"sequence_bias": [[[4], 5.0], [[8, 9], 5.0]]},
    "forced_eos": {"forced_eos_token_id": 3},
    "forced_bos": {"forced_bos_token_id": 3},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 3, "pad_token_id": 0},
    "prefix_allowed": {"prefix_allowed_tokens_fn": _only_larger_than_the_last},
    "renormalize": {"renormalize_logits": True},
    "remove_invalid": {"remove_invalid_values": True},
    "encoder_repetition": {"encoder_repetition_penalty": 1.5},
    "min_length": {"min_length": 14, "eos_token_id": 3, "pad_token_id": 0},
}


@pytest.mark.parametrize("arguments", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("script", [perfect, last_branch_right, alternately_right])
def test_processors(script: Script, arguments: dict[str, Any]) -> None:
    model = target("llama")
    stats = assert_same(model, prompt_of(model), script, max_new_tokens=12, **arguments)
    assert script is not perfect or stats.new_tokens < 3 or stats.acceptance_length > 3


@pytest.mark.parametrize("script", [perfect, last_branch_right, alternately_right])
def test_processor_with_a_memory(script: Script) -> None:
    model, prompt = target("llama"), prompt_of(target("llama"))
    ours, theirs = EveryThirdTokenIsEven(), EveryThirdTokenIsEven()
    expected = plain(model, prompt, max_new_tokens=15, logits_processor=LogitsProcessorList([theirs]))
    with scripted(script, expected):
        got = speculate(model, prompt, max_new_tokens=15, logits_processor=LogitsProcessorList([ours]))
    assert got.tolist() == expected.tolist()
    assert ours.prefixes[: len(theirs.prefixes)] == theirs.prefixes  # then only what lies behind the end


def test_penalty_of_the_models_generation_config_is_honoured() -> None:
    model = tiny_llama()
    prompt = prompt_of(model)
    without = plain(model, prompt, max_new_tokens=20)
    model.generation_config.repetition_penalty = 1.7
    assert_same(model, prompt, perfect, max_new_tokens=20)
    assert speculate(model, prompt, max_new_tokens=20).tolist() != without.tolist()


# Sampling that leaves no choice ------------------------------------------------------------------------------------

GREEDY_LIKE = [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, {"temperature": 1e-5}]


@pytest.mark.parametrize("arguments", GREEDY_LIKE, ids=str)
@pytest.mark.parametrize("script", [perfect, last_branch_right])
def test_sampling_without_a_choice_is_greedy(script: Script, arguments: dict[str, Any]) -> None:
    text = written("llama")
    with scripted(script, text):
        got = speculate(target("llama"), text[:, :7], max_new_tokens=15, do_sample=True, **arguments)
    assert got.tolist() == text[:, : 7 + 15].tolist()


def test_return_sequences() -> None:
    text = written("llama")
    with scripted(perfect, text):
        output = speculate(
            target("llama"),
            text[:, :7],
            max_new_tokens=15,
            do_sample=True,
            top_k=1,
            num_return_sequences=3,
            return_dict_in_generate=True,
        )
    assert output.sequences.tolist() == text[:, : 7 + 15].tolist() * 3
    assert len(output.stats) == 3
    several = speculate(target("llama"), text[:, :7], max_new_tokens=15, do_sample=True, num_return_sequences=3)
    assert len({tuple(row) for row in several.tolist()}) == 3


# Batches -----------------------------------------------------------------------------------------------------------


def padded_batch(prompts: list[Tensor], pad: int = 0) -> tuple[Tensor, Tensor]:
    longest = max(p.shape[1] for p in prompts)
    ids = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0), value=pad) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (longest - p.shape[1], 0), value=0) for p in prompts])
    return ids, mask


class ShorterThan(StoppingCriteria):
    """Stops a row at a length; rows of a batch are as long as `generate` has them, padding included."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


def _tokens_of_row(row: int, ids: Tensor) -> list[int]:
    return [*range(30 * row, 97)]


BATCH_ARGUMENTS: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"max_new_tokens": 9},
    "max_length": {"max_length": 14},
    "end_token": {"max_new_tokens": 12, "eos_token_id": [*range(0, 101, 9)]},
    "min_new_tokens": {"max_new_tokens": 12, "min_new_tokens": 5, "eos_token_id": [*range(0, 101, 9)]},
    "repetition_penalty": {"max_new_tokens": 9, "repetition_penalty": 1.5},
    "encoder_repetition": {"max_new_tokens": 9, "encoder_repetition_penalty": 1.5},
    "prefix_allowed": {"max_new_tokens": 9, "prefix_allowed_tokens_fn": _tokens_of_row},
    "criterion": {"max_new_tokens": 12, "eos_token_id": 100, "stopping_criteria": [ShorterThan(12)]},
}


@pytest.mark.parametrize("arguments", BATCH_ARGUMENTS.values(), ids=BATCH_ARGUMENTS)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_batch_of_unequal_prompts(name: str, arguments: dict[str, Any]) -> None:
    model = target(name, "sdpa")
    prompts = [random_prompt(model, length, seed=length) for length in (3, 8, 1)]
    ids, mask = padded_batch(prompts)
    ask = arguments | {"attention_mask": mask, "pad_token_id": 0, "return_dict_in_generate": True}
    expected = plain(model, ids, **ask)
    new = expected.sequences.shape[1] - 8
    texts = [row[-length - new :].tolist() for row, length in zip(expected.sequences, (3, 8, 1), strict=True)]
    for script in (perfect, last_branch_right):
        with scripted(script, texts):
            got = speculate(model, ids, **ask)
        assert got.sequences.tolist() == expected.sequences.tolist()
        same_cache(expected, got, padding=(5, 0, 7))
        # A next call goes on as behind plain generate, also where a row had ended early and padding follows its end.
        longer = torch.cat([got.sequences, torch.stack([p[0, :1].repeat(3) for p in prompts])], dim=1)
        further = {"attention_mask": torch.nn.functional.pad(mask, (0, new + 3), value=1), "pad_token_id": 0}
        field, cache = cache_of(got)
        after = plain(model, longer, max_new_tokens=5, **further)
        assert plain(model, longer, max_new_tokens=5, **further, **{field: cache}).tolist() == after.tolist()


def test_rows_of_a_batch_are_the_rows_alone() -> None:
    model = target("llama")
    prompts = [random_prompt(model, length, seed=length) for length in (3, 8, 1)]
    ids, mask = padded_batch(prompts)
    together = speculate(model, ids, attention_mask=mask, pad_token_id=0, max_new_tokens=9)
    for row, prompt in zip(together, prompts, strict=True):
        alone = speculate(model, prompt, max_new_tokens=9)[0]
        assert row[-alone.shape[0] :].tolist() == alone.tolist()


def test_a_batch_is_one_target_pass_a_round_and_shrinks_as_rows_end() -> None:
    model = target("llama")
    prompts = [random_prompt(model, length, seed=length) for length in (3, 8, 5)]
    texts = [plain(model, prompt, max_new_tokens=40)[0].tolist() for prompt in prompts]
    ids, mask = padded_batch(prompts)
    end = next(token for token in texts[1][8 + 5 :] if token not in texts[0] + texts[2])
    arguments: dict[str, Any] = {"attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 40, "eos_token_id": end}
    expected = plain(model, ids, **arguments)
    speculate(model, ids, **arguments)  # the check of the target's tree pass is behind us

    shapes: list[tuple[int, ...]] = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    with scripted(perfect, texts):
        got = speculate(model, ids, return_dict_in_generate=True, **arguments)
    hook.remove()
    assert got.sequences.tolist() == expected.tolist()
    prefills, rounds, behind = shapes[:3], shapes[3:-1], shapes[-1]
    assert prefills == [(1, 3), (1, 8), (1, 5)]
    # One pass reads the padding behind the text that ended early: plain `generate` leaves its rows in the cache, too.
    assert behind == (1, 40 - min(stats.new_tokens for stats in got.stats))
    sizes = [size for size, _ in rounds]
    assert sizes == sorted(sizes, reverse=True)
    assert len(rounds) == max(stats.rounds for stats in got.stats)
    assert sum(sizes) == sum(stats.rounds for stats in got.stats)
    assert len({stats.rounds for stats in got.stats}) > 1


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_batch_with_a_real_head(name: str, vocabulary: Any) -> None:
    model = target(name)
    prompts = [random_prompt(model, length, seed=length) for length in (2, 9, 5, 1)]
    ids, mask = padded_batch(prompts)
    arguments: dict[str, Any] = {"attention_mask": mask, "pad_token_id": 0, "max_new_tokens": 15}
    got = speculate(model, ids, microspec={"vocabulary": vocabulary, "tree": {"num_nodes": 20}}, **arguments)
    assert got.tolist() == plain(model, ids, **arguments).tolist()


def test_padded_prompt_without_a_mask_is_read_as_text() -> None:
    """With a pad token in the prompt and no mask, `generate` itself decides what is padding."""
    model = target("llama")
    prompt = torch.tensor([[0, 0, 5, 17, 33]])
    arguments: dict[str, Any] = {"attention_mask": None, "pad_token_id": 0, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(prompt, **arguments)
    got = model.generate(prompt, custom_generate="microspec", drafter=random_head(model), **arguments)
    assert got.tolist() == expected.tolist()


# Streaming ---------------------------------------------------------------------------------------------------------


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self, fail_after: int | None = None):
        self.values: list[Tensor] = []
        self.ends = 0
        self.fail_after = fail_after

    def put(self, value: Tensor) -> None:
        if self.fail_after is not None and len(self.values) > self.fail_after:
            raise RuntimeError("reader has gone")
        self.values.append(value)

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("custom_generate", ["microspec", microspec_hf.generate], ids=["name", "callable"])
def test_streamer_gets_what_plain_generate_gives_it(custom_generate: Any) -> None:
    text = written("llama")
    ours, theirs = Recorder(), Recorder()
    plain(target("llama"), text[:, :7], max_new_tokens=10, streamer=theirs)
    with scripted(perfect, text):
        speculate(target("llama"), text[:, :7], max_new_tokens=10, streamer=ours, custom_generate=custom_generate)
    assert [v.shape for v in ours.values] == [v.shape for v in theirs.values]
    assert [v.tolist() for v in ours.values] == [v.tolist() for v in theirs.values]
    assert (ours.ends, theirs.ends) == (1, 1)


def test_streamer_gets_nothing_behind_a_stop() -> None:
    text = written("llama", seed=3)
    streamer = Recorder()
    with scripted(perfect, text):
        got = speculate(
            target("llama"),
            text[:, :7],
            max_new_tokens=20,
            eos_token_id=int(text[0, 7 + 3]),
            pad_token_id=0,
            streamer=streamer,
        )
    assert [t for value in streamer.values[1:] for t in value.tolist()] == got[0, 7:].tolist()


def test_streamer_is_ended_once_after_an_error() -> None:
    text = written("llama")
    streamer = Recorder(fail_after=3)
    with pytest.raises(RuntimeError, match="reader has gone"), scripted(perfect, text):
        speculate(target("llama"), text[:, :7], max_new_tokens=10, streamer=streamer)
    assert streamer.ends == 1


def test_text_streamer(capsys: pytest.CaptureFixture[str]) -> None:
    text = written("llama")
    words = tokenizer(101)
    for decode in (plain, speculate):
        decode(target("llama"), text[:, :7], max_new_tokens=10, streamer=TextStreamer(words))
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == printed[1] != ""


# Outputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [{}, {"repetition_penalty": 1.5}, {"suppress_tokens": [*range(20)]}, {"do_sample": True, "top_k": 1}],
    ids=str,
)
@pytest.mark.parametrize("num_new", [1, 3, 12])
def test_scores_and_logits(num_new: int, arguments: dict[str, Any]) -> None:
    model = tiny_llama(dtype=torch.float64)
    prompt = prompt_of(model)
    ask = {"max_new_tokens": num_new, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = plain(model, prompt, **ask, **arguments)
    for script in (perfect, alternately_right):
        with scripted(script, expected.sequences):
            got = speculate(model, prompt, **ask, **arguments)
        assert got.sequences.tolist() == expected.sequences.tolist()
        for field in ("scores", "logits"):
            assert len(got[field]) == num_new
            for ours, theirs in zip(got[field], expected[field], strict=True):
                assert ours.dtype == theirs.dtype
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_only_the_outputs_that_were_asked_for() -> None:
    model, prompt = target("llama"), prompt_of(target("llama"))
    assert isinstance(speculate(model, prompt, max_new_tokens=3), Tensor)
    bare = speculate(model, prompt, max_new_tokens=3, return_dict_in_generate=True)
    assert (bare.scores, bare.logits, bare.attentions, bare.hidden_states) == (None, None, None, None)
    assert isinstance(bare, microspec_hf.MicroSpecOutput)


def cache_of(output: Any) -> tuple[str, Any]:
    return next((name, output[name]) for name in ("cache", "past_key_values") if output.get(name) is not None)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_returned_cache_serves_a_next_plain_call(name: str) -> None:
    model, text = target(name), written(name)
    end = int(text[0, 7 + 10])
    with scripted(perfect, text):  # the stop lies inside a block: rows behind it must be gone
        output = speculate(
            model,
            text[:, :7],
            max_new_tokens=16,
            eos_token_id=end,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
    field, cache = cache_of(output)
    length = output.sequences.shape[1]
    assert cache.get_seq_length() == length - 1
    longer = torch.cat([output.sequences, random_prompt(model, 3, seed=5)], dim=1)
    expected = plain(model, longer, max_new_tokens=8)
    assert plain(model, longer, max_new_tokens=8, **{field: cache}).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_callers_cache_goes_on_as_with_plain_generate(name: str, kind: str) -> None:
    """A conversation: each call gets the cache of the one before, which holds all but the latest tokens."""
    model, text = target(name), written(name)
    is_windowed = any(window is not None for window in Target(model).windows.values())
    if kind == "static" and is_windowed:
        pytest.skip("the rows of a static sliding-window layer are in no order; refused, see test_refusals")

    def new_cache() -> Any:
        return StaticCache(model.config, max_cache_len=80) if kind == "static" else DynamicCache(config=model.config)

    field = cache_argument(model.forward)
    ours, theirs = new_cache(), new_cache()
    ask = {"max_new_tokens": 8, "return_dict_in_generate": True, "output_hidden_states": True}
    prompt = text[:, :7]
    for turn in range(3):
        expected = plain(model, prompt, **{field: theirs}, **ask)
        with scripted(last_branch_right, expected.sequences):
            got = speculate(model, prompt, **{field: ours}, **ask)
        assert got.sequences.tolist() == expected.sequences.tolist()
        assert cache_of(got)[1] is ours
        assert int(ours.get_seq_length()) == int(theirs.get_seq_length()) == expected.sequences.shape[1] - 1
        for mine, other in zip(ours.layers, theirs.layers, strict=True):
            torch.testing.assert_close(mine.keys, other.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.values, other.values, rtol=1e-4, atol=1e-4)
        assert_hidden_states_equal(got.hidden_states, expected.hidden_states)
        prompt = torch.cat([expected.sequences, random_prompt(model, 3, seed=turn)], dim=1)


def assert_hidden_states_equal(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for step, expected in zip(ours, theirs, strict=True):
        assert len(step) == len(expected)
        for layer, other in zip(step, expected, strict=True):
            assert layer.shape == other.shape
            torch.testing.assert_close(layer, other, rtol=1e-4, atol=1e-4)  # softmax is float32


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("num_new", [1, 11])
def test_hidden_states(name: str, num_new: int) -> None:
    """One entry for each new token, as plain `generate` gives them; the first is of the whole prompt."""
    model = TINY_MODELS[name](attn_implementation="eager", dtype=torch.float64)
    prompt = prompt_of(model)
    ask = {"max_new_tokens": num_new, "return_dict_in_generate": True, "output_hidden_states": True}
    expected = plain(model, prompt, **ask)
    for script in (perfect, last_branch_right, alternately_right):
        with scripted(script, expected.sequences):
            got = speculate(model, prompt, microspec={"prefill_chunk": 3}, **ask)
        assert got.sequences.tolist() == expected.sequences.tolist()
        assert_hidden_states_equal(got.hidden_states, expected.hidden_states)


def test_calls_do_not_depend_on_earlier_calls() -> None:
    model, head = controlled_pair(scale=0.1)
    prompts = [random_prompt(model, 9, seed) for seed in (1, 2)]
    ask: dict[str, Any] = {"drafter": head, "max_new_tokens": 12, "return_dict_in_generate": True}
    alone = speculate(model, prompts[1], **ask)
    speculate(model, prompts[0], **ask)
    after = speculate(model, prompts[1], **ask)
    assert after.sequences.tolist() == alone.sequences.tolist()
    assert after.stats[0].emitted == alone.stats[0].emitted
    assert after.stats[0].mean_active_vocabulary == alone.stats[0].mean_active_vocabulary


def test_statistics() -> None:
    text = written("llama")
    with scripted(perfect, text):
        output = speculate(target("llama"), text[:, :7], max_new_tokens=16, return_dict_in_generate=True)
    [stats] = output.stats
    assert stats.new_tokens == 16
    assert stats.emitted == [7, 7, 7]  # 1 from the prompt, 7, 7, and 1 of the last 7
    assert stats.acceptance_length == 7
    assert stats.tree == {"depth": 5, "top_k": 10, "num_nodes": 60}
    assert 0 < stats.mean_active_vocabulary <= 101
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0


def test_drafting_is_timed_where_asked_for() -> None:
    model, head = controlled_pair(scale=0.1)
    prompt = random_prompt(model, 9)
    ask: dict[str, Any] = {"drafter": head, "max_new_tokens": 40, "return_dict_in_generate": True}
    usual = speculate(model, prompt, **ask)
    timed = speculate(model, prompt, microspec={"time_drafts": True}, **ask)
    assert timed.sequences.tolist() == usual.sequences.tolist()
    assert usual.stats[0].draft_seconds == 0.0
    assert 0 < timed.stats[0].draft_seconds < timed.stats[0].decode_seconds
    alone = speculate(model, prompt, microspec={"time_drafts": True}, **ask | {"drafter": None})
    assert alone.stats[0].draft_seconds == 0.0


def test_threads_do_not_disturb_each_other() -> None:
    model, head = controlled_pair(scale=0.1)
    prompts = [random_prompt(model, 9, seed) for seed in range(4)]
    expected = [plain(model, prompt, max_new_tokens=12).tolist() for prompt in prompts]
    with ThreadPoolExecutor(max_workers=4) as pool:
        got = list(pool.map(lambda p: speculate(model, p, drafter=head, max_new_tokens=12).tolist(), prompts))
    assert got == expected


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_inference_mode_before_and_after(vocabulary: str) -> None:
    model, head = controlled_pair(scale=0.1)
    prompt = prompt_of(model)
    ask: dict[str, Any] = {"drafter": head, "max_new_tokens": 8, "microspec": {"vocabulary": VOCABULARIES[vocabulary]}}
    expected = plain(model, prompt, max_new_tokens=8).tolist()
    for mode in (torch.inference_mode(), nullcontext(), torch.inference_mode()):
        with mode:
            assert speculate(model, prompt, **ask).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs(dtype: torch.dtype) -> None:
    """Texts of half precision depend on the shapes of the passes; here it is asked that all parts fit together."""
    model = tiny_llama(dtype=dtype)
    prompt = prompt_of(model)
    for vocabulary in VOCABULARIES.values():
        got = speculate(model, prompt, max_new_tokens=9, microspec={"vocabulary": vocabulary})
        assert got.shape == (1, 7 + 9)
        assert got[:, :8].tolist() == plain(model, prompt, max_new_tokens=1).tolist()


# Entry points ------------------------------------------------------------------------------------------------------


def test_three_entry_points_give_one_text() -> None:
    model, prompt = target("llama"), prompt_of(target("llama"))
    expected = written("llama")[:, : 7 + 8].tolist()
    head = random_head(model)
    assert speculate(model, prompt, max_new_tokens=8).tolist() == expected
    assert speculate(model, prompt, max_new_tokens=8, custom_generate=microspec_hf.generate).tolist() == expected
    ran = microspec_hf.run(
        model, inputs=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False, drafter=head
    )
    assert ran.tolist() == expected


def test_registration_is_idempotent_and_can_be_undone() -> None:
    registered = GenerationMixin.generate
    microspec_hf.register()
    assert GenerationMixin.generate is registered
    try:
        microspec_hf.unregister()
        microspec_hf.unregister()
        assert GenerationMixin.generate is not registered
        model, prompt = target("llama"), prompt_of(target("llama"))
        # The callable needs no registration.
        got = speculate(model, prompt, max_new_tokens=4, custom_generate=microspec_hf.generate)
        assert got.tolist() == written("llama")[:, : 7 + 4].tolist()
    finally:
        microspec_hf.register()
    assert speculate(model, prompt, max_new_tokens=4).tolist() == got.tolist()


def test_pipeline() -> None:
    model, words = tiny_llama(attn_implementation="eager"), tokenizer(101)
    pipe = pipeline("text-generation", model=model, tokenizer=words)
    ask: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_tensors": True}
    [expected] = pipe("abba", **ask)
    [got] = pipe("abba", custom_generate="microspec", drafter=random_head(model), **ask)
    assert got == expected
    assert len(got["generated_token_ids"]) > 8


def test_plain_generate_is_left_alone() -> None:
    model, prompt = target("llama"), prompt_of(target("llama"))
    assert plain(model, prompt, max_new_tokens=4).tolist() == written("llama")[:, : 7 + 4].tolist()
    with pytest.raises(ValueError, match="drafter"):
        plain(model, prompt, max_new_tokens=4, drafter=random_head(model))


def test_drafter_from_a_folder_named_in_the_generation_config(tmp_path: Any) -> None:
    model = tiny_llama(attn_implementation="eager")
    random_head(model).save_pretrained(tmp_path / "head")
    prompt = prompt_of(model)
    expected = written("llama")[:, : 7 + 5].tolist()

    named = GenerationConfig(max_new_tokens=5, do_sample=False, drafter=str(tmp_path / "head"))
    assert model.generate(prompt, generation_config=named, custom_generate="microspec").tolist() == expected

    model.generation_config.drafter = str(tmp_path / "head")
    got = model.generate(prompt, max_new_tokens=5, do_sample=False, custom_generate="microspec")
    assert got.tolist() == expected


@pytest.mark.parametrize("custom_generate", ["microspec", microspec_hf.generate], ids=["name", "callable"])
def test_no_network(custom_generate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model, prompt = target("llama"), prompt_of(target("llama"))
    got = speculate(model, prompt, max_new_tokens=4, custom_generate=custom_generate)
    assert got.tolist() == written("llama")[:, : 7 + 4].tolist()


@pytest.mark.parametrize("set_up", [lambda m: None, lambda m: m.train()], ids=["eval", "train"])
def test_nothing_is_left_on_the_model(set_up: Callable[[Any], Any]) -> None:
    model = tiny_llama(attn_implementation="eager")
    set_up(model)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    config, generation_config = model.config.to_dict(), model.generation_config.to_dict()
    got = speculate(model, prompt_of(model), max_new_tokens=4)
    assert got.tolist() == written("llama")[:, : 7 + 4].tolist()
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert model.config.to_dict() == config
    assert model.generation_config.to_dict() == generation_config
    assert not got.requires_grad


@pytest.mark.parametrize("window", [2, 3, 5])
def test_small_windows(window: int) -> None:
    model = tiny_mistral(window=window)
    assert_same(model, prompt_of(model), last_branch_right, max_new_tokens=12)


def test_window_of_one_token() -> None:
    """Compared with decoding without a cache: transformers' own cache keeps all rows when the window is 1."""
    model = tiny_mistral(window=1)
    expected = plain(model, prompt_of(model), max_new_tokens=12, use_cache=False)
    with scripted(last_branch_right, expected):
        assert speculate(model, prompt_of(model), max_new_tokens=12).tolist() == expected.tolist()


# What the caller's own objects see ---------------------------------------------------------------------------------


class Diary(LogitsProcessor, StoppingCriteria):
    """Notes each text it is shown, as a processor and as a criterion."""

    def __init__(self, stop: int | None = None):
        self.processed: list[list[int]] = []
        self.asked: list[list[int]] = []
        self.num_scores: list[int | None] = []
        self.stop = stop

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        if isinstance(scores, Tensor):
            self.processed.append(input_ids[0].tolist())
            return scores
        self.asked.append(input_ids[0].tolist())
        self.num_scores.append(None if scores is None else len(scores))
        return torch.tensor([input_ids.shape[1] == self.stop])


@pytest.mark.parametrize("output_scores", [False, True])
@pytest.mark.parametrize("ending", [{"max_new_tokens": 11}, {"max_new_tokens": 40, "stop": 15}, {"eos": 14}], ids=str)
@pytest.mark.parametrize("script", [perfect, last_branch_right, wrong])
def test_processors_and_criteria_see_what_plain_generate_shows_them(
    script: Script, ending: dict[str, int], output_scores: bool
) -> None:
    """Each text once, in order, and none behind the end, although the drafts go on there."""
    model, text = target("llama"), written("llama")
    diaries = []
    for decode in (plain, speculate):
        diary = Diary(ending.get("stop"))
        arguments: dict[str, Any] = {"max_new_tokens": ending.get("max_new_tokens", 20)}
        if "eos" in ending:
            arguments |= {"eos_token_id": int(text[0, ending["eos"]]), "pad_token_id": 0}
        with scripted(script, text):
            decode(
                model,
                text[:, :7],
                logits_processor=[diary],
                stopping_criteria=[diary],
                return_dict_in_generate=True,
                output_scores=output_scores,
                **arguments,
            )
        diaries.append(diary)
    expected, got = diaries
    assert got.processed == expected.processed
    assert got.asked == expected.asked
    assert got.num_scores == expected.num_scores
