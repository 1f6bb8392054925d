"""Build the kernels with the compilers at hand, in the layout that the Hub's `kernels` loader reads.

    python build.py --backend cuda --archs 9.0      # or: microspec kernels build

No nix and no kernel-builder: g++ (CPU) or nvcc (CUDA), a few seconds. The libraries use libtorch's stable ABI, so
that one build serves PyTorch 2.11 and later. For publishing use kernel-builder (see CARD.md): its libraries also
run on older Linux systems.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
NAME, VERSION = "microspec", 1
BACKENDS = ("cpu", "cuda")
ARCHS = ("8.0", "9.0", "10.0")
"""Compute capabilities of a build that is not for the GPU at hand; those of build.toml."""

STABLE_ABI = (2, 11)
TARGET = f"-DTORCH_TARGET_VERSION=0x{STABLE_ABI[0]:02x}{STABLE_ABI[1]:02x}000000000000"

REGISTRATION = """\
// Written by build.py: what kernel-builder generates under this name.
#pragma once
#include <Python.h>
#define STABLE_TORCH_LIBRARY_EXPAND(NAME, MODULE) STABLE_TORCH_LIBRARY(NAME, MODULE)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, MODULE) STABLE_TORCH_LIBRARY_IMPL(NAME, DEVICE, MODULE)
#define MICROSPEC_CONCAT_(A, B) A##B
#define MICROSPEC_CONCAT(A, B) MICROSPEC_CONCAT_(A, B)
#define MICROSPEC_STRING_(A) #A
#define MICROSPEC_STRING(A) MICROSPEC_STRING_(A)
#define REGISTER_EXTENSION(NAME)                                                          \\
  PyMODINIT_FUNC MICROSPEC_CONCAT(PyInit_, NAME)() {                                      \\
    static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, MICROSPEC_STRING(NAME), 0, \\
                                        0, nullptr, nullptr, nullptr, nullptr, nullptr};  \\
    return PyModule_Create(&module);                                                      \\
  }
"""

OPS_MODULE = '''\
"""The library of this build."""

import torch

from . import {id}

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{id}::{{op_name}}"
'''


class BuildError(RuntimeError):
    """A compiler is missing or refused the sources."""


def sources(backend: str) -> list[Path]:
    """Files that are compiled for a backend."""
    pattern = "*.cu" if backend == "cuda" else "*.cpp"
    return [
        SOURCES / "torch-ext" / "torch_binding.cpp",
        *sorted((SOURCES / f"microspec_{backend}").glob(pattern)),
    ]


def source_hash(backend: str) -> str:
    """Changes with every file that a build of the backend is made from; 10 hex digits."""
    files = [Path(__file__), *SOURCES.glob("common/*"), *SOURCES.glob(f"microspec_{backend}/*")]
    files += [SOURCES / "torch-ext" / "torch_binding.cpp", *SOURCES.glob("torch-ext/microspec/*.py")]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.relative_to(SOURCES).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:10]


def nvcc_path() -> str | None:
    """nvcc from the PATH, CUDA_HOME or the usual place."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    return shutil.which("nvcc") or next((str(path) for path in candidates if path.is_file()), None)


def cuda_include() -> Path | None:
    """Folder of the toolkit's headers."""
    nvcc = nvcc_path()
    homes = [os.environ.get("CUDA_HOME"), Path(nvcc).resolve().parent.parent if nvcc else None, "/usr/local/cuda"]
    folders = [Path(home) / "include" for home in homes if home]
    return next((folder for folder in folders if (folder / "cuda_bf16.h").is_file()), None)


def require_nvcc() -> str:
    nvcc = nvcc_path()
    if nvcc is None:
        raise BuildError(
            "nvcc was not found on the PATH, in CUDA_HOME or in /usr/local/cuda. Install the CUDA toolkit of the "
            "CUDA version that `python -c 'import torch; print(torch.version.cuda)'` prints."
        )
    return nvcc


def require_gxx() -> str:
    gxx = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if gxx is None:
        raise BuildError("No C++ compiler was found: install g++ or set CXX.")
    return gxx


def cuda_version(nvcc: str) -> str:
    """Of the toolkit, as `130`."""
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+)\.(\d+)", text)
    if match is None:
        raise BuildError(f"`{nvcc} --version` names no release: {text!r}.")
    return match[1] + match[2]


def variant_name(backend: str) -> str:
    """Folder that the `kernels` loader looks for."""
    kind = "cpu" if backend == "cpu" else f"cu{cuda_version(require_nvcc())}"
    return f"torch-stable-abi{STABLE_ABI[0]}{STABLE_ABI[1]}-{kind}-{platform.machine()}-linux"


