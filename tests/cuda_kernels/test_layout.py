"""The project builds with the compilers at hand, and what it builds is what the `kernels` loader reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from microspec_hf import ops
from microspec_hf.ops import loading

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "someone/microspec"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    ops.forget()


def run(code: str, **environment: str) -> dict[str, str]:
    """Run code in a fresh interpreter, offline; what it prints last is JSON."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MICROSPEC_")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**clean, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


class TestProject:
    def test_build_toml_is_valid(self, builder: ModuleType) -> None:
        """As kernel-builder reads it: unknown keys and editions are errors."""
        rust = pytest.importorskip("kernels._rust")
        rust.Build.open(builder.SOURCES)

    def test_build_toml_lists_what_is_compiled(self, builder: ModuleType) -> None:
        tomllib = pytest.importorskip("tomllib")  # Python 3.11
        project = tomllib.loads((builder.SOURCES / "build.toml").read_text())
        listed = {backend: project["kernel"][f"microspec_{backend}"]["src"] for backend in builder.BACKENDS}
        for backend in builder.BACKENDS:
            compiled = {path.relative_to(builder.SOURCES).as_posix() for path in builder.sources(backend)}
            binding = set(project["torch"]["src"])
            assert compiled - binding == {path for path in listed[backend] if path.endswith((".cu", ".cpp"))}
        everything = {path for paths in listed.values() for path in paths}
        folders = ("common", "microspec_cpu", "microspec_cuda")
        present = {f"{folder}/{file.name}" for folder in folders for file in (builder.SOURCES / folder).iterdir()}
        assert everything == present, "a file is missing in build.toml, or listed and not there"
        assert project["general"]["version"] == loading.KERNELS_VERSION == builder.VERSION
        assert project["kernel"]["microspec_cuda"]["cuda-capabilities"] == list(builder.ARCHS)

    def test_device_code_is_free_of_pytorch(self, builder: ModuleType) -> None:
        for file in builder.SOURCES.glob("microspec_cuda/*.cuh"):
            assert "torch" not in file.read_text(), file

    def test_wrong_requests(self, builder: ModuleType, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="backend must be one of cpu, cuda, got 'rocm'"):
            builder.build(tmp_path, "rocm")
        with pytest.raises(ValueError, match=r"capabilities such as 9\.0, got sm_90"):
            builder.build(tmp_path, "cuda", ["sm_90"])

    def test_compiler_errors_are_shown(
        self, builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CXX", "false")
        with pytest.raises(builder.BuildError, match=r"`false .*\.cpp -o .*` failed"):
            builder.build(tmp_path, "cpu")
        assert not list(tmp_path.glob("build/*")), "nothing half done stays"


class TestCPUVariant:
    def test_schemas_are_those_of_the_ops(self, cpu_build: Path) -> None:
        service = ops.load("cpu", str(cpu_build))["draft_topk"]
        namespace = json.loads(Path(service.source, "metadata.json").read_text())["id"]
        for name, schema in ops.SCHEMAS.items():
            expected = torch._C.parse_schema(f"{namespace}::{name}{schema}")
            assert getattr(getattr(torch.ops, namespace), name).default._schema == expected

    @pytest.mark.parametrize("name", ops.SCHEMAS)
    def test_compiles_without_a_graph_break(self, cpu_build: Path, name: str) -> None:
        """The package's own functions, by its own fake implementations."""
        service = ops.load("cpu", str(cpu_build))[name]
        from tests.ops.test_library import example_arguments

        arguments = example_arguments(name)
        op = getattr(sys.modules[service.function.__module__].ops, name).default
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))
        torch.compile(service.function, backend="eager", fullgraph=True)(*arguments)

    def test_loaded_by_get_local_kernel(self, cpu_build: Path) -> None:
        kernels = pytest.importorskip("kernels")
        module = kernels.get_local_kernel(cpu_build, backend="cpu")
        assert module.topk_candidates(torch.tensor([[1.0, 5.0, 5.0]]), 2).tolist() == [[1, 2]]

    def test_loaded_without_the_kernels_package(self, cpu_build: Path) -> None:
        variant = next(cpu_build.glob("build/*-cpu-*"))
        folders = [cpu_build, cpu_build / "build", variant, cpu_build.parent]
        code = f"""
import json, sys
from microspec_hf import ops
sys.modules["kernels"] = None
loaded = [ops.load("cpu", folder)["draft_topk"] for folder in {[str(folder) for folder in folders]!r}]
print(json.dumps({{service.refusals[0].reason if service.refusals else i: service.tier
    for i, service in enumerate(loaded)}}))
"""
        *served, missing = run(code).items()
        assert served == [("0", "path"), ("1", "path"), ("2", "path")]
        assert "holds no variant" in missing[0]
        assert missing[1] == "reference"

    def test_copies_of_one_build(self, cpu_build: Path, tmp_path: Path) -> None:
        """PyTorch aborts a process in which a library registers its ops a second time."""
        code = f"""
import json, shutil, sys
from microspec_hf import ops
tiers = {{}}
for i, missing in enumerate([False, True, False, True]):
    folder = shutil.copytree({str(cpu_build)!r}, f"{tmp_path}/{{i}}")
    real = sys.modules.pop("kernels", None)
    if missing:
        sys.modules["kernels"] = None
    elif real is not None:
        sys.modules["kernels"] = real
    tiers[i] = ops.load("cpu", folder)["window_update"].tier
print(json.dumps(tiers))
"""
        assert set(run(code).values()) == {"path"}

    def test_local_build(
        self, cpu_build: Path, builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What `microspec kernels build` leaves in the cache folder serves, until the sources change."""
        monkeypatch.setenv("MICROSPEC_CACHE", str(tmp_path))
        shutil.copytree(cpu_build, tmp_path / "kernels")
        assert {service.tier for service in ops.load("cpu", "local").values()} == {"local"}
        metadata = next(tmp_path.glob("kernels/build/*/metadata.json"))
        metadata.write_text(metadata.read_text().replace(builder.source_hash("cpu"), "0123456789"))
        assert "built from other sources" in ops.load("cpu", "local")["draft_topk"].refusals[2].reason

    def test_hub_tier_offline(self, cpu_build: Path, tmp_path: Path) -> None:
        """LOCAL_KERNELS, a Hub cache laid out by hand, and a lockfile; in a fresh process, as it reads them."""
        pytest.importorskip("kernels")
        folder = tmp_path / "kernels--someone--microspec"
        shutil.copytree(cpu_build / "build", folder / "snapshots" / COMMIT / "build")
        (folder / "refs").mkdir()
        (folder / "refs" / "v1").write_text(COMMIT)
        (folder / "blobs").mkdir()
        lock = {"dependency": {"repo-id": REPOSITORY, "version": 1}, "lock": {"commit": COMMIT}}
        (tmp_path / "kernels.lock").write_text(json.dumps([lock]))
        other_lock = {**lock, "lock": {"commit": COMMIT[::-1]}}
        (tmp_path / "other.lock").write_text(json.dumps([other_lock]))
        code = f"""
import json, os
from microspec_hf import ops
def served():
    services = ops.load("cpu", "hub").values()
    return sorted({{service.tier for service in services}}), str(next(iter(services)))
result = {{"cache": served()}}
os.environ["MICROSPEC_KERNELS_LOCK"] = {str(tmp_path / "kernels.lock")!r}
result["lock"] = served()
os.environ["MICROSPEC_KERNELS_LOCK"] = {str(tmp_path / "other.lock")!r}
result["other lock"] = served()
del os.environ["MICROSPEC_KERNELS_LOCK"]
os.environ["MICROSPEC_KERNELS_REPO"] = "nobody/microspec"
result["not cached"] = served()
os.environ["LOCAL_KERNELS"] = "nobody/microspec=" + {str(cpu_build)!r}
result["mapped"] = served()
print(json.dumps(result))
"""
        result = run(code, KERNELS_CACHE=str(tmp_path), MICROSPEC_KERNELS_REPO=REPOSITORY)
        tiers = {name: tier for name, (tier, _) in result.items()}
        expected = {
            "cache": "hub",
            "lock": "hub",
            "other lock": "reference",
            "not cached": "reference",
            "mapped": "hub",
        }
        assert tiers == {name: [tier] for name, tier in expected.items()}, result


ARCHS = ("8.0", "9.0", "10.0")


@pytest.fixture(scope="module")
def cuda_folder(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if builder.nvcc_path() is None:
        pytest.skip("nvcc is not installed")
    return builder.build(tmp_path_factory.mktemp("cuda"), "cuda", ARCHS)


class TestCUDACompiles:
    def test_for_all_capabilities(self, cuda_folder: Path) -> None:
        """Every .cu compiles for sm_80, sm_90 and sm_100; the library says so in its own ELF sections."""
        metadata = json.loads((cuda_folder / "metadata.json").read_text())
        assert metadata["backend"] == {"type": "cuda", "archs": ["8.0", "9.0", "10.0+PTX"]}
        library = cuda_folder / f"{metadata['id']}.abi3.so"
        data = library.read_bytes()
        for number in ("80", "90", "100"):
            assert f"sm_{number}".encode() in data, f"no machine code for sm_{number}"

    def test_needs_only_symbols_of_the_oldest_pytorch(self, cuda_folder: Path) -> None:
        """The library's undefined C++ symbols come from no libtorch class: the C shim is all it uses."""
        library = next(cuda_folder.glob("*.abi3.so"))
        nm = shutil.which("nm")
        if nm is None:
            pytest.skip("nm is not installed")
        text = subprocess.run([nm, "-D", "--undefined-only", str(library)], capture_output=True, text=True).stdout
        symbols = [line.split()[-1] for line in text.splitlines()]
        assert any(symbol.startswith("aoti_torch_") for symbol in symbols)
        foreign = [s for s in symbols if s.startswith("_Z") and ("c10" in s or "2at" in s or "5torch" in s)]
        assert foreign == []
