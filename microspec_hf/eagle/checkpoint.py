"""Reads the checkpoints of EAGLE heads that people have; what is not understood is refused by its name."""

from __future__ import annotations

import copy
import json
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.utils import cached_file

from microspec_hf.eagle.config import EagleConfig
from microspec_hf.eagle.model import EagleHead, refuse_tensors

Config = dict[str, Any]
Tensors = dict[str, Tensor]

IGNORED = (
    "embed_tokens.weight",
    "lm_head.weight",
    "rotary_emb.inv_freq",
    "layers.0.self_attn.rotary_emb.inv_freq",
)
"""Tensors that official checkpoints may carry and that are the target's, or computed."""

ATTENTION, MLP = "layers.0.self_attn", "layers.0.mlp"


def load_drafter(source: str | Path | EagleHead, dtype: torch.dtype, device: torch.device | str) -> EagleHead:
    """An EAGLE head, ready to draft.

    Understood are heads written by `EagleHead.save_pretrained` and the official EAGLE-1/2 layout
    (safetensors, or `pytorch_model.bin`, which is read without running any code that it may hold).

    Args:
        source: Hub id, folder, or a head. A head of another dtype or device is copied, not changed.
        dtype: of the weights.
        device: of the weights.

    Raises:
        ValueError: the source is missing, damaged, of another layout (EAGLE-3, SpecForge, speculators...), or
            its tensors are not exactly those of an EAGLE-1/2 head.
    """
    device = torch.device(device)
    if isinstance(source, EagleHead):
        parameter = next(source.parameters())
        if parameter.dtype == dtype and parameter.device == device:
            return _evaluating(source)
        return _moved(copy.deepcopy(source), dtype, device)
    config = _read_config(source)
    if config.get("model_type") == EagleConfig.model_type:
        head: EagleHead = EagleHead.from_pretrained(str(source), dtype=dtype)
    else:
        head = _from_official(str(source), config, dtype)
    return _moved(head, dtype, device)


def check_pair(head: EagleHead, target_config: Any, target_name: str) -> None:
    """Refuse a head that was not made for this target.

    Names are compared only where both are Hub ids, and only by their last part: a folder may be called
    anything, and a mirror of the right model is the right model.

    Args:
        head: the drafter.
        target_config: the target's text configuration.
        target_name: what the target was loaded from, or "".

    Raises:
        ValueError: hidden size, vocabulary or name differ; the message has both values.
    """
    for name, meaning in (("hidden_size", "hidden states of size"), ("vocab_size", "a vocabulary of size")):
        drafter, target = getattr(head.config, name), getattr(target_config, name)
        if drafter != target:
            raise ValueError(
                f"The drafter was made for {meaning} {drafter}, but the target {target_name or 'in use'!r} "
                "has "
                f"{target}. An EAGLE head serves only the target that it was trained for"
                + (f", {head.config.target}." if head.config.target else ".")
            )
    trained_for = head.config.target or ""
    if _is_hub_id(trained_for) and _is_hub_id(target_name) and _last(trained_for) != _last(target_name):
        raise ValueError(
            f"The drafter was trained for {trained_for}, but the target is {target_name}. Pass the drafter "
            "of this "
            "target; if the target is a copy under another name, load the head with "
            "microspec_hf.load_drafter and "
            "set head.config.target = None."
        )


def _moved(head: EagleHead, dtype: torch.dtype, device: torch.device) -> EagleHead:
    nn.Module.to(head, device=device, dtype=dtype)  # in place; the method of transformers is not typed
    return _evaluating(head)


def _evaluating(head: EagleHead) -> EagleHead:
    nn.Module.eval(head)
    return head


