"""`microspec train`: its options are the fields of `TrainConfig`, their help its docstring."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any, get_type_hints

import typer

from microspec_hf.cli import options
from microspec_hf.cli.console import check_json_file, write_json
from microspec_hf.evaluation import provenance
from microspec_hf.training import TrainConfig
from microspec_hf.training import train as run_training


def train(json: options.JsonFile = None, **values: Any) -> None:
    """Train an EAGLE head for a target on the target's own answers to your prompts.

    A rerun of the same command goes on where it stopped. Over several processes or GPUs:
    accelerate launch examples/train_drafter.py, with the same options.
    """
    check_json_file(json)
    # A list option that is not given arrives empty; the configuration says None.
    given: dict[str, Any] = {name: None if value == [] else value for name, value in values.items()}
    config = TrainConfig(**given)
    record = run_training(config)
    write_json(json, record | {"provenance": provenance(command="train", **dataclasses.asdict(config))})


def _parameters(config: type[TrainConfig]) -> list[inspect.Parameter]:
    """One option for each field, required where the field is."""
    helps, hints = _field_helps(config), get_type_hints(config)
    parameters = []
    for field in dataclasses.fields(config):
        default = ... if field.default is dataclasses.MISSING else field.default
        option = typer.Option(default, help=helps[field.name], show_default=default is not None)
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=hints[field.name])
        )
    return parameters


def _field_helps(config: type[Any]) -> dict[str, str]:
    """What the `Args:` section of the docstring says of each field; one entry may speak of several fields."""
    helps = {field.name: str(field.metadata.get("help", "")) for field in dataclasses.fields(config)}
    section = (inspect.getdoc(config) or "").partition("Args:\n")[2]
    for names, text in re.findall(r"^    ([\w, ]+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE):
        for name in names.split(", "):
            helps[name] = re.sub(r"\s+", " ", text).replace("`", "")
    return {name: text[:1].upper() + text[1:] for name, text in helps.items()}


def _as_typer_reads_it(command: Any, parameters: list[inspect.Parameter]) -> None:
    """Replace `**values` of a command's signature by the parameters."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=[*own, *parameters])
    command.__annotations__ = {p.name: p.annotation for p in (*own, *parameters)}


_as_typer_reads_it(train, _parameters(TrainConfig))
