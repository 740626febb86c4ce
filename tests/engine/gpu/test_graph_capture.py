"""CUDA graph capture on a fake CUDA: order of operations, and errors when memory is missing."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest
import torch

from app.engine.gpu.graphs import CudaCapture
from app.engine.memory.device_errors import broken_capture, lacked_device_memory
from tests.engine.memory.test_device_errors import accelerator_error
from tests.support.gpu.emulated_engine import tiny_device_runner
from tests.support.model.tiny_models import tiny_decoder


class FakeCuda:
    """Stands in for torch.cuda: notes what is asked of it. What is raised inside a capture ends with another error."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, 1

    def Stream(self) -> _Stream:  # noqa: N802 - torch's name
        return _Stream("side", self.calls)

    def current_stream(self) -> _Stream:
        return _Stream("main", self.calls)

    def stream(self, stream: _Stream) -> _Noted:
        return _Noted(stream.name, self.calls)

    def CUDAGraph(self) -> Any:  # noqa: N802 - torch's name
        class Graph:
            def replay(graph) -> None:  # noqa: N805
                self.calls.append("replay")

        return Graph()

    def graph(self, _graph: object, *, pool: tuple[int, int], stream: _Stream) -> _Noted:
        assert pool == (0, 1)
        return _Noted(f"capture on {stream.name}", self.calls)


class _Stream:
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self._calls = name, calls

    def wait_stream(self, other: _Stream) -> None:
        self._calls.append(f"{self.name} waits for {other.name}")


class _Noted:
    def __init__(self, what: str, calls: list[str]) -> None:
        self._what, self._calls = what, calls

    def __enter__(self) -> None:
        self._calls.append(self._what)

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        if kind and self._what.startswith("capture"):
            raise accelerator_error(901, "operation failed due to a previous error during capture")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("graph_pool_handle", "Stream", "current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def test_what_is_captured_was_done_before_on_the_same_stream(cuda: FakeCuda) -> None:
    """Kernels are compiled and workspaces made by then, which a capture must not."""
    replay = CudaCapture()(lambda: cuda.calls.append("work"))
    replay()
    warmup = ["side waits for main", "side", "work", "main waits for side"]
    assert cuda.calls == [*warmup, "capture on side", "work", "replay"]


def _failing(at: int, error: Exception) -> Callable[[], None]:
    calls = []

    def work() -> None:
        calls.append(1)
        if len(calls) == at:
            raise error

    return work


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("at", [1, 2])
def test_memory_that_a_capture_lacks_is_told_by_whatever_it_raises(at: int) -> None:
    with pytest.raises(RuntimeError) as caught:
        CudaCapture()(_failing(at, torch.OutOfMemoryError("CUDA out of memory.")))
    assert isinstance(caught.value, torch.OutOfMemoryError) == (at == 1) and lacked_device_memory(caught.value)
    assert bool(broken_capture(caught.value)) == (at == 2)


@pytest.mark.usefixtures("cuda")
def test_a_capture_that_ends_without_a_reason_is_told_apart() -> None:
    with pytest.raises(torch.AcceleratorError) as caught:
        CudaCapture()(_failing(2, accelerator_error(901, "operation failed due to a previous error during capture")))
    assert broken_capture(caught.value) and not lacked_device_memory(caught.value)


def test_steps_are_captured_once() -> None:
    runner = tiny_device_runner(tiny_decoder(), max_running=2)
    runner.capture(lambda _work: lambda: None)
    with pytest.raises(AssertionError, match="free the workspace"):
        runner.capture(lambda _work: lambda: None)