def _is_hub_id(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not Path(name).exists()


def _last(name: str) -> str:
    return name.rsplit("/", 1)[-1].lower()


def _find(source: str | Path, name: str) -> Path | None:
    """A file of a folder or Hub repository, or None if it has no such file."""
    found = cached_file(str(source), name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _read_config(source: str | Path) -> Config:
    try:
        file = _find(source, "config.json")
    except OSError as error:
        raise ValueError(
            f"No drafter could be read from {str(source)!r}: it is no folder here, and the Hub gave: {error}"
        ) from error
    if file is None:
        raise ValueError(
            f"No drafter could be read from {str(source)!r}: a folder or Hub repository of that name with "
            "a config.json "
            "was not found. Pass the folder or Hub id of an EAGLE head."
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(config).__name__}.")
    return config


def _from_official(source: str, config: Config, dtype: torch.dtype) -> EagleHead:
    _refuse_config(source, config)
    tensors = _read_tensors(source)
    _refuse_layout(source, tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in IGNORED}
    structure = _structure(source, config, tensors)
    shapes = _shapes(structure)
    refuse_tensors(source, shapes.keys() - tensors.keys(), tensors.keys() - shapes.keys())
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"{name} of {source} has shape {tuple(tensors[name].shape)}; its config.json asks for "
                f"{shape}. "
                "Configuration and weights belong to different heads."
            )
    head: EagleHead = EagleHead.from_pretrained(None, config=structure, state_dict=tensors, dtype=dtype)
    return head


def _refuse_config(source: str, config: Config) -> None:
    """Layouts that the configuration alone gives away."""
    kind = config.get("speculators_model_type")
    architectures = " ".join(config.get("architectures") or ())
    if kind is not None:
        layout = f"a vLLM speculators checkpoint ({kind})"
    elif "eagle3" in architectures.lower():
        layout = f"a SpecForge EAGLE-3 checkpoint ({architectures})"
    elif "draft_vocab_size" in config:
        layout = "an EAGLE-3 checkpoint (its config.json has draft_vocab_size)"
    else:
        return
    raise ValueError(_unsupported(source, layout))


def _refuse_layout(source: str, tensors: Tensors) -> None:
    """Layouts that show in the names and shapes of tensors."""
    names = tensors.keys()
    joined = tensors["fc.weight"].shape if "fc.weight" in names else (0, 0)
    if any(name.startswith("midlayer.") for name in names) or "d2t" in names:
        layout = "an EAGLE-3 checkpoint (midlayer.* tensors)"
    elif "fusion_fc.weight" in names or any(name.startswith("transformer.") for name in names):
        layout = "a speculators EAGLE-1 or HASS checkpoint (fusion_fc and transformer.* tensors)"
    elif joined[0] and joined[1] == 3 * joined[0]:
        layout = f"an EAGLE-3 checkpoint (fc.weight joins three hidden states: {tuple(joined)})"
    elif not joined[0] or joined[1] != 2 * joined[0] or not any(name.startswith("layers.0.") for name in names):
        layout = f"of a layout that is not known (its tensors: {_some(names)})"
    else:
        return
    raise ValueError(_unsupported(source, layout))


def _unsupported(source: str, layout: str) -> str:
    return (
        f"{source} is {layout}. Heads of the EAGLE-1/2 layout can be read, for example yuhuili/EAGLE-* "
        "without the 3, "
        "and heads made by microspec train."
    )


def _structure(source: str, config: Config, tensors: Tensors) -> EagleConfig:
    """The head's configuration: biases as the tensors have them, head counts as config.json says."""
    missing = [name for name in ("num_attention_heads", "vocab_size") if not isinstance(config.get(name), int)]
    needed = {"gate": f"{MLP}.gate_proj.weight", "k": f"{ATTENTION}.k_proj.weight"}
    if missing:
        raise ValueError(
            f"config.json of {source} does not say {' and '.join(missing)}; without it nothing can be read."
        )
    refuse_tensors(source, [name for name in needed.values() if name not in tensors], [])
    hidden_size = tensors["fc.weight"].shape[0]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config.get("hidden_size", hidden_size) // heads
    same_spelling = ("rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "hidden_act")
    return EagleConfig(
        hidden_size=config.get("hidden_size", hidden_size),
        intermediate_size=config.get("intermediate_size", tensors[needed["gate"]].shape[0]),
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or tensors[needed["k"]].shape[0] // head_dim,
        head_dim=head_dim,
        vocab_size=config["vocab_size"],
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        fc_bias="fc.bias" in tensors,
        qkv_bias=f"{ATTENTION}.q_proj.bias" in tensors,
        o_bias=f"{ATTENTION}.o_proj.bias" in tensors,
        mlp_bias=f"{MLP}.gate_proj.bias" in tensors,
        **{name: config[name] for name in same_spelling if config.get(name) is not None},
    )


def _shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a head."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in EagleHead(config).state_dict().items()}


def _read_tensors(source: str) -> Tensors:
    """All tensors but the ignored large ones, from safetensors where there are any, else from a pickle."""
    for plain, index, read in (
        ("model.safetensors", "model.safetensors.index.json", _read_safetensors),
        ("pytorch_model.bin", "pytorch_model.bin.index.json", _read_pickle),
    ):
        if (file := _find(source, plain)) is not None:
            return read(file)
        if (file := _find(source, index)) is not None:
            return {name: tensor for part in _shards(source, file) for name, tensor in read(part).items()}
    raise ValueError(f"{source} has neither model.safetensors nor pytorch_model.bin, so there are no weights to read.")


def _shards(source: str, index: Path) -> list[Path]:
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    files = {name: _find(source, name) for name in names}
    if absent := [name for name, file in files.items() if file is None]:
        raise ValueError(f"{source} lacks {', '.join(absent)}, which its {index.name} names.")
    return [file for file in files.values() if file is not None]


def _read_safetensors(file: Path) -> Tensors:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys() if name not in IGNORED}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is not a readable safetensors file: {error}.") from error


def _read_pickle(file: Path) -> Tensors:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(
            f"{file} was refused: it is damaged, or holds something other than tensors, which could run "
            "code when it "
            "is read. Nothing of it was run. Ask its author for a safetensors file."
        ) from error
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError(f"{file} must hold a dict of tensors, got {type(tensors).__name__}.")
    return dict(tensors)


def _some(names: Any) -> str:
    shown = sorted(names)[:6]
    return ", ".join(shown) + (", ..." if len(names) > len(shown) else "") if shown else "none"