def compile_flags(backend: str, extension: str, generated: Path) -> list[str]:
    """Macros and include folders for g++ and nvcc alike."""
    import torch

    include = Path(torch.__file__).parent / "include"
    defines = [f"-DTORCH_EXTENSION_NAME={extension}", f"-D{backend.upper()}_KERNEL", TARGET]
    if backend == "cuda":
        defines.append("-DUSE_CUDA")
    folders = [f"-I{generated}", "-isystem", str(include), "-isystem", sysconfig.get_path("include")]
    return ["-O3", "-std=c++17", *defines, "-DPy_LIMITED_API=0x030A0000", *folders]


def gpu_code_flags(archs: Sequence[str]) -> list[str]:
    """Machine code for each capability, and PTX of the highest for chips to come."""
    numbers = [arch.replace(".", "") for arch in archs]
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
    newest = max(numbers, key=int)
    return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise BuildError(f"`{' '.join(command)}` failed:\n{result.stdout}{result.stderr}")


def compile_library(backend: str, archs: Sequence[str], extension: str, folder: Path) -> Path:
    """The shared library of a backend, in `folder`."""
    import torch

    (folder / "registration.h").write_text(REGISTRATION)
    flags = compile_flags(backend, extension, folder)
    if backend == "cuda":
        compiler = [require_nvcc(), *gpu_code_flags(archs), "-Xcompiler", "-fPIC,-fno-gnu-unique"]
        link = [require_nvcc(), "-shared", "-cudart", "shared"]
    else:
        compiler = [require_gxx(), "-fPIC", "-fno-gnu-unique", "-Wall", "-Wno-unknown-pragmas"]
        link = [require_gxx(), "-shared"]

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        run([*compiler, *flags, "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources(backend)))
    library = folder / f"{extension}.abi3.so"
    torch_libraries = Path(torch.__file__).parent / "lib"
    # Python opens libtorch for itself only: the library must name it as its own dependency to find the symbols.
    needed = ["-Xlinker", "--no-as-needed"] if backend == "cuda" else ["-Wl,--no-as-needed"]
    run([*link, *objects, *needed, f"-L{torch_libraries}", "-ltorch", "-o", str(library)])
    return library


def build(output: Path, backend: str, archs: Sequence[str] = ARCHS) -> Path:
    """Build one variant.

    Args:
        output: the repository-like folder that gets `build/<variant>`; an older build of the variant is replaced.
        backend: "cpu" or "cuda".
        archs: for "cuda", compute capabilities such as "9.0".

    Returns:
        The variant's folder.

    Raises:
        BuildError: no compiler, or it refused.
        ValueError: there is no such backend or capability.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}.")
    wrong = [arch for arch in archs if not re.fullmatch(r"\d+\.\d", arch)]
    if backend == "cuda" and (wrong or not archs):
        raise ValueError(f"archs must be compute capabilities such as 9.0, got {', '.join(wrong) or 'none'}.")
    archs = sorted(archs, key=float)
    tag = hashlib.sha256(source_hash(backend).encode() + ",".join(archs).encode()).hexdigest()[:7]
    extension = f"_{NAME}_{backend}_{tag}"
    target = output / "build" / variant_name(backend)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as scratch:
        folder = Path(scratch)
        library = compile_library(backend, archs, extension, folder)
        variant = folder / "variant"
        shutil.copytree(SOURCES / "torch-ext" / NAME, variant, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.move(library, variant / library.name)
        (variant / "_ops.py").write_text(OPS_MODULE.format(id=extension))
        (variant / "metadata.json").write_text(json.dumps(metadata(backend, archs, extension), indent=2) + "\n")
        if target.exists():
            shutil.rmtree(target)
        variant.rename(target)
    return target


def metadata(backend: str, archs: Sequence[str], extension: str) -> dict[str, object]:
    """What the loader reads beside the library."""
    described: dict[str, object] = {"type": backend}
    if backend == "cuda":
        described["archs"] = [*archs[:-1], f"{archs[-1]}+PTX"]
    return {
        "name": NAME,
        "id": extension,
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": described,
        "source-hash": source_hash(backend),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, default="cuda" if nvcc_path() else "cpu")
    parser.add_argument("--archs", default=",".join(ARCHS), help="compute capabilities, comma-separated")
    parser.add_argument("--output", type=Path, default=SOURCES, help="gets build/<variant>")
    arguments = parser.parse_args()
    print(build(arguments.output, arguments.backend, arguments.archs.split(",")))


if __name__ == "__main__":
    main()
