"""Who serves an op: the order of the tiers, a reason for every refusal, and never a crash."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from microspec_hf import ops
from microspec_hf.ops import loading, reference, self_test

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No choice from outside, an empty cache folder, and nothing left behind."""
    for variable in (
        "MICROSPEC_KERNELS",
        "MICROSPEC_KERNELS_REPO",
        "MICROSPEC_KERNELS_LOCK",
        "LOCAL_KERNELS",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MICROSPEC_CACHE", str(tmp_path / "cache"))
    ops.forget()
    yield
    ops.forget()


def provider(source: str, **functions: Callable[..., Any]) -> Callable[..., Any]:
    """A tier whose functions are the reference's, but for those that are given."""
    complete = {name: functions.get(name, getattr(reference, name)) for name in ops.SCHEMAS}
    return lambda device, choice: loading._Provider(source, complete)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    return fail


@pytest.fixture
def like_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, loading.Service]]:
    """`like_cuda(hub=..., local=...)` chooses as on a GPU, with these tiers, on the CPU's memory."""

    def choose(choice: str = "auto", **tiers: Callable[..., Any]) -> dict[str, loading.Service]:
        for tier in loading.TIERS[:-1]:
            absent = raising(loading._Refused(f"no {tier} here."))
            monkeypatch.setitem(loading._PROVIDERS, tier, tiers.get(tier, absent))
        check = loading._check_wanted

        def check_as_cuda(tier: str, device: torch.device, choice: str) -> None:
            if choice != "auto":
                check(tier, device, choice)
            elif tier == "path":
                raise loading._Refused("MICROSPEC_KERNELS names no folder.")

        monkeypatch.setattr(loading, "_check_wanted", check_as_cuda)
        return loading._choose(CPU, choice)

    return choose


