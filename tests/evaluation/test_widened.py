"""A widened pair costs what the large pair costs and does what the small one does."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LogitsProcessorList, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from microspec_hf import EagleConfig, EagleHead, MicroSpecConfig, TreeConfig, VocabularyConfig, load_drafter
from microspec_hf.drafters import SMOLLM2
from microspec_hf.evaluation.decoding import decode, decode_plainly
from microspec_hf.evaluation.widened import COSTS, Cost, Widening, shorten, widen
from microspec_hf.verification import TokenRule
from tests import tiny
from tests.conftest import ChatModel
from tests.doubles import begin, controlled_pair, make_drafter, random_head, random_prompt
from tests.evaluation.conftest import PairFolders

ROOT = Path(__file__).parent.parent.parent
GREEDY = TokenRule(LogitsProcessorList(), do_sample=False)
TREE = TreeConfig(depth=3, top_k=4, num_nodes=16)

Pair = tuple[PreTrainedModel, EagleHead]

# The tiny targets have 3 layers of 6/2 heads of 8, hidden size 48 and 97 to 113 ids.
WIDE = Cost("llama", 160, 224, 5, 16, 4, head_dim=24, vocab_size=150)
TIED = Cost("llama", 128, 96, 3, 8, 2, head_dim=8, vocab_size=200, tie_word_embeddings=True)
BIASED = Cost("qwen2", 112, 130, 4, 14, 2, 16, vocab_size=131, drafter_fc_bias=True, drafter_qkv_bias=True)
EXACT = Cost("llama", 192, 128, 4, 16, 4, head_dim=32, vocab_size=150)  # sqrt(h / H) = 1/2, sqrt(D / d) = 2


@pytest.fixture
def norms_in_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes RMSNorm in float32 in every dtype; its rounding would hide small faults."""

    def forward(norm: Any, hidden: Tensor) -> Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return norm.weight * (hidden * torch.rsqrt(variance + norm.variance_epsilon))  # type: ignore[no-any-return]

    for norm in (LlamaRMSNorm, Qwen2RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)


def tied_llama(dtype: torch.dtype) -> PreTrainedModel:
    config = LlamaConfig(vocab_size=101, num_hidden_layers=3, tie_word_embeddings=True, **tiny._SIZES)
    return tiny._random_model(config, dtype, "sdpa", seed=0)


def biased_head(model: PreTrainedModel, dtype: torch.dtype) -> EagleHead:
    config = EagleConfig(**random_head(model).config.to_dict() | {"fc_bias": True, "qkv_bias": True})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = EagleHead(config)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(parameter + 0.4 * torch.randn_like(parameter))
    return head.to(dtype).eval()


def source(name: str, dtype: torch.dtype = torch.float64) -> Pair:
    model = {"llama": tiny.tiny_llama, "tied": tied_llama, "qwen2": tiny.tiny_qwen2}[name](dtype=dtype)
    head = biased_head(model, dtype) if name == "qwen2" else random_head(model, dtype=dtype)
    return model, head


PAIRS = [
    pytest.param("llama", WIDE, id="llama-to-llama"),
    pytest.param("llama", EXACT, id="llama-to-powers-of-two"),
    pytest.param("tied", WIDE, id="tied-to-untied"),
    pytest.param("tied", TIED, id="tied-to-tied"),
    pytest.param("llama", BIASED, id="llama-to-qwen2"),
    pytest.param("qwen2", BIASED, id="qwen2-to-qwen2"),
]


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    return model(ids).logits[0]  # type: ignore[no-any-return]


@pytest.mark.usefixtures("norms_in_the_dtype")
@pytest.mark.parametrize(("name", "cost"), PAIRS)
def test_logits_are_equal_over_the_old_vocabulary_and_others_never_win(name: str, cost: Cost) -> None:
    model, head = source(name)
    wide, _ = widen(model, head, cost)
    ids = random_prompt(model, 40)
    old, new = logits_of(model, ids), logits_of(wide, ids)
    count = model.config.vocab_size
    torch.testing.assert_close(new[:, :count], old, rtol=0, atol=1e-9)
    assert new.shape[1] == cost.vocab_size > count
    assert (new[:, count:].amax(1) < new[:, :count].amin(1) - 1e4).all()
    torch.testing.assert_close(new.log_softmax(-1)[:, :count], old.log_softmax(-1), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-4), (torch.float32, 1e-3)], ids=["float64", "float32"]
)
def test_with_transformers_own_norm_only_rounding_is_left(dtype: torch.dtype, tolerance: float) -> None:
    model, head = source("llama", dtype)
    wide, _ = widen(model, head, WIDE)
    ids = random_prompt(model, 40)
    old = logits_of(model, ids)
    assert wide.dtype == dtype
    torch.testing.assert_close(logits_of(wide, ids)[:, :101], old, rtol=0, atol=tolerance * float(old.abs().max()))


