"""The kernels, built by the project's own script: for the CPU everywhere, for CUDA where there is a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from microspec_hf import ops
from microspec_hf.ops import loading


@pytest.fixture(scope="session")
def builder() -> ModuleType:
    """`cuda_kernels/build.py` as a module."""
    module = loading.find_builder()
    assert module is not None, "the kernel sources are not beside the package"
    return module


@pytest.fixture(scope="session")
def cpu_build(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository-like folder with the CPU variant."""
    folder = tmp_path_factory.mktemp("kernels")
    builder.build(folder, "cpu")
    return folder


@pytest.fixture(scope="session")
def cuda_build(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the CUDA variant for this GPU: the one that MICROSPEC_KERNELS names, or a fresh build."""
    if (named := os.environ.get("MICROSPEC_KERNELS")) and Path(named).is_dir():
        return Path(named)
    folder = tmp_path_factory.mktemp("kernels")
    major, minor = torch.cuda.get_device_capability()
    builder.build(folder, "cuda", [f"{major}.{minor}"])
    return folder


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A device whose ops are all served by compiled kernels."""
    folder = request.getfixturevalue(f"{request.param}_build")
    services = ops.load(request.param, str(folder))
    assert {service.tier for service in services.values()} == {"path"}, services
    yield torch.device(request.param)
    ops.forget()
