"""LoRA and other adapters of PEFT on the target: its text stays plain `generate`'s, its head keeps its true rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import microspec_hf
from microspec_hf.hf import Target
from tests.doubles import SCRIPTS, plain, scripted, speculate
from tests.models.families import head_for, make
from tests.test_refusals import refused

peft = pytest.importorskip("peft")

ATTENTION = ["q_proj", "v_proj"]
PROMPT = torch.randint(2, 90, (1, 13), generator=torch.Generator().manual_seed(3))


def adapted(family: str = "llama", targets: Any = ATTENTION, seed: int = 0, **options: Any) -> Any:
    """A PeftModel whose LoRA says something (a fresh one says nothing)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **options
        )
        model = peft.get_peft_model(make(family, seed=3, attention="eager"), config)
    return model.eval()


def assert_same(model: Any, **arguments: Any) -> Tensor:
    """Plain and speculative text agree, for scripted trees and for those of a random head."""
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    expected = plain(model, PROMPT, max_new_tokens=14, **arguments)
    for script in ("last_branch_right", "alternately_right"):
        with scripted(SCRIPTS[script], expected):
            output = speculate(
                model,
                PROMPT,
                drafter=head_for(base),
                max_new_tokens=14,
                return_dict_in_generate=True,
                **arguments,
            )
        assert output.sequences.tolist() == expected.tolist()
        assert output.stats[0].acceptance_length > 2
    for vocabulary in ("full", "dynamic", {"kind": "static", "token_ids": tuple(range(0, 97, 2))}):
        got = speculate(
            model, PROMPT, drafter=head_for(base), max_new_tokens=4, microspec={"vocabulary": vocabulary}, **arguments
        )
        assert got.tolist() == expected[:, : 13 + 4].tolist()
    return expected


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_lora(family: str) -> None:
    targets = ["q_a_proj", "kv_b_proj", "o_proj"] if family == "deepseek_v3" else ATTENTION
    model = adapted(family, targets)
    text = assert_same(model)
    with model.disable_adapter():
        assert plain(model, PROMPT, max_new_tokens=14).tolist() != text.tolist()  # the adapter says something
        assert_same(model)


def test_model_below_the_wrappers() -> None:
    model = adapted()
    expected = assert_same(model)
    assert assert_same(model.base_model.model).tolist() == expected.tolist()
    base = model.get_base_model()
    ran = microspec_hf.run(base, inputs=PROMPT, max_new_tokens=14, do_sample=False, drafter=head_for(base))
    assert ran.tolist() == expected.tolist()


def test_callable_on_a_peft_model() -> None:
    model = adapted()
    expected = plain(model, PROMPT, max_new_tokens=12)
    got = speculate(
        model,
        PROMPT,
        drafter=head_for(model.get_base_model()),
        custom_generate=microspec_hf.generate,
        max_new_tokens=12,
    )
    assert got.tolist() == expected.tolist()


def test_switching_adapters() -> None:
    model = adapted()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=ATTENTION, init_lora_weights=False))
    texts = []
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        texts.append(assert_same(model).tolist())
    assert texts[0] == texts[2] != texts[1]


def test_merged_adapter() -> None:
    model = adapted(targets=[*ATTENTION, "lm_head"])
    expected = assert_same(model)
    model.merge_adapter()
    assert assert_same(model).tolist() == expected.tolist()
    model.unmerge_adapter()
    assert assert_same(model.merge_and_unload()).tolist() == expected.tolist()


# Adapters on the head and the embeddings ---------------------------------------------------------------------------


@torch.no_grad()
def assert_true_rows(model: PreTrainedModel) -> None:
    """Chosen rows of the head give the model's own logits at their ids."""
    target = Target(model)
    output = model(PROMPT, output_hidden_states=True)
    ids = torch.tensor([7, 96, 3, 7])
    bias = None if target.head.bias is None else target.head.bias[ids]
    logits = target.head.project(output.hidden_states[-1][0], target.head.rows(ids), bias)
    torch.testing.assert_close(logits, output.logits[0][:, ids], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "phi"])  # phi: with a bias
@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "embed_tokens"], ["lm_head", "embed_tokens"]], ids=str)
def test_lora_on_head_and_embeddings(family: str, targets: list[str]) -> None:
    model = adapted(family, targets)
    assert_same(model)
    assert_true_rows(model.get_base_model())
    with model.disable_adapter():
        assert_true_rows(model.get_base_model())


def test_two_loras_on_the_head_at_once() -> None:
    model = adapted(targets=["lm_head"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])
    assert_true_rows(model.get_base_model())
    assert_same(model)


def test_retrained_head() -> None:
    """`modules_to_save`: PEFT keeps a whole head beside the old one."""
    model = adapted(modules_to_save=["lm_head"])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(-1)
    assert_true_rows(model.get_base_model())
    assert_same(model)


@pytest.mark.parametrize(
    "make_model",
    [
        lambda: adapted(targets=["lm_head"], use_dora=True),
        lambda: adapted(targets=["lm_head"], lora_bias=True),
        lambda: peft.get_peft_model(
            make("llama"), peft.LoHaConfig(r=4, target_modules=["lm_head"], init_weights=False)
        ).eval(),
    ],
    ids=["dora", "bias", "loha"],
)
def test_other_adapters_on_the_head_are_refused(make_model: Any) -> None:
    model = make_model()
    with refused(model, "LlamaForCausalLM", "LM head", "plain LoRA"):
        speculate(model, PROMPT, drafter=head_for(model.get_base_model()), max_new_tokens=3)


def test_other_adapters_on_the_layers_are_served() -> None:
    assert_same(adapted(use_dora=True))
    loha = peft.LoHaConfig(r=4, target_modules=ATTENTION, init_weights=False)
    assert_same(peft.get_peft_model(make("llama", seed=3), loha).eval())


# Adapters that act on the text as a whole --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_learned_prompts_are_refused(kind: str) -> None:
    config = getattr(peft, kind)(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = peft.get_peft_model(make("llama"), config).eval()
    base = model.get_base_model()
    for _ in range(2):
        with refused(model, "LlamaForCausalLM", "learned prompt", "LoRA"):
            speculate(model, PROMPT, drafter=head_for(base), max_new_tokens=3)
    assert_same(base)  # without the prompt it is the model that it was


def test_activated_lora_is_refused() -> None:
    model = adapted(alora_invocation_tokens=[5, 6])
    with refused(model, "LlamaForCausalLM", "activated LoRA"):
        speculate(model, PROMPT, drafter=head_for(model.get_base_model()), max_new_tokens=3)