class TestOrder:
    def test_the_best_tier_serves(self, like_cuda: Callable[..., dict[str, loading.Service]]) -> None:
        services = like_cuda(hub=provider("a hub"), local=provider("a build"), triton=provider("triton"))
        assert {service.tier for service in services.values()} == {"hub"}
        services = like_cuda(local=provider("a build"), triton=provider("triton"))
        assert {(service.tier, service.source) for service in services.values()} == {("local", "a build")}
        expected = (
            loading.Refusal("path", "MICROSPEC_KERNELS names no folder."),
            loading.Refusal("hub", "no hub here."),
        )
        assert services["build_tree"].refusals == expected

    def test_each_op_by_itself(self, like_cuda: Callable[..., dict[str, loading.Service]]) -> None:
        """A tier that gets one op wrong loses that one only; a tier may have but some ops."""

        def only_gather(device: torch.device, choice: str) -> Any:
            return loading._Provider("triton", {"gather_rows": reference.gather_rows})

        def wrong(*arguments: Any) -> Any:
            reference.gather_rows(arguments[0], arguments[1], arguments[2].flip(0), *arguments[3:])

        services = like_cuda(local=provider("a build", gather_rows=wrong), triton=only_gather)
        assert services["gather_rows"].tier == "triton"
        refusal = services["gather_rows"].refusals[-1]
        assert refusal.tier == "local"
        assert "self-test gave" in refusal.reason
        assert {service.tier for name, service in services.items() if name != "gather_rows"} == {"local"}

    def test_reference_last_with_all_reasons(
        self, like_cuda: Callable[..., dict[str, loading.Service]], caplog: pytest.LogCaptureFixture
    ) -> None:
        services = like_cuda()
        with caplog.at_level(logging.WARNING):
            loading._tell(torch.device("cuda"), "auto", services)
        assert {service.tier for service in services.values()} == {"reference"}
        assert [refusal.tier for refusal in services["draft_topk"].refusals] == [
            "path",
            "hub",
            "local",
            "triton",
        ]
        assert "PyTorch reference serves" in caplog.text
        assert "no local here" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        ValueError("untrusted publisher"),
        FileNotFoundError("no variant fits"),
        ConnectionError("no network"),
        RuntimeError("GPU arch is not supported"),
        ImportError("the library will not load"),
        OSError("metadata.json is missing"),
        TypeError("unexpected keyword"),
        KeyError("archs"),
        AssertionError("no"),
        torch.OutOfMemoryError("no memory"),
    ],
    ids=lambda error: type(error).__name__,
)
class TestWhateverIsRaised:
    def test_becomes_a_reason_while_loading(
        self, like_cuda: Callable[..., dict[str, loading.Service]], error: Exception
    ) -> None:
        service = like_cuda(hub=raising(error), local=provider("a build"))["gather_rows"]
        assert service.tier == "local"
        assert service.refusals[-1].reason.startswith(type(error).__name__ + ": ")

    def test_becomes_a_reason_in_the_self_test(
        self, like_cuda: Callable[..., dict[str, loading.Service]], error: Exception
    ) -> None:
        services = like_cuda(hub=provider("a hub", build_tree=raising(error)))
        assert services["build_tree"].tier == "reference"
        assert "its self-test failed: " + type(error).__name__ in str(services["build_tree"].refusals)
        assert services["draft_topk"].tier == "hub"

    def test_from_the_hub_package(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        kernels = pytest.importorskip("kernels")
        monkeypatch.setattr(kernels, "get_kernel", raising(error))
        monkeypatch.setenv("MICROSPEC_KERNELS_REPO", "someone/microspec")
        services = ops.load("cpu", "hub")
        assert {service.tier for service in services.values()} == {"reference"}
        assert type(error).__name__ in str(services["draft_topk"].refusals)


class TestOnACPU:
    def test_nobody_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Not even a repository that is named: a CPU run has the reference and no business on the network."""
        monkeypatch.setenv("MICROSPEC_KERNELS_REPO", "someone/microspec")
        for tier in loading.TIERS[:-1]:
            monkeypatch.setitem(loading._PROVIDERS, tier, raising(AssertionError("asked")))
        assert set(ops.status("cpu").values()) == {"reference"}
        assert "asked" not in str(ops.load("cpu"))

    def test_no_network_when_the_hub_is_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kernels = pytest.importorskip("kernels")
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(kernels, "get_kernel", raising(AssertionError("asked")))
        monkeypatch.setenv("MICROSPEC_KERNELS_REPO", "someone/microspec")
        (reason,) = {service.refusals[1].reason for service in ops.load("cpu", "hub").values()}
        assert "does not ask the network" in reason

    def test_no_repository_no_question(self) -> None:
        assert "MICROSPEC_KERNELS_REPO names no" in str(ops.load("cpu", "hub")["draft_topk"].refusals)

    def test_nothing_built(self) -> None:
        assert "microspec kernels build" in str(ops.load("cpu", "local")["draft_topk"].refusals)

    def test_no_such_folder(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            services = ops.load("cpu", str(tmp_path / "missing"))
        assert "missing is not a folder" in str(services["draft_topk"].refusals)
        assert "missing is not a folder" in caplog.text, "an explicit choice that fails is said aloud"

    def test_empty_folder(self, tmp_path: Path) -> None:
        services = ops.load("cpu", str(tmp_path))
        assert {service.tier for service in services.values()} == {"reference"}
        assert services["draft_topk"].refusals[0].tier == "path"

    def test_reference_by_choice_is_quiet(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            ops.load("cpu", "reference")
        assert not caplog.text

    def test_choice_that_is_not_met(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MICROSPEC_KERNELS", "local")
        assert loading.unmet_choice(ops.load("cpu")) == "local"
        monkeypatch.setenv("MICROSPEC_KERNELS", "reference")
        ops.forget()
        assert loading.unmet_choice(ops.load("cpu")) is None


class TestCalls:
    def test_dispatcher_reaches_the_service(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []

        def counted(*arguments: Any) -> Any:
            seen.append(len(arguments))
            return reference.draft_topk(*arguments)

        service = loading.Service("draft_topk", "local", "here", (), counted)
        monkeypatch.setitem(loading._services, "cpu", {**ops.load("cpu"), "draft_topk": service})
        ops.draft_topk(torch.randn(2, 5), 2)
        torch.ops.microspec.draft_topk(logits=torch.randn(2, 5), k=1)
        assert seen == [2, 2]

    def test_what_a_kernel_does_not_take(self) -> None:
        service = loading.Service(
            "topk_candidates", "local", "here", (), raising(AssertionError("called")), lambda name, *_: False
        )
        assert service(torch.tensor([[1.0, 3.0, 2.0]]), 2).tolist() == [[1, 2]]

    def test_first_use_in_a_capture(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        """A capture forbids the self-tests: the reference is captured, said aloud, and nothing is decided."""
        monkeypatch.setattr(loading, "_is_capturing", lambda: True)
        with caplog.at_level(logging.WARNING):
            result = loading._dispatcher("topk_candidates", "cuda")(torch.tensor([[1.0, 3.0]]), 1)
        assert result.tolist() == [[1]]
        assert "ops.load('cuda')" in caplog.text
        assert "cuda" not in loading._services


class TestSelfTest:
    @pytest.mark.parametrize("name", ops.SCHEMAS)
    def test_reference_agrees_with_itself(self, name: str) -> None:
        assert self_test.disagreement(name, getattr(reference, name), CPU) is None

    @pytest.mark.parametrize("name", ops.SCHEMAS)
    def test_a_kernel_that_does_nothing_is_found(self, name: str) -> None:
        """Also one that returns the right shapes and leaves the values as they were allocated."""

        def idle(*arguments: Any) -> Any:
            copies = [[t.clone() for t in a] if isinstance(a, list) else a for a in arguments]
            copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in copies]
            result = getattr(reference, name)(*copies)
            if isinstance(result, tuple):
                return tuple(torch.zeros_like(t) for t in result)
            return None if result is None else torch.zeros_like(result)

        assert "self-test gave" in str(self_test.disagreement(name, idle, CPU))


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("9.0", (9, 0), True),
        ("8.0", (8, 6), True),
        ("8.6", (8, 0), False),
        ("8.0", (9, 0), False),
        ("8.0+PTX", (9, 0), True),
        ("9.0a", (9, 0), True),
        ("10.0", (9, 0), False),
        ("10.0+PTX", (12, 0), True),
        ("10.0+PTX", (9, 0), False),
    ],
)
def test_machine_code_and_gpu(arch: str, capability: tuple[int, int], runs: bool) -> None:
    assert loading._runs_on(arch, capability) is runs


class TestModules:
    def module(self, tmp_path: Path, metadata: str) -> ModuleType:
        (tmp_path / "metadata.json").write_text(metadata)
        module = ModuleType("a_kernel")
        module.__file__ = str(tmp_path / "__init__.py")
        return module

    def test_of_another_device(self, tmp_path: Path) -> None:
        module = self.module(tmp_path, '{"backend": {"type": "cuda", "archs": ["9.0"]}}')
        with pytest.raises(loading._Refused, match="built for cuda, not for cpu"):
            loading._from_module(module, "a build", CPU)

    def test_of_another_gpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        module = self.module(tmp_path, '{"backend": {"type": "cuda", "archs": ["8.0", "10.0+PTX"]}}')
        with pytest.raises(loading._Refused, match=r"capability 8.0, 10.0\+PTX; this GPU has 9.0"):
            loading._from_module(module, "a build", torch.device("cuda"))

    def test_of_another_kind(self, tmp_path: Path) -> None:
        module = self.module(tmp_path, '{"backend": {"type": "cpu"}}')
        with pytest.raises(loading._Refused, match="no function `supports`"):
            loading._from_module(module, "a build", CPU)