@pytest.mark.usefixtures("norms_in_the_dtype")
def test_bfloat16_weights_are_rounded_by_nothing_but_the_scales() -> None:
    """Where the scales are powers of two, the widened weights are the small pair's, bit for bit."""
    model, head = source("llama", torch.bfloat16)
    wide, wide_head = widen(model, head, EXACT)
    assert wide.dtype == wide_head.dtype == torch.bfloat16
    ids = random_prompt(model, 30)
    old, new = logits_of(model.double(), ids), logits_of(wide.double(), ids)
    torch.testing.assert_close(new[:, :101], old, rtol=0, atol=1e-9)


def test_bfloat16_from_float32_rounds_once() -> None:
    model, head = source("llama", torch.float32)
    wide, wide_head = widen(model, head, WIDE, dtype=torch.bfloat16)
    assert {p.dtype for p in [*wide.parameters(), *wide_head.parameters()]} == {torch.bfloat16}
    norm = model.model.norm.weight * math.sqrt(48 / 160)
    assert torch.equal(wide.model.norm.weight[:48], norm.bfloat16())
    assert wide_head.rotary_emb.inv_freq.dtype == torch.float32


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    kv_heads, group = draw(st.integers(2, 4)), draw(st.integers(3, 5))
    heads = kv_heads * group
    return Cost(
        model_type=draw(st.sampled_from(["llama", "qwen2"])),
        hidden_size=heads * (48 // heads + draw(st.integers(1, 5))),
        intermediate_size=draw(st.integers(96, 150)),
        num_hidden_layers=draw(st.integers(3, 6)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=8 * draw(st.integers(1, 4)),
        vocab_size=draw(st.integers(101, 200)),
        tie_word_embeddings=draw(st.booleans()),
    )


@given(cost=costs(), seed=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_any_larger_shapes_do(cost: Cost, seed: int) -> None:
    model, head = source("tied")
    wide, _ = widen(model, head, cost, seed=seed)
    ids = random_prompt(model, 20, seed)
    torch.testing.assert_close(logits_of(wide, ids)[:, :101], logits_of(model, ids), rtol=0, atol=1e-3)
    assert wide.num_parameters() == cost.num_parameters


@pytest.mark.usefixtures("norms_in_the_dtype")
@pytest.mark.parametrize(("name", "cost"), PAIRS)
@torch.no_grad()
def test_drafter_predicts_the_same_hidden_states(name: str, cost: Cost) -> None:
    model, head = source(name)
    wide, wide_head = widen(model, head, cost)
    ids = random_prompt(model, 20)

    def rows(target: Any, drafter: EagleHead, hidden: Tensor) -> Tensor:
        embeddings = target.get_input_embeddings()(ids)
        first = drafter(embeddings[:, 1:], hidden[:, :-1], torch.arange(19)[None])
        second = drafter(embeddings[:, 2:], first[:, :-1], torch.arange(18)[None])  # from its own output
        return torch.cat([first, second], dim=1)

    old, new = rows(model, head, hidden_of(model, ids)), rows(wide, wide_head, hidden_of(wide, ids))
    torch.testing.assert_close(new[..., :48], old, rtol=0, atol=1e-9)
    assert (new[..., 49:] == 0).all()
    count = model.config.vocab_size
    old_logits, new_logits = model.get_output_embeddings()(old), wide.get_output_embeddings()(new)
    torch.testing.assert_close(new_logits[..., :count], old_logits, rtol=0, atol=1e-9)
    assert (new_logits[..., count:] < -1e6).all()  # no share in the softmax, however flat it is


def hidden_of(model: Any, ids: Tensor) -> Tensor:
    return model.get_decoder()(ids).last_hidden_state  # type: ignore[no-any-return]


@pytest.mark.parametrize("vocabulary", ["full", "dynamic", "static"])
@pytest.mark.parametrize(("name", "cost"), PAIRS)
def test_texts_and_trees_are_the_same(name: str, cost: Cost, vocabulary: str) -> None:
    model, head = source(name)
    config = VocabularyConfig(vocabulary, max_rows=40, token_ids=tuple(range(0, 90, 2)), floor=0)  # type: ignore[arg-type]
    prompt = random_prompt(model, 12)
    old_text, old_trees = drafted(model, head, config, prompt)
    new_text, new_trees = drafted(*widen(model, head, cost), config, prompt)
    assert new_text == old_text
    for old, new in zip(old_trees, new_trees, strict=True):
        assert old.num_nodes > 1
        assert torch.equal(new.tokens, old.tokens)
        assert torch.equal(new.parents, old.parents)


def drafted(
    model: PreTrainedModel, head: EagleHead, config: VocabularyConfig, prompt: Tensor
) -> tuple[list[list[int]], list[Any]]:
    """What six rounds emit, and their trees."""
    target, drafter = make_drafter(model, head, config, TREE)
    trees = []
    draft = drafter.draft

    def recorded(root: Tensor) -> Any:
        trees.append(draft(root))
        return trees[-1]

    drafter.draft = recorded  # type: ignore[method-assign]
    with torch.no_grad():
        alone, emission = begin(target, drafter, prompt[0], GREEDY)
        return [emission.tokens, *(alone.step().tokens for _ in range(6))], trees


@pytest.mark.parametrize("vocabulary", ["full", "dynamic"])
def test_acceptance_is_the_same(vocabulary: Any) -> None:
    model, head = controlled_pair(0.05)
    wide, wide_head = widen(model, head, WIDE)
    prompt = random_prompt(model, 9)
    config = MicroSpecConfig(TREE, vocabulary, fallback=False)
    old, old_stats = decode(model, head, prompt, config, 40)
    new, new_stats = decode(wide, wide_head, prompt, config, 40)
    assert new == old == decode_plainly(wide, prompt, 40)
    assert new_stats.emitted == old_stats.emitted
    assert 1.5 < old_stats.acceptance_length < TREE.num_path_slots


PUBLISHED = {"llama-3-8b": 8_030_261_248, "llama-3.2-1b": 1_235_814_400, "qwen2-7b": 7_615_616_512}


@pytest.mark.parametrize("name", list(COSTS))
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    widening = Widening(*source("tied", torch.float32), name)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(widening.target_config)
    assert target.num_parameters() == COSTS[name].num_parameters == PUBLISHED[name]
    assert target.config.tie_word_embeddings == (name == "llama-3.2-1b")
    attention = target.model.layers[0].self_attn
    assert (attention.head_dim, attention.num_key_value_groups) == {"qwen2-7b": (128, 7), "llama-3-8b": (128, 4)}.get(
        name, (64, 4)
    )


@pytest.mark.parametrize("name", list(COSTS))
def test_drafters_have_the_shapes_of_the_official_heads(name: str) -> None:
    hidden, keys, neurons = {
        "llama-3-8b": (4096, 1024, 14336),
        "llama-3.2-1b": (2048, 512, 8192),
        "qwen2-7b": (3584, 512, 18944),
    }[name]
    official = {
        "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (hidden, hidden),
        "layers.0.self_attn.k_proj.weight": (keys, hidden),
        "layers.0.self_attn.v_proj.weight": (keys, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "layers.0.mlp.gate_proj.weight": (neurons, hidden),
        "layers.0.mlp.up_proj.weight": (neurons, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, neurons),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
    if name == "qwen2-7b":
        official |= {"fc.bias": (hidden,), "layers.0.self_attn.q_proj.bias": (hidden,)}
        official |= {f"layers.0.self_attn.{kind}_proj.bias": (keys,) for kind in "kv"}
    widening = Widening(*source("tied", torch.float32), name)
    with torch.device("meta"):
        head = EagleHead(widening.drafter_config)
    assert {key: tuple(tensor.shape) for key, tensor in head.state_dict().items()} == official
    assert head.config.vocab_size == COSTS[name].vocab_size


@pytest.mark.parametrize("name", list(COSTS))
def test_a_cost_spread_over_more_layers_keeps_its_parameters(name: str) -> None:
    cost = COSTS[name]
    spread = cost.spread(40)
    assert spread.num_hidden_layers == 40
    assert spread.num_parameters == pytest.approx(cost.num_parameters, rel=0.01)
    assert replace(spread, num_hidden_layers=cost.num_hidden_layers, intermediate_size=cost.intermediate_size) == cost
    for layers in (0, cost.num_hidden_layers - 1, 5000):
        with pytest.raises(ValueError, match=f"cannot be spread over {layers}"):
            cost.spread(layers)


def test_what_nothing_live_reads_is_random_and_without_effect() -> None:
    model, head = source("llama")
    ids = random_prompt(model, 10)
    one, two = (widen(model, head, WIDE, seed=seed)[0] for seed in (0, 1))
    added = one.model.layers[4]  # behind the three of the source
    dead = [added.mlp.down_proj.weight, added.self_attn.o_proj.weight, added.mlp.gate_proj.weight[:, 49:]]
    assert all((weight != 0).all() and weight.std() > 0.01 for weight in dead)
    assert not torch.equal(added.mlp.down_proj.weight, two.model.layers[4].mlp.down_proj.weight)
    assert torch.equal(logits_of(one, ids), logits_of(two, ids))


def test_the_small_pair_is_left_alone_and_shares_no_memory() -> None:
    model, head = source("llama")
    before = [parameter.clone() for parameter in [*model.parameters(), *head.parameters()]]
    wide, wide_head = widen(model, head, replace(WIDE, head_dim=8))
    with torch.no_grad():
        for parameter in [*wide.parameters(), *wide_head.parameters()]:
            parameter.fill_(1.0)
    after = [*model.parameters(), *head.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert model.config.hidden_size == head.config.hidden_size == 48


def test_what_was_measured_of_the_drafter_is_kept() -> None:
    model, head = source("llama")
    head.config.expected_acceptance = {"2": {"8": 2.5}}
    model.generation_config.eos_token_id = 7
    wide, wide_head = widen(model, head, WIDE)
    assert wide_head.config.expected_acceptance == {"2": {"8": 2.5}}
    assert wide.generation_config.eos_token_id == 7
    assert not wide.training


def test_tensors_come_one_by_one() -> None:
    widening = Widening(*source("llama"), WIDE)
    tensors = widening.target_tensors()
    name, first = next(tensors)
    assert name == "model.embed_tokens.weight"
    first.zero_()  # nobody else has it
    assert next(tensors)[1].abs().sum() > 0


def small(field: str, value: Any) -> Callable[[Pair], tuple[Pair, Cost]]:
    return lambda pair: (pair, replace(WIDE, **{field: value}))


def configured(part: int, field: str, value: Any) -> Callable[[Pair], tuple[Pair, Cost]]:
    def change(pair: Pair) -> tuple[Pair, Cost]:
        setattr(pair[part].config, field, value)
        return pair, WIDE

    return change


REFUSED = {
    "hidden size of 48, and at most 47": small("hidden_size", 48),
    "intermediate size of 96, and at most 95": small("intermediate_size", 95),
    "vocabulary of 101, and at most 100": small("vocab_size", 100),
    "key-value heads of 2, and at most 1": lambda pair: (
        pair,
        replace(WIDE, num_attention_heads=16, num_key_value_heads=1),
    ),
    "each key-value head of 3, and at most 2": small("num_attention_heads", 8),
    "heads of 8 dimensions, of which the cost's 20": small("head_dim", 20),
    "the target has 3 layers, the cost 2": small("num_hidden_layers", 2),
    "an LM head of its own": small("tie_word_embeddings", True),
    "the drafter has fc_bias": configured(1, "fc_bias", True),
    "attention or MLP has biases": configured(0, "attention_bias", True),
    "'yarn'": configured(0, "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
    "is a gemma2": configured(0, "model_type", "gemma2"),
}


@pytest.mark.parametrize("message", list(REFUSED))
def test_what_does_not_fit_is_refused(message: str) -> None:
    pair, cost = REFUSED[message](source("llama"))
    with pytest.raises(ValueError, match=message):
        widen(*pair, cost)


def test_refusals_name_all_reasons() -> None:
    model, head = source("llama")
    with pytest.raises(ValueError, match=r"hidden size of 48.*vocabulary of 101.*float16") as refusal:
        widen(model, head, replace(WIDE, hidden_size=48, vocab_size=99), dtype=torch.float16)
    assert "the drafter has a vocabulary of 101" in str(refusal.value)
    with pytest.raises(ValueError, match="biases or sliding windows"):
        widen(*source("qwen2"), WIDE)
    with pytest.raises(ValueError, match=r"No cost is called 'llama-4'. Known are llama-3-8b"):
        widen(model, head, "llama-4")
    with pytest.raises(ValueError, match="head_dim"):
        replace(WIDE, head_dim=0)
    with pytest.raises(ValueError, match="multiple"):
        replace(WIDE, num_key_value_heads=3)
    with pytest.raises(ValueError, match="llama or qwen2"):
        replace(WIDE, model_type="gpt2")


@torch.no_grad()
def test_shorten_takes_out_the_layers_that_do_least() -> None:
    model, _ = source("qwen2")
    idle = model.model.layers[1]
    for weight in (idle.self_attn.o_proj.weight, idle.mlp.down_proj.weight):
        weight.zero_()
    ids = random_prompt(model, 12)
    short = shorten(model, 2, ids)
    assert torch.equal(logits_of(short, ids), logits_of(model, ids))
    assert len(short.model.layers) == short.config.num_hidden_layers == len(short.config.layer_types) == 2
    assert model.config.num_hidden_layers == len(model.model.layers) == 3
    prompt = random_prompt(model, 5)
    assert decode_plainly(short, prompt, 8) == decode_plainly(model, prompt, 8)  # its cache has the right layers
    with pytest.raises(ValueError, match="1 to 3 layers, got 4"):
        shorten(model, 4, ids)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setitem(COSTS, "wide", WIDE)
    monkeypatch.setitem(COSTS, "flat", replace(WIDE, num_hidden_layers=2, intermediate_size=640))
    return importlib.import_module("widen")


def test_example_writes_the_pair(example: Any, pair_folders: PairFolders, tmp_path: Path) -> None:
    folders = {"target": str(pair_folders.target), "drafter": str(pair_folders.drafter)}
    example.main(example.Arguments(**folders, output=str(tmp_path), cost="wide", dtype="float32"))
    model = AutoModelForCausalLM.from_pretrained(pair_folders.target, dtype=torch.float32)
    head = load_drafter(pair_folders.drafter, torch.float32, "cpu")
    expected = widen(model, head, "wide")
    written: tuple[nn.Module, nn.Module] = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "target"),
        load_drafter(tmp_path / "drafter", torch.float32, "cpu"),
    )
    for read, made in zip(written, expected, strict=True):
        tensors = made.state_dict()
        assert read.state_dict().keys() == tensors.keys()
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in read.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "target").decode([3]) == "w3"
    prompt = random_prompt(model, 6)
    config = MicroSpecConfig(TREE, "dynamic", fallback=False)
    new, _ = decode(written[0], str(tmp_path / "drafter"), prompt, config, 12)  # type: ignore[arg-type]
    assert new == decode_plainly(model, prompt, 12)


@pytest.mark.parametrize(("deep", "layers"), [("spread", 3), ("shorten", 2)])
def test_example_with_a_target_that_is_too_deep(
    example: Any, pair_folders: PairFolders, tmp_path: Path, deep: str, layers: int
) -> None:
    folders = {"target": str(pair_folders.target), "drafter": str(pair_folders.drafter), "output": str(tmp_path)}
    with pytest.raises(ValueError, match=r"shorten.*Cost\.spread"):
        example.main(example.Arguments(**folders, cost="flat"))
    assert not list(tmp_path.iterdir())
    example.main(example.Arguments(**folders, cost="flat", deep=deep))
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert wide.config.num_hidden_layers == layers
    assert wide.dtype == torch.bfloat16
    assert wide.num_parameters() == pytest.approx(COSTS["flat"].num_parameters, rel=0.1)


@pytest.mark.slow
def test_smollm2_writes_the_same_texts_with_the_same_acceptance(smollm2: ChatModel) -> None:
    head = load_drafter(SMOLLM2, torch.float32, "cpu")
    cost = Cost("llama", 1024, 2048, 32, 16, 4, head_dim=128, vocab_size=64000)
    wide, wide_head = widen(smollm2.model, head, cost)
    prompt = smollm2.chat("Explain how a bicycle stays upright.")
    old, new = logits_of(smollm2.model, prompt), logits_of(wide, prompt)
    torch.testing.assert_close(new[:, : old.shape[1]], old, rtol=0, atol=1e-3)
    assert (new[:, old.shape[1] :] < -1e3).all()
    for vocabulary in ("full", "dynamic"):
        config = MicroSpecConfig(TreeConfig(), vocabulary, fallback=False)  # type: ignore[arg-type]
        text, stats = decode(smollm2.model, head, prompt, config, 32)
        wide_text, wide_stats = decode(wide, wide_head, prompt, config, 32)
        assert wide_text == text
        assert wide_stats.emitted == stats.emitted
        assert stats.acceptance_length > 2
