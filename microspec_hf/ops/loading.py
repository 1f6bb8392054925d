"""Which implementation serves each op on a device, and why not a better one.

On a CUDA device the first that passes its self-test serves an op:

1. path: the built kernels in the folder that `MICROSPEC_KERNELS` names;
2. hub: the kernel repository that `MICROSPEC_KERNELS_REPO` names, through the `kernels` package (`LOCAL_KERNELS`
   and `HF_HUB_OFFLINE` are obeyed; with `MICROSPEC_KERNELS_LOCK`, a kernels.lock file, exactly the locked commit,
   from the cache). Nothing is asked of the Hub before a repository is named: naming it is what trusts its code;
3. local: what `microspec kernels build` made on this machine;
4. triton: `gather_rows` and `window_update` in Triton;
5. reference: PyTorch.

On a CPU the reference is the fast implementation and serves everything. `MICROSPEC_KERNELS` may also name one tier
(`hub`, `local`, `triton`, `reference`), on any device; if that cannot serve, the reference does, with a warning.
Nothing here raises on a call: what went wrong is kept as the reason, for `microspec kernels`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from microspec_hf.ops import reference, self_test
from microspec_hf.ops.schemas import LIBRARY, SCHEMAS

logger = logging.getLogger(__name__)

TIERS = ("path", "hub", "local", "triton", "reference")
KERNELS_VERSION = 1
"""Version of the kernel package that this release is written for: branch v1 of its repository."""

_Op = Callable[..., Any]


class _Refused(Exception):
    """Why a tier does not serve; a sentence."""


@dataclass(frozen=True)
class Refusal:
    """A tier that does not serve an op, and why."""

    tier: str
    reason: str


@dataclass(frozen=True)
class Service:
    """Who serves an op on a device.

    Args:
        op: name of the op.
        tier: one of TIERS.
        source: where the implementation comes from.
        refusals: the better tiers and why each does not serve, best first.
    """

    op: str
    tier: str
    source: str
    refusals: tuple[Refusal, ...]
    function: _Op = field(repr=False, compare=False)
    supports: Callable[..., bool] | None = field(default=None, repr=False, compare=False)

    def __call__(self, *arguments: Any) -> Any:
        """Call the implementation; calls that it does not take (see `microspec kernels`) go to the reference."""
        if self.supports is None or self.supports(self.op, *arguments):
            return self.function(*arguments)
        return getattr(reference, self.op)(*arguments)


_services: dict[str, dict[str, Service]] = {}


def load(device: torch.device | str, choice: str | None = None) -> dict[str, Service]:
    """Choose who serves the ops on a device type; the first call decides, later ones return its result.

    The first op on a device calls this. Call it yourself before a CUDA graph is captured without a warm-up: the
    self-tests wait for the device, which a capture forbids.

    Args:
        device: its type counts; for CUDA, the current device is tested.
        choice: instead of `MICROSPEC_KERNELS`: "auto", a tier, or the path of built kernels; decides anew.
    """
    kind = torch.device(device).type
    if kind not in _services or choice is not None:
        _services[kind] = _choose(torch.device(kind), choice or os.environ.get("MICROSPEC_KERNELS") or "auto")
    return _services[kind]


def forget() -> None:
    """The next call on each device chooses anew."""
    _services.clear()


def default_device() -> torch.device:
    """The device that a status is about when none is named."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def unmet_choice(services: dict[str, Service]) -> str | None:
    """The tier or path that `MICROSPEC_KERNELS` asks for if it does not serve every op that it could."""
    choice = os.environ.get("MICROSPEC_KERNELS") or "auto"
    tier = choice if choice in TIERS else "path"
    if choice == "auto" or any(service.tier == tier for service in services.values()):
        return None
    return choice


def _choose(device: torch.device, choice: str) -> dict[str, Service]:
    """Ask the tiers in their order; each op is served by the first that passes its self-test."""
    refusals: dict[str, list[Refusal]] = {name: [] for name in SCHEMAS}
    services: dict[str, Service] = {}

    def refuse(tier: str, names: list[str], reason: str) -> None:
        for name in names:
            refusals[name].append(Refusal(tier, reason))

    for tier in TIERS[:-1]:
        missing = [name for name in SCHEMAS if name not in services]
        if not missing:
            break
        try:
            _check_wanted(tier, device, choice)
            provider = _PROVIDERS[tier](device, choice)
        except Exception as error:  # whatever a package, a driver or a file may raise is a reason, not a crash
            refuse(tier, missing, _sentence(error))
            continue
        for name in missing:
            reason = _examine(provider, name, device)
            if reason is None:
                function = provider.functions[name]
                services[name] = Service(
                    name, tier, provider.source, tuple(refusals[name]), function, provider.supports
                )
            else:
                refuse(tier, [name], reason)
    for name in SCHEMAS:
        if name not in services:
            function = getattr(reference, name)
            services[name] = Service(name, "reference", "PyTorch", tuple(refusals[name]), function)
    _tell(device, choice, services)
    return {name: services[name] for name in SCHEMAS}


