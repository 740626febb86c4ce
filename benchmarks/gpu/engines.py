"""Engines as a service would build them, from files or from random weights. No torch."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from app.common.ipc import WorkerConfig
from app.engine.execution.engine import Engine
from app.engine.gpu.runner import DeviceRunner
from app.engine.startup import assemble
from benchmarks.gpu.finding import Bench
from benchmarks.gpu.shapes import reader
from model.checkpoint.checkpoint import Checkpoint
from model.config import ModelConfig

_BLOCK = {"cpu": 16, "cuda": 64}


class Phases:
    """Records the startup phases that an engine reports. Owned by the code that builds the engine."""

    def __init__(self) -> None:
        self._heard = [("before", time.monotonic())]

    def __call__(self, name: str) -> None:
        """What begins now."""
        self._heard.append((name, time.monotonic()))

    @property
    def seconds(self) -> float:
        """Since this was made."""
        return time.monotonic() - self._heard[0][1]

    def __str__(self) -> str:
        moments = [*self._heard, ("", time.monotonic())]
        return ", ".join(f"{name} {end - start:.1f} s" for (name, start), (_, end) in pairwise(moments[1:]))


def engine_of(
    bench: Bench,
    shape: ModelConfig | None,
    read: Callable[..., Checkpoint] | None = None,
    announce: Callable[[str], None] = lambda _phase: None,
    cache_tokens: int = 0,
    **knobs: Any,
) -> Engine:
    """On the bench's device; of the default weights where there is no shape. Raises EngineStartError.

    read: random weights of this shape by default. cache_tokens: room for so many; 0: as the engine decides, which on a
    GPU is nearly all there is, so that a process can have only one such engine.
    """
    where = {"device": bench.device, "dtype": "float32" if bench.device == "cpu" else "bfloat16"}
    room = {"kv_blocks": -(-cache_tokens // _BLOCK[bench.device])} if cache_tokens else {}
    knobs = {**where, **room, **knobs}
    if shape is None:
        return assemble(WorkerConfig(weights=str(bench.weights), **knobs), announce).engine
    folder = bench.folder / "tokenizer"
    if not folder.exists():
        folder.mkdir()
        for path in bench.weights.glob("tokenizer*.json"):  # of another vocabulary, and never asked
            shutil.copy(path, folder)
    return assemble(WorkerConfig(weights=str(folder), **knobs), announce, read=read or reader(shape)).engine


def runs_ahead(engine: Engine) -> bool:
    """Whether a step can be launched while the one before is computed."""
    return hasattr(engine.runner, "launch")


def without_lead(engine: Engine) -> Engine:
    """The same, idle, but each step is waited for before the next is planned."""
    return Engine(engine.scheduler, engine.runner)


def without_graphs(engine: Engine) -> bool:
    """From now on its steps run operation by operation; whether any were captured."""
    if not isinstance(engine.runner, DeviceRunner):
        return False
    replays = engine.runner.graphs.replays
    had = bool(replays)
    replays.clear()
    return had
