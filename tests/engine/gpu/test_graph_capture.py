"""CUDA graphs: order of operations of a capture on a fake CUDA, captured once, and chosen by length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.engine.gpu.graphs import CudaCapture, StepGraphs
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


def test_a_step_is_replayed_by_its_size_and_whether_attention_has_splits_to_merge() -> None:
    steps = tiny_device_runner(tiny_decoder(), max_running=2).graphs.steps
    graphs, launched = StepGraphs(steps, rows=(1, 2), tokens=(16, 32), max_splits=40), []

    def noted(part: Any) -> Callable[[], None]:
        name, sizes = part.func.__name__, [x for x in part.args if isinstance(x, int)]
        return lambda: launched.append((name, *sizes))

    graphs.capture(noted)
    for count, splits in ((1, 1), (2, 2), (1, 40)):
        graphs.decode(count, splits)
    graphs.draw(2)
    assert launched == [("decode", 1, 1), ("decode", 2, 40), ("decode", 1, 40), ("draw", 2)]
    assert graphs.count == len(graphs.replays) == 10
    assert [graphs.tokens(count) for count in (1, 17, 33)] == [16, 32, 40]
    assert graphs.tiles(3, 16) == 8 and graphs.tiles(3, 40) == 8