def _check_wanted(tier: str, device: torch.device, choice: str) -> None:
    chosen = choice if choice in (*TIERS, "auto") else "path"
    if chosen == "auto" and device.type == "cpu":
        raise _Refused("On a CPU the reference is the fast implementation.")
    if tier == "path" and chosen == "auto":
        raise _Refused("MICROSPEC_KERNELS names no folder.")
    if chosen not in ("auto", tier):
        raise _Refused(f"MICROSPEC_KERNELS={choice} asks for another.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise _Refused("PyTorch finds no CUDA device here.")
    if tier != "triton" and device.type not in ("cpu", "cuda"):
        raise _Refused(f"There are no compiled kernels for devices of type {device.type}.")


@dataclass(frozen=True)
class _Provider:
    source: str
    functions: dict[str, _Op]
    supports: Callable[..., bool] | None = None


def _from_path(device: torch.device, choice: str) -> _Provider:
    return _from_folder(Path(choice).expanduser(), device)


def _from_hub(device: torch.device, choice: str) -> _Provider:
    repository = os.environ.get("MICROSPEC_KERNELS_REPO")
    if not repository:
        raise _Refused("MICROSPEC_KERNELS_REPO names no kernel repository (org/name) whose code is trusted.")
    try:
        import kernels
    except ImportError as error:
        raise _Refused("The package `kernels` is not installed: pip install 'microspec_hf[kernels]'.") from error
    backend = "cpu" if device.type == "cpu" else None
    lockfile = os.environ.get("MICROSPEC_KERNELS_LOCK")
    if lockfile:
        module = kernels.load_kernel(repository, lockfile=Path(lockfile), backend=backend)
        return _from_module(module, f"{repository}, locked by {lockfile}", device)
    if device.type == "cpu" and not _stays_offline(repository):
        raise _Refused("A CPU run does not ask the network; set HF_HUB_OFFLINE=1 to use the Hub's cache.")
    module = kernels.get_kernel(repository, version=KERNELS_VERSION, backend=backend, trust_remote_code=[repository])
    return _from_module(module, f"{repository} v{KERNELS_VERSION}", device)


def _stays_offline(repository: str) -> bool:
    from huggingface_hub import constants

    mapped = [entry.partition("=")[0] for entry in os.environ.get("LOCAL_KERNELS", "").split(":")]
    return bool(constants.HF_HUB_OFFLINE) or repository in mapped


def _from_local_build(device: torch.device, choice: str) -> _Provider:
    folder = build_folder()
    if not (folder / "build").is_dir():
        raise _Refused("Nothing was built on this machine: run `microspec kernels build`.")
    provider = _from_folder(folder, device)
    built_from = json.loads(Path(provider.source, "metadata.json").read_text()).get("source-hash")
    if (builder := find_builder()) is not None and built_from != builder.source_hash(device.type):
        raise _Refused(f"{provider.source} was built from other sources than are here: run `microspec kernels build`.")
    return provider


def _from_triton(device: torch.device, choice: str) -> _Provider:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise _Refused("Triton needs a GPU.")
    try:
        from microspec_hf.ops import triton_kernels
    except ImportError as error:
        raise _Refused(f"Triton cannot be imported: {error}.") from error
    source = f"Triton {triton_kernels.TRITON_VERSION}"
    return _Provider(source, triton_kernels.FUNCTIONS, triton_kernels.supports)


_PROVIDERS: dict[str, Callable[[torch.device, str], _Provider]] = {
    "path": _from_path,
    "hub": _from_hub,
    "local": _from_local_build,
    "triton": _from_triton,
}


def build_folder() -> Path:
    """Where `microspec kernels build` puts its result: `kernels` in the cache folder of this library."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    cache = os.environ.get("MICROSPEC_CACHE") or f"{base}/microspec_hf"
    return Path(cache).expanduser() / "kernels"


def find_builder() -> ModuleType | None:
    """The build script: in the package, or beside it in a source checkout; None if the sources are not here."""
    package = Path(__file__).parent.parent
    for folder in (package / "cuda_kernels", package.parent / "cuda_kernels"):
        if (folder / "build.py").is_file():
            return _import_file("microspec_hf_kernel_build", folder / "build.py")
    return None


def _from_folder(path: Path, device: torch.device) -> _Provider:
    """Built kernels in a repository-like folder, its `build`, or a variant itself."""
    if not path.is_dir():
        raise _Refused(f"{path} is not a folder.")
    backend = "cpu" if device.type == "cpu" else None
    try:
        import kernels
    except ImportError:
        module = _import_variant(_find_variant(path, device))
    else:
        module = kernels.get_local_kernel(path.resolve(), backend=backend)
    return _from_module(module, str(Path(str(module.__file__)).parent), device)


def _find_variant(path: Path, device: torch.device) -> Path:
    """Without the `kernels` package: the variant for this device; compatibility shows in the import."""
    marker = "-cpu-" if device.type == "cpu" else f"-cu{(torch.version.cuda or '0').replace('.', '')}-"
    folders = [path] if (path / "metadata.json").is_file() else sorted({*path.glob("*/"), *path.glob("build/*/")})
    fitting = [folder for folder in folders if marker in folder.name and (folder / "metadata.json").is_file()]
    if not fitting:
        found = ", ".join(folder.name for folder in folders) or "nothing"
        raise _Refused(f"{path} holds no variant with {marker!r} in its name, but {found}.")
    return fitting[0]


def _import_variant(folder: Path) -> ModuleType:
    """Under the name that `kernels` gives it: PyTorch aborts when copies of one build register their ops twice."""
    name = json.loads((folder / "metadata.json").read_text())["id"]
    return sys.modules.get(name) or _import_file(name, folder / "__init__.py", is_package=True)


def _import_file(name: str, file: Path, is_package: bool = False) -> ModuleType:
    folders = [str(file.parent)] if is_package else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    if spec is None or spec.loader is None:
        raise _Refused(f"{file} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_module(module: ModuleType, source: str, device: torch.device) -> _Provider:
    """A loaded kernel package, after its metadata was compared with the device."""
    metadata = json.loads(Path(str(module.__file__)).with_name("metadata.json").read_text())
    backend = metadata.get("backend", {})
    if backend.get("type") != device.type:
        raise _Refused(f"{source} is built for {backend.get('type')}, not for {device.type}.")
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability()
        if not any(_runs_on(arch, capability) for arch in backend.get("archs", [])):
            raise _Refused(
                f"{source} is built for compute capability {', '.join(backend.get('archs', [])) or 'none'}; this "
                f"GPU has {capability[0]}.{capability[1]}."
            )
    if not callable(getattr(module, "supports", None)):
        raise _Refused(f"{source} has no function `supports`: it is not a build of these kernels.")
    functions = {name: getattr(module, name) for name in SCHEMAS if callable(getattr(module, name, None))}
    return _Provider(source, functions, module.supports)


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Machine code runs on its own major version from its minor one on; PTX on everything newer."""
    number, _, kind = arch.partition("+")
    major, minor = (int(part) for part in number.rstrip("af").split("."))
    same = major == capability[0] and minor <= capability[1]
    return same or (kind == "PTX" and (major, minor) <= capability)


def _examine(provider: _Provider, name: str, device: torch.device) -> str | None:
    """Why a provider may not serve an op; None if it may."""
    if name not in provider.functions:
        return f"{provider.source} has no {name}."
    try:
        return self_test.disagreement(name, provider.functions[name], device)
    except Exception as error:
        return f"its self-test failed: {_sentence(error)}"


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, _Refused) else f"{type(error).__name__}: {text}"


