"""Throughput of the bare engine on 256 concurrent requests of 1,024 prompt and 1,024 generated tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.engine_driver import random_prompt, request
from benchmarks.gpu.engines import build_engine
from benchmarks.gpu.results import Finding, StageContext
from benchmarks.gpu.roofline import Roofline
from benchmarks.gpu.shapes import shape_of
from benchmarks.gpu.timing import DeviceTimer

_RESERVE_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the batch."""

    requests: int = 256
    prompt: int = 1024
    tokens: int = 1024
    per_step: int = 8192


_TINY = Sizes(requests=4, prompt=20, tokens=6, per_step=64)


def run(context: StageContext) -> Iterator[Finding]:
    """Runs all requests. If the time is over before they finish, the note says so."""
    sizes, shape = _TINY if context.tiny else Sizes(), shape_of(context.variant, tiny=context.tiny)
    engine = build_engine(
        context,
        shape,
        max_running=sizes.requests,
        tokens_per_step=sizes.per_step,
        max_context=sizes.prompt + sizes.tokens,
    )
    timer, roofline = DeviceTimer(context.device), Roofline.of(context, shape)
    for i in range(sizes.requests):
        engine.add(request(str(i), random_prompt(sizes.prompt, shape.vocab_size, i), sizes.tokens))
    timer.synchronize()
    start, events, steps, first = time.perf_counter(), 0, 0, 0.0
    while engine.has_work and context.seconds_left > _RESERVE_SECONDS:
        report = engine.step()
        assert not report.failed, report.failed
        events, steps = events + len(report.events), steps + 1
        first = first or (time.perf_counter() - start if events >= sizes.requests else 0.0)
    timer.synchronize()
    seconds = time.perf_counter() - start
    counters = engine.scheduler.counters
    total = sizes.requests * sizes.tokens
    counts = f"{steps} steps, {counters.preemptions} preemptions, {counters.blocks_total} blocks"
    cut = "" if events == total else f"cut at {events} of {total} tokens; "
    least = _least_seconds(sizes, roofline) if events == total else None
    yield Finding(
        what=f"{sizes.requests} x {sizes.prompt} in, {sizes.tokens} out",
        value=events / seconds,
        unit="tokens/s out",
        share=least and least / seconds,
        note=f"{cut}{seconds:.1f} s; {counts}",
    )
    yield Finding(what="as many tokens as requests after", value=first, unit="s")


def _least_seconds(sizes: Sizes, roofline: Roofline) -> float | None:
    """Roofline of prefilling all prompts in full steps, then decoding with half of the output on average."""
    read = sizes.requests * sizes.prompt
    step = roofline.least_seconds(tokens=sizes.per_step, rows=1, kept=0)
    decode = roofline.least_seconds(tokens=sizes.requests, rows=sizes.requests, kept=sizes.prompt + sizes.tokens / 2)
    return step and decode and step * read / sizes.per_step + decode * sizes.tokens
