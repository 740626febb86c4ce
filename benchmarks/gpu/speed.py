"""Tokens per second of the bare engine: decoding 1, 8, 32 and 256 texts at once, and prefill.

Each figure comes with its share of the roof: what the GPU would need to read all matrices and the keys and values of
every text once, or to multiply, whichever is longer, through what was needed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.engine.execution.engine import Engine
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.drive import clear, prompt_of, request, settle
from benchmarks.gpu.engines import Phases, engine_of
from benchmarks.gpu.finding import Bench, Finding
from benchmarks.gpu.kernel_times import kernel_times
from benchmarks.gpu.shapes import shape_of
from benchmarks.gpu.work import Roofs
from model.checkpoint.checkpoint import load_config
from model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured."""

    rows: tuple[int, ...] = (1, 8, 32, 256)
    prompt: int = 200
    windows: int = 5
    seconds: float = 0.25
    """Of each window of steps."""
    most_steps: int = 50
    read: tuple[int, ...] = (128, 1000, 4000)
    """Prompts, where the context has room."""
    profiled: tuple[int, ...] = (1, 32)
    """Rows of steps that are looked into."""


TINY = Sizes(rows=(1, 3), prompt=9, windows=2, seconds=0.0, most_steps=3, read=(20,), profiled=(1,))
_LOOKED_INTO = ("gpt2", "8b")
DRAWN: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


def run(bench: Bench) -> Iterator[Finding]:
    """The widest batch is settled last: it takes longest."""
    sizes = TINY if bench.tiny else Sizes()
    shape = None if bench.subject == "default" else shape_of(bench.subject, tiny=bench.tiny)
    phases = Phases()
    engine = engine_of(
        bench,
        shape,
        announce=phases,
        max_running=max(sizes.rows),
        tokens_per_step=max(*sizes.rows, 64 if bench.tiny else 8192),
    )
    yield Finding(what="engine built", value=phases.seconds, unit="s", note=str(phases))
    measured = shape or load_config(bench.weights)
    roofs = Roofs.of(bench, measured)
    for rows in sizes.rows:
        yield decode(engine, measured, rows, sizes, roofs)
    yield decode(engine, measured, sizes.rows[-2], sizes, roofs, **DRAWN)
    for length in sizes.read:
        if length < measured.context:
            yield prefill(engine, measured, length, sizes, roofs)
    for rows in sizes.profiled if bench.subject in _LOOKED_INTO else ():
        yield from _kernels(engine, measured, rows, sizes, bench.device)


def decode(engine: Engine, shape: ModelConfig, rows: int, sizes: Sizes, roofs: Roofs, **params: Any) -> Finding:
    """Windows of steps with nothing else to do; the device is waited for before and behind each."""
    clock = Clock(roofs.device)
    tokens = _begin(engine, shape, rows, sizes, **params)
    one = _window(engine, clock, 3, rows) / 3  # warm, too
    steps = max(2, min(sizes.most_steps, int(sizes.seconds / max(one, 1e-6))))
    steps = min(steps, (tokens - 8) // sizes.windows)
    seconds = [_window(engine, clock, steps, rows) / steps for _ in range(sizes.windows)]
    kept = statistics.mean(len(sequence.tokens) for sequence in engine.scheduler.running)
    clear(engine)
    step = statistics.median(seconds)
    least = roofs.least_seconds(tokens=rows, rows=rows, kept=kept)
    how = "decode, drawn," if params else "decode"
    return Finding(
        what=f"{how} x{rows}",
        value=rows / step,
        unit="tokens/s",
        share=least and least / step,
        note=f"{step * 1000:.3f} ms a step, {min(seconds) * 1000:.3f} to {max(seconds) * 1000:.3f}",
    )


def prefill(engine: Engine, shape: ModelConfig, length: int, sizes: Sizes, roofs: Roofs) -> Finding:
    """From a prompt that no cache knows to its first token."""
    clock = Clock(roofs.device)
    seconds = []
    for turn in range(sizes.windows + 1):
        clock.settle()
        began = time.perf_counter()
        engine.add(request(f"read {turn}", prompt_of(length, shape.vocab_size, f"read {length} {turn}"), 1))
        settle(engine, 1)
        seconds.append(time.perf_counter() - began)
        clear(engine)
    middle = statistics.median(seconds[1:])
    least = roofs.least_seconds(tokens=length, rows=1, kept=0)
    return Finding(
        what=f"prefill {length}",
        value=length / middle,
        unit="tokens/s",
        share=least and least / middle,
        note=f"{middle * 1000:.2f} ms to the first token, {_range(seconds[1:])}",
    )


def _begin(engine: Engine, shape: ModelConfig, rows: int, sizes: Sizes, **params: Any) -> int:
    """Texts that only have to be continued from now on; by how many tokens at most."""
    tokens = shape.context - sizes.prompt - 1
    for row in range(rows):
        prompt = prompt_of(sizes.prompt, shape.vocab_size, f"{rows} {row} {params}")
        engine.add(request(f"decode {row}", prompt, tokens, **params, **({"seed": row} if params else {})))
    settle(engine, rows)
    return tokens


def _kernels(engine: Engine, shape: ModelConfig, rows: int, sizes: Sizes, device: str) -> Iterator[Finding]:
    _begin(engine, shape, rows, sizes)
    _window(engine, Clock(device), 3, rows)
    steps = 2 if sizes is TINY else 10
    yield from kernel_times(lambda: _window(engine, Clock(device), steps, rows), steps, device, f"decode x{rows}")
    clear(engine)


def _window(engine: Engine, clock: Clock, steps: int, rows: int) -> float:
    clock.settle()
    began = time.perf_counter()
    events = sum(len(engine.step().events) for _ in range(steps))
    clock.settle()
    seconds = time.perf_counter() - began
    assert events == rows * steps, f"{events} tokens in {steps} steps of {rows} texts"
    return seconds


def _range(seconds: Sequence[float]) -> str:
    return f"{min(seconds) * 1000:.2f} to {max(seconds) * 1000:.2f}"
