"""Tokens per second of the bare engine: decoding 1, 8, 32 and 256 sequences at once, and prefill.

Each figure comes with its share of the roofline: the time that the GPU needs to read all matrices and all keys and
values once, or to multiply, whichever is longer, divided by the measured time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.engine.execution.engine import Engine
from benchmarks.engine_driver import cancel_all, random_prompt, request, run_until_decoding
from benchmarks.gpu.engines import StartupPhases, build_engine
from benchmarks.gpu.results import Finding, StageContext
from benchmarks.gpu.roofline import Roofline
from benchmarks.gpu.shapes import shape_of
from benchmarks.gpu.timing import DeviceTimer, kernel_times
from model.checkpoint.checkpoint import load_config
from model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the measurements."""

    rows: tuple[int, ...] = (1, 8, 32, 256)
    prompt: int = 200
    windows: int = 5
    seconds: float = 0.25
    """Duration of each window of steps."""
    max_steps: int = 50
    prompt_lengths: tuple[int, ...] = (128, 1000, 4000)
    """Prompt lengths, as far as they fit the context."""
    profiled: tuple[int, ...] = (1, 32)
    """Numbers of rows whose steps are profiled."""


TINY = Sizes(rows=(1, 3), prompt=9, windows=2, seconds=0.0, max_steps=3, prompt_lengths=(20,), profiled=(1,))
_PROFILED_MODELS = ("gpt2", "8b")
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


def run(context: StageContext) -> Iterator[Finding]:
    """Measures decode, the largest batch last, then sampled decode, prefill and kernels."""
    sizes = TINY if context.tiny else Sizes()
    shape = None if context.variant == "default" else shape_of(context.variant, tiny=context.tiny)
    phases = StartupPhases()
    engine = build_engine(
        context,
        shape,
        announce=phases,
        max_running=max(sizes.rows),
        tokens_per_step=max(*sizes.rows, 64 if context.tiny else 8192),
    )
    yield Finding(what="engine built", value=phases.seconds, unit="s", note=str(phases))
    measured = shape or load_config(context.weights)
    roofline = Roofline.of(context, measured)
    for rows in sizes.rows:
        yield decode(engine, measured, rows, sizes, roofline)
    yield decode(engine, measured, sizes.rows[-2], sizes, roofline, **SAMPLED)
    for length in sizes.prompt_lengths:
        if length < measured.context:
            yield prefill(engine, measured, length, sizes, roofline)
    for rows in sizes.profiled if context.variant in _PROFILED_MODELS else ():
        yield from _kernels(engine, measured, rows, sizes, context.device)


def decode(engine: Engine, shape: ModelConfig, rows: int, sizes: Sizes, roofline: Roofline, **params: Any) -> Finding:
    """Times windows of pure decode steps; synchronizes before and after each."""
    timer = DeviceTimer(roofline.device)
    tokens = _begin(engine, shape, rows, sizes, **params)
    step_estimate = _window(engine, timer, 3, rows) / 3  # a warm-up, too
    steps = max(2, min(sizes.max_steps, int(sizes.seconds / max(step_estimate, 1e-6))))
    steps = min(steps, (tokens - 8) // sizes.windows)
    seconds = [_window(engine, timer, steps, rows) / steps for _ in range(sizes.windows)]
    kept = statistics.mean(len(sequence.tokens) for sequence in engine.scheduler.running)
    cancel_all(engine)
    step = statistics.median(seconds)
    least = roofline.least_seconds(tokens=rows, rows=rows, kept=kept)
    how = "decode, drawn," if params else "decode"
    return Finding(
        what=f"{how} x{rows}",
        value=rows / step,
        unit="tokens/s",
        share=least and least / step,
        note=f"{step * 1000:.3f} ms a step, {min(seconds) * 1000:.3f} to {max(seconds) * 1000:.3f}",
    )


def prefill(engine: Engine, shape: ModelConfig, length: int, sizes: Sizes, roofline: Roofline) -> Finding:
    """Time from an uncached prompt to its first token."""
    timer = DeviceTimer(roofline.device)
    seconds = []
    for repeat in range(sizes.windows + 1):
        timer.synchronize()
        start = time.perf_counter()
        engine.add(request(f"read {repeat}", random_prompt(length, shape.vocab_size, f"read {length} {repeat}"), 1))
        run_until_decoding(engine, 1)
        seconds.append(time.perf_counter() - start)
        cancel_all(engine)
    middle = statistics.median(seconds[1:])
    least = roofline.least_seconds(tokens=length, rows=1, kept=0)
    return Finding(
        what=f"prefill {length}",
        value=length / middle,
        unit="tokens/s",
        share=least and least / middle,
        note=f"{middle * 1000:.2f} ms to the first token, {_range(seconds[1:])}",
    )


def _begin(engine: Engine, shape: ModelConfig, rows: int, sizes: Sizes, **params: Any) -> int:
    """Starts sequences that only decode from now on. Returns how many tokens each may still generate."""
    tokens = shape.context - sizes.prompt - 1
    for row in range(rows):
        prompt = random_prompt(sizes.prompt, shape.vocab_size, f"{rows} {row} {params}")
        engine.add(request(f"decode {row}", prompt, tokens, **params, **({"seed": row} if params else {})))
    run_until_decoding(engine, rows)
    return tokens


def _kernels(engine: Engine, shape: ModelConfig, rows: int, sizes: Sizes, device: str) -> Iterator[Finding]:
    _begin(engine, shape, rows, sizes)
    _window(engine, DeviceTimer(device), 3, rows)
    steps = 2 if sizes is TINY else 10
    yield from kernel_times(lambda: _window(engine, DeviceTimer(device), steps, rows), steps, device, f"decode x{rows}")
    cancel_all(engine)


def _window(engine: Engine, timer: DeviceTimer, steps: int, rows: int) -> float:
    timer.synchronize()
    start = time.perf_counter()
    events = sum(len(engine.step().events) for _ in range(steps))
    timer.synchronize()
    seconds = time.perf_counter() - start
    assert events == rows * steps, f"{events} tokens in {steps} steps of {rows} sequences"
    return seconds


def _range(seconds: Sequence[float]) -> str:
    return f"{min(seconds) * 1000:.2f} to {max(seconds) * 1000:.2f}"
