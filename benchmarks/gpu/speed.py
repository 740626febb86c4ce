"""Speed of the bare engine: decode, prefill, a large batch, 8-bit weights.

Each figure comes with its share of the roofline: the time that the GPU needs to read all matrices and all keys and
values once, or to multiply, whichever is longer, divided by the measured time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch.profiler import ProfilerActivity, profile

from app.engine.execution.engine import Engine
from app.engine.worker_loop import EngineStartError
from benchmarks.engine_driver import cancel_all, random_prompt, request, run_until_decoding
from benchmarks.gpu.engines import StartupPhases, build_engine, shape_of
from benchmarks.gpu.machine import least_seconds, synchronize
from benchmarks.gpu.results import Finding, StageContext, Unsupported
from model.checkpoint.config_file import load_config
from model.config import ModelConfig
from model.weight_formats import KINDS


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


_TINY = Sizes(rows=(1, 3), prompt=9, windows=2, seconds=0.0, max_steps=3, prompt_lengths=(20,), profiled=(1,))
_PROFILED_MODELS = ("gpt2", "8b")
_MAX_KERNELS = 7
_LONGEST_NAME = 70
_RESERVE_SECONDS = 3.0


def speed(context: StageContext) -> Iterator[Finding]:
    """Measures decode, the largest batch last, then sampled decode, prefill and kernels. The variant is the model."""
    sizes = _TINY if context.tiny else Sizes()
    shape = None if context.variant == "default" else shape_of(context)
    tokens_per_step = max(*sizes.rows, 64 if context.tiny else 8192)
    phases = StartupPhases()
    engine = build_engine(context, shape, phases=phases, max_running=max(sizes.rows), tokens_per_step=tokens_per_step)
    yield from phases.findings()
    bench = _Bench(engine, shape or load_config(context.weights), sizes, context)
    for rows in sizes.rows:
        yield bench.decode(rows)
    yield bench.decode(sizes.rows[-2], temperature=0.8, top_k=50, top_p=0.95)
    for length in sizes.prompt_lengths:
        if length < bench.shape.context:
            yield bench.prefill(length)
    for rows in sizes.profiled if context.variant in _PROFILED_MODELS else ():
        yield from bench.kernels(rows)


def quantized(context: StageContext) -> Iterator[Finding]:
    """Decode and prefill with weights of 4 or 8 bits against bfloat16 ones of the same run. The variant: which."""
    sizes = _TINY if context.tiny else Sizes(rows=(1, 8, 32), prompt_lengths=(1000,))
    shape, phases = shape_of(context, "8b"), StartupPhases()
    try:
        engine = build_engine(
            context,
            shape,
            phases=phases,
            quantize=context.variant,
            max_running=max(sizes.rows),
            tokens_per_step=64 if context.tiny else 1024,
            cache_tokens=max(sizes.rows) * shape.context if context.tiny else 65_536,
        )
    except EngineStartError as error:
        raise Unsupported(str(error)) from None
    yield from phases.findings()
    bench = _Bench(
        engine,
        replace(shape, context=min(shape.context, 1024)),
        sizes,
        context,
        weight_bytes=KINDS[context.variant].bits / 8,
    )
    for finding in chain(map(bench.decode, sizes.rows), map(bench.prefill, sizes.prompt_lengths)):
        baseline = (context.numbers or {}).get(f"speed-8b: {finding.what}")
        assert isinstance(finding.value, float)
        times = f"{finding.value / baseline:.2f} x bfloat16; " if baseline else ""
        yield replace(finding, note=times + finding.note)


@dataclass(frozen=True, slots=True)
class _Bench:
    """Measurements of one engine."""

    engine: Engine
    shape: ModelConfig
    sizes: Sizes
    context: StageContext
    weight_bytes: float = 2

    def decode(self, rows: int, **params: Any) -> Finding:
        """Times windows of pure decode steps; synchronizes before and after each."""
        sizes, tokens = self.sizes, self._begin(rows, **params)
        step_estimate = self._window(3, rows) / 3  # a warm-up, too
        steps = max(2, min(sizes.max_steps, int(sizes.seconds / max(step_estimate, 1e-6))))
        steps = min(steps, (tokens - 8) // sizes.windows)
        seconds = [self._window(steps, rows) / steps for _ in range(sizes.windows)]
        kept = statistics.mean(len(sequence.tokens) for sequence in self.engine.scheduler.running)
        cancel_all(self.engine)
        what = f"{'decode, drawn,' if params else 'decode'} x{rows}"
        return self._finding(what, seconds, "a step", tokens=rows, rows=rows, kept=kept)

    def prefill(self, length: int) -> Finding:
        """Time from an uncached prompt to its first token."""
        seconds = []
        for repeat in range(self.sizes.windows + 1):
            prompt = random_prompt(length, self.shape.vocab_size, f"read {length} {repeat}")
            synchronize(self.context.device)
            start = time.perf_counter()
            self.engine.add(request(f"read {repeat}", prompt, 1))
            run_until_decoding(self.engine, 1)
            seconds.append(time.perf_counter() - start)
            cancel_all(self.engine)
        return self._finding(f"prefill {length}", seconds[1:], "to the first token", tokens=length, rows=1, kept=0)

    def kernels(self, rows: int) -> Iterator[Finding]:
        """Kernel times of decode steps."""
        self._begin(rows)
        self._window(3, rows)
        steps = 2 if self.context.tiny else 10
        yield from _kernel_times(lambda: self._window(steps, rows), steps, self.context.device, f"decode x{rows}")
        cancel_all(self.engine)

    def _finding(self, what: str, seconds: list[float], of: str, *, tokens: int, rows: int, kept: float) -> Finding:
        middle = statistics.median(seconds)
        least = least_seconds(
            self.context, self.shape, tokens=tokens, rows=rows, kept=kept, weight_bytes=self.weight_bytes
        )
        spread = f"{min(seconds) * 1000:.3f} to {max(seconds) * 1000:.3f}"
        note = f"{middle * 1000:.3f} ms {of}, {spread}"
        share = least and least / middle
        return Finding(what=what, value=tokens / middle, unit="tokens/s", share=share, note=note)

    def _begin(self, rows: int, **params: Any) -> int:
        """Starts sequences that only decode from now on. Returns how many tokens each may still generate."""
        tokens = self.shape.context - self.sizes.prompt - 1
        for row in range(rows):
            prompt = random_prompt(self.sizes.prompt, self.shape.vocab_size, f"{rows} {row} {params}")
            self.engine.add(request(f"decode {row}", prompt, tokens, **params, **({"seed": row} if params else {})))
        run_until_decoding(self.engine, rows)
        return tokens

    def _window(self, steps: int, rows: int) -> float:
        synchronize(self.context.device)
        start = time.perf_counter()
        events = sum(len(self.engine.step().events) for _ in range(steps))
        synchronize(self.context.device)
        seconds = time.perf_counter() - start
        assert events == rows * steps, f"{events} tokens in {steps} steps of {rows} sequences"
        return seconds


def _kernel_times(work: Callable[[], object], steps: int, device: str, what: str) -> Iterator[Finding]:
    """Kernel times of `work`, which is called once and runs `steps` steps: the total, then the slowest kernels.

    The profiler itself slows short kernels: read shares from here, and the time of a step from elsewhere.
    """
    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        work()
        synchronize(device)
    times = [
        (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count, event.key)
        for event in profiler.key_averages()
        if event.device_type.name == device.upper()
    ]
    total = sum(duration for duration, _, _ in times) or 1.0
    launches = sum(count for _, count, _ in times) / steps
    yield Finding(what=f"{what}: all kernels", value=total / steps, unit="us a step", note=f"{launches:g} launches")
    for duration, count, name in sorted(times, reverse=True)[:_MAX_KERNELS]:
        yield Finding(
            what=f"{what}: {name[:_LONGEST_NAME]}",
            value=duration / steps,
            unit="us a step",
            note=f"{100 * duration / total:.1f} % of all, {count / steps:g} launches",
        )


def batch(context: StageContext) -> Iterator[Finding]:
    """256 concurrent requests of 1,024 tokens in and 1,024 out, or as many as fit.

    If the time is over first, the note says so.
    """
    n_requests, prompt, tokens, per_step = (4, 20, 6, 64) if context.tiny else (256, 1024, 1024, 8192)
    shape, phases = shape_of(context), StartupPhases()
    engine = build_engine(
        context, shape, phases=phases, max_running=n_requests, tokens_per_step=per_step, max_context=prompt + tokens
    )
    yield from phases.findings()
    pool = engine.scheduler.pool
    fitting = min(n_requests, pool.total // -(-(prompt + tokens) // pool.block_size))
    if fitting < n_requests:
        note = "the others do not fit into the cache beside them, and are left out"
        yield Finding(what="requests that fit", value=fitting, unit=f"of {n_requests}", note=note)
        n_requests = fitting
    for i in range(n_requests):
        engine.add(request(str(i), random_prompt(prompt, shape.vocab_size, i), tokens))
    synchronize(context.device)
    start, events, steps, first = time.perf_counter(), 0, 0, 0.0
    while engine.has_work and context.seconds_left > _RESERVE_SECONDS:
        report = engine.step()
        assert not report.failed, report.failed
        events, steps = events + len(report.events), steps + 1
        first = first or (time.perf_counter() - start if events >= n_requests else 0.0)
    synchronize(context.device)
    seconds = time.perf_counter() - start
    counters, total = engine.scheduler.counters, n_requests * tokens
    counts = f"{steps} steps, {counters.preemptions} preemptions, {counters.blocks_total} blocks"
    # Prefilling all prompts in full steps, then decoding with half of the output on average.
    prefill = least_seconds(context, shape, tokens=per_step, rows=1, kept=0)
    decode = least_seconds(context, shape, tokens=n_requests, rows=n_requests, kept=prompt + tokens / 2)
    least = prefill and decode and prefill * n_requests * prompt / per_step + decode * tokens
    cut = "" if events == total else f"cut at {events} of {total} tokens; "
    yield Finding(
        what=f"{n_requests} x {prompt} in, {tokens} out",
        value=events / seconds,
        unit="tokens/s out",
        share=None if cut else least and least / seconds,
        note=f"{cut}{seconds:.1f} s; {counts}",
    )
    yield Finding(what="as many tokens as requests after", value=first, unit="s")
