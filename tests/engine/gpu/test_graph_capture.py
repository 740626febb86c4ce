"""CUDA graphs: order of operations of a capture on a fake CUDA, captured once, and chosen by length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.engine.gpu.graphs import CudaCapture, DecodeGraphs
from tests.support.gpu.emulated_engine import tiny_device_runner
from tests.support.model.tiny_models import tiny_decoder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of torch.cuda."""
    calls: list[str] = []

    @contextmanager
    def entered(what: str) -> Iterator[None]:
        calls.append(what)
        yield

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


def test_steps_are_captured_once() -> None:
    runner = tiny_device_runner(tiny_decoder(), max_running=2)
    runner.capture(lambda _work: lambda: None)
    with pytest.raises(AssertionError, match="free the workspace"):
        runner.capture(lambda _work: lambda: None)


def test_a_longer_sequence_takes_a_graph_of_more_splits() -> None:
    steps = tiny_device_runner(tiny_decoder(), max_running=2).graphs.steps
    graphs, launched = DecodeGraphs(steps, buckets=(1, 2), max_splits=40), []

    def noted(work: Any) -> Callable[[], None]:
        return lambda: launched.append(work.args)

    graphs.capture(noted)
    for count, splits in ((1, 1), (2, 16), (2, 17), (1, 40)):
        graphs.run(count, splits)
    assert launched == [(1, 1), (2, 16), (2, 40), (1, 40)] and graphs.count == 6
