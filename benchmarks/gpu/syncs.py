"""Checks that steady decode steps never synchronize with the device needlessly, by torch's sync debug mode.

The mode only warns here, and any warning fails the check: the engine would attribute an error to a request, compute the
step again row by row, and go on.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator

import torch

from app.engine.execution.engine import Engine
from benchmarks.engine_driver import cancel_all, random_prompt, request, run_until_decoding
from benchmarks.gpu.engines import build_device_engine
from benchmarks.gpu.results import Finding, StageContext
from benchmarks.gpu.shapes import shape_of

_CALLED = "called a synchronizing"
"""Excludes the mode's own warning, once per process, that it "does not yet detect all synchronizing operations"."""


def run(context: StageContext) -> Iterator[Finding]:
    """Checks greedy and sampled decode."""
    shape = shape_of("gpt2", tiny=context.tiny)
    rows, steps = (2, 2) if context.tiny else (8, 20)
    engine = build_device_engine(context, shape, max_running=rows, cache_tokens=rows * shape.context)
    for what, params in (("greedy", {}), ("drawn", {"temperature": 0.8, "top_k": 40, "top_p": 0.9})):
        for row in range(rows):
            prompt = random_prompt(20, shape.vocab_size, f"{what} {row}")
            engine.add(request(f"{what} {row}", prompt, steps + 40, **params))
        run_until_decoding(engine, rows)
        for _ in range(3):
            engine.step()
        calls = _synchronizing_calls(engine, steps, context.device)
        cancel_all(engine)
        yield Finding(
            what=f"{what} decode x{rows}",
            value=sum(calls.values()),
            unit=f"synchronizing calls in {steps} steps",
            ok=not calls if context.device == "cuda" else None,
            note="; ".join(f"{count} x {line}" for line, count in calls.most_common(4)),
        )


def _synchronizing_calls(engine: Engine, steps: int, device: str) -> Counter[str]:
    """Counts by the line of Python that called."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _set_mode(device, "warn")
        try:
            for _ in range(steps):
                engine.step()
        finally:
            _set_mode(device, "default")
    synchronizing = [warning for warning in caught if _CALLED in str(warning.message)]
    return Counter(f"{warning.filename.rpartition('/')[2]}:{warning.lineno}" for warning in synchronizing)


def _set_mode(device: str, mode: str) -> None:
    if device == "cuda":
        torch.cuda.set_sync_debug_mode(mode)
