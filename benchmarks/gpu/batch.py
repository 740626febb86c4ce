"""Throughput of the bare engine on 256 concurrent requests of 1,024 prompt and 1,024 generated tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.drive import prompt_of, request
from benchmarks.gpu.engines import engine_of
from benchmarks.gpu.finding import Bench, Finding
from benchmarks.gpu.shapes import shape_of
from benchmarks.gpu.work import Roofs

_RESERVE_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What comes in."""

    requests: int = 256
    prompt: int = 1024
    tokens: int = 1024
    per_step: int = 8192


_TINY = Sizes(requests=4, prompt=20, tokens=6, per_step=64)


def run(bench: Bench) -> Iterator[Finding]:
    """What is not done when the stage's time is over is cut, and the figure says so."""
    sizes, shape = _TINY if bench.tiny else Sizes(), shape_of(bench.subject, tiny=bench.tiny)
    engine = engine_of(
        bench,
        shape,
        max_running=sizes.requests,
        tokens_per_step=sizes.per_step,
        max_context=sizes.prompt + sizes.tokens,
    )
    clock, roofs = Clock(bench.device), Roofs.of(bench, shape)
    for i in range(sizes.requests):
        engine.add(request(str(i), prompt_of(sizes.prompt, shape.vocab_size, i), sizes.tokens))
    clock.settle()
    began, events, steps, first = time.perf_counter(), 0, 0, 0.0
    while engine.has_work and bench.seconds_left > _RESERVE_SECONDS:
        report = engine.step()
        assert not report.failed, report.failed
        events, steps = events + len(report.events), steps + 1
        first = first or (time.perf_counter() - began if events >= sizes.requests else 0.0)
    clock.settle()
    seconds = time.perf_counter() - began
    counters = engine.scheduler.counters
    total = sizes.requests * sizes.tokens
    told = f"{steps} steps, {counters.preemptions} gave way, {counters.blocks_total} blocks"
    cut = "" if events == total else f"cut at {events} of {total} tokens; "
    least = _least_seconds(sizes, roofs) if events == total else None
    yield Finding(
        what=f"{sizes.requests} x {sizes.prompt} in, {sizes.tokens} out",
        value=events / seconds,
        unit="tokens/s out",
        share=least and least / seconds,
        note=f"{cut}{seconds:.1f} s; {told}",
    )
    yield Finding(what="as many tokens as requests after", value=first, unit="s")


def _least_seconds(sizes: Sizes, roofs: Roofs) -> float | None:
    """Reading all prompts in full steps, then decoding all texts together, each half written on average."""
    read = sizes.requests * sizes.prompt
    step = roofs.least_seconds(tokens=sizes.per_step, rows=1, kept=0)
    decode = roofs.least_seconds(tokens=sizes.requests, rows=sizes.requests, kept=sizes.prompt + sizes.tokens / 2)
    return step and decode and step * read / sizes.per_step + decode * sizes.tokens
