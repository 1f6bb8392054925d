"""`microspec kernels`: who serves each op on this machine and why; `microspec kernels build`: compile them here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text

from microspec_hf.cli.console import open_console, write_json
from microspec_hf.ops import loading

app = typer.Typer(help="Compiled kernels: who serves each op, and a build for this machine.")


@app.callback(invoke_without_command=True)
def kernels(
    context: typer.Context,
    device: Annotated[
        str | None,
        typer.Option(help="Device type the report is about; default: cuda if there is a GPU, else cpu."),
    ] = None,
    json_file: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
) -> None:
    """Say who serves each op and why no better implementation does.

    Exit code 1: MICROSPEC_KERNELS asks for kernels that cannot serve.
    """
    if context.invoked_subcommand is not None:
        return
    try:
        chosen = loading.default_device() if device is None else torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"--device must be a device type of PyTorch such as cuda or cpu, got {device}.") from error
    services = loading.load(chosen)
    if json_file:
        write_json("-", _record(chosen, services))
    else:
        _print_report(chosen, services)
    unmet = loading.unmet_choice(services)
    if unmet is not None:
        raise typer.Exit(1)


@app.command()
def build(
    backend: Annotated[
        str | None, typer.Option(help="cuda or cpu; default: cuda if there is a GPU or nvcc, else cpu.")
    ] = None,
    archs: Annotated[
        str | None,
        typer.Option(help="Compute capabilities, such as 8.0,9.0; default: this GPU's, else all supported ones."),
    ] = None,
) -> None:
    """Compile the kernels with this machine's compilers (a few seconds) and keep them in the cache folder."""
    builder = loading.find_builder()
    if builder is None:
        raise FileNotFoundError(
            "The kernel sources are not installed with this package. Build from a checkout of the repository: "
            "python cuda_kernels/build.py --output FOLDER, then set MICROSPEC_KERNELS=FOLDER."
        )
    has_gpu = torch.cuda.is_available()
    chosen = backend or ("cuda" if has_gpu or builder.nvcc_path() else "cpu")
    capability = ".".join(map(str, torch.cuda.get_device_capability())) if has_gpu else None
    wanted = archs.split(",") if archs else [capability] if capability else builder.ARCHS
    console = open_console()
    try:
        with console.status(f"Compiling for {chosen}"):
            folder = builder.build(loading.build_folder(), chosen, wanted)
    except builder.BuildError as error:
        raise OSError(str(error)) from error
    console.print(Text(f"Built {folder}"), soft_wrap=True)


def _record(device: torch.device, services: dict[str, loading.Service]) -> dict[str, Any]:
    ops = [
        {
            "op": service.op,
            "served_by": service.tier,
            "source": service.source,
            "refusals": [asdict(refusal) for refusal in service.refusals],
        }
        for service in services.values()
    ]
    return {"device": device.type, "torch": torch.__version__, "ops": ops}


def _print_report(device: torch.device, services: dict[str, loading.Service]) -> None:
    console = open_console()
    table = Table("op", "served by", "from", title=f"Ops on {device.type}", title_justify="left")
    for service in services.values():
        table.add_row(service.op, service.tier, Text(service.source, overflow="fold"))
    console.print(table)
    # Most reasons are the same for all ops: each is said once, with the ops it is about.
    reasons: dict[tuple[str, str], list[str]] = {}
    for service in services.values():
        for refusal in service.refusals:
            reasons.setdefault((refusal.tier, refusal.reason), []).append(service.op)
    for (tier, reason), names in reasons.items():
        about = "" if len(names) == len(services) else f" ({', '.join(names)})"
        console.print(Text.assemble((f"not {tier}", "bold"), f"{about}: {reason}"), soft_wrap=True)