def _tell(device: torch.device, choice: str, services: dict[str, Service]) -> None:
    """One line for what a user may not expect; the rest is in `microspec kernels`."""
    for service in services.values():
        logger.debug("%s on %s: %s (%s); %s", service.op, device.type, service.tier, service.source, service.refusals)
    plain = [name for name, service in services.items() if service.tier == "reference"]
    if not plain or choice == "reference" or (choice == "auto" and device.type == "cpu"):
        return
    reasons = dict.fromkeys(
        f"{r.tier}: {r.reason}" for r in services[plain[0]].refusals if "asks for another" not in r.reason
    )
    logger.warning("On %s the PyTorch reference serves %s. %s", device.type, ", ".join(plain), " ".join(reasons))


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _dispatcher(name: str, kind: str) -> _Op:
    """What the PyTorch dispatcher calls for an op on a device type."""
    plain = getattr(reference, name)

    def serve(*arguments: Any) -> Any:
        services = _services.get(kind)
        if services is None:
            if kind == "cuda" and _is_capturing():
                logger.warning(
                    "%s: a CUDA graph is captured with the PyTorch reference, because kernels are not looked for "
                    "during a capture. Call microspec_hf.ops.load('cuda') before it.",
                    name,
                )
                return plain(*arguments)
            services = load(kind)
        return services[name](*arguments)

    return serve


for _name in SCHEMAS:
    for _kind in ("cpu", "cuda"):
        LIBRARY.impl(_name, _dispatcher(_name, _kind), _kind.upper())
