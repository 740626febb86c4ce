"""Checks that a steady decode step never waits for the device needlessly: torch's check of synchronizing calls.

It only warns here, and any warning breaks the law: an error would be taken for a request's by the engine, which would
compute the step again row by row and go on.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator

import torch

from app.engine.execution.engine import Engine
from benchmarks.gpu.drive import clear, prompt_of, request, settle
from benchmarks.gpu.finding import Bench, Finding
from benchmarks.gpu.shapes import shape_of
from benchmarks.gpu.twins import device_engine

_CALLED = "called a synchronizing"
"""Not the mode's own warning, once in a process, that it "does not yet detect all synchronizing operations"."""


def run(bench: Bench) -> Iterator[Finding]:
    """For greedy texts, and for drawn ones."""
    shape = shape_of("gpt2", tiny=bench.tiny)
    rows, steps = (2, 2) if bench.tiny else (8, 20)
    engine = device_engine(bench, shape, max_running=rows, cache_tokens=rows * shape.context)
    for what, params in (("greedy", {}), ("drawn", {"temperature": 0.8, "top_k": 40, "top_p": 0.9})):
        for row in range(rows):
            prompt = prompt_of(20, shape.vocab_size, f"{what} {row}")
            engine.add(request(f"{what} {row}", prompt, steps + 40, **params))
        settle(engine, rows)
        for _ in range(3):
            engine.step()
        calls = _calls(engine, steps, bench.device)
        clear(engine)
        yield Finding(
            what=f"{what} decode x{rows}",
            value=sum(calls.values()),
            unit=f"synchronizing calls in {steps} steps",
            ok=not calls if bench.device == "cuda" else None,
            note="; ".join(f"{count} x {place}" for place, count in calls.most_common(4)),
        )


def _calls(engine: Engine, steps: int, device: str) -> Counter[str]:
    """By the line of Python that called."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        _set_mode(device, "warn")
        try:
            for _ in range(steps):
                engine.step()
        finally:
            _set_mode(device, "default")
    synchronizing = [warning for warning in heard if _CALLED in str(warning.message)]
    return Counter(f"{warning.filename.rpartition('/')[2]}:{warning.lineno}" for warning in synchronizing)


def _set_mode(device: str, mode: str) -> None:
    if device == "cuda":
        torch.cuda.set_sync_debug_mode(mode)
