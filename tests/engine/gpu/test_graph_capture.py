"""CUDA graph capture on a fake CUDA: order of operations, and errors when memory is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.engine.gpu.graphs import CudaCapture
from app.engine.memory.device_errors import broken_capture, lacked_device_memory
from tests.engine.memory.test_device_errors import accelerator_error
from tests.support.gpu.emulated_engine import tiny_device_runner
from tests.support.model.tiny_models import tiny_decoder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of torch.cuda. What is raised inside a capture ends with another error."""
    calls: list[str] = []

    @contextmanager
    def entered(what: str) -> Iterator[None]:
        calls.append(what)
        try:
            yield
        except Exception:
            if what.startswith("capture"):
                raise accelerator_error(901, "operation failed due to a previous error during capture")  # noqa: B904
            raise

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: calls.append(f"{name} waits for {other.name}"))

    fakes: dict[str, Callable[..., Any]] = {
        "graph_pool_handle": lambda: (0, 1),
        "Stream": lambda: stream("side"),
        "current_stream": lambda: stream("main"),
        "stream": lambda on: entered(on.name),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: calls.append("replay")),
        "graph": lambda _graph, pool, stream: entered(f"capture on {stream.name} in {pool}"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return calls


def test_what_is_captured_was_done_before_on_the_same_stream(calls: list[str]) -> None:
    """Kernels are compiled and workspaces made by then, which a capture must not."""
    replay = CudaCapture()(lambda: calls.append("work"))
    replay()
    warmup = ["side waits for main", "side", "work", "main waits for side"]
    assert calls == [*warmup, "capture on side in (0, 1)", "work", "replay"]


def _failing(at: int, error: Exception) -> Callable[[], None]:
    errors = iter([*[None] * (at - 1), error])

    def work() -> None:
        if raised := next(errors):
            raise raised

    return work


@pytest.mark.usefixtures("calls")
@pytest.mark.parametrize("at", [1, 2])
def test_memory_that_a_capture_lacks_is_told_by_whatever_it_raises(at: int) -> None:
    with pytest.raises(RuntimeError) as caught:
        CudaCapture()(_failing(at, torch.OutOfMemoryError("CUDA out of memory.")))
    assert isinstance(caught.value, torch.OutOfMemoryError) == (at == 1) and lacked_device_memory(caught.value)
    assert bool(broken_capture(caught.value)) == (at == 2)


@pytest.mark.usefixtures("calls")
def test_a_capture_that_ends_without_a_reason_is_told_apart() -> None:
    with pytest.raises(torch.AcceleratorError) as caught:
        CudaCapture()(_failing(2, accelerator_error(901, "operation failed due to a previous error during capture")))
    assert broken_capture(caught.value) and not lacked_device_memory(caught.value)


def test_steps_are_captured_once() -> None:
    runner = tiny_device_runner(tiny_decoder(), max_running=2)
    runner.capture(lambda _work: lambda: None)
    with pytest.raises(AssertionError, match="free the workspace"):
        runner.capture(lambda _work: lambda: None)
