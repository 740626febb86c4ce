"""Prometheus metrics of one service and of its engines."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from app.api.key_usage import KeyUsage
from app.common import logs
from app.common.time_budget import TimeBudget
from app.common.time_slice import TimeSlice
from app.common.version import VERSION
from app.engine_client.engine_pool import EnginePool
from app.engine_client.replica import Replica
from app.generation.completion import Completion
from app.http.connection_limits import ConnectionLimits


class EngineState(Collector):
    """Collects the state of the engine clients on each scrape."""

    def __init__(self, pools: Callable[[], Sequence[EnginePool]]) -> None:
        """`pools` returns the current engine pool, followed by those that are shutting down."""
        self._pools = pools
        self._pid = 0
        self._process = ProcessCollector("inkstream_engine", lambda: self._pid, registry=None)
        self._versions = {"version": VERSION, "python": platform.python_version(), "torch": _installed("torch")}

    def collect(self) -> Iterator[Metric]:
        pools = self._pools()
        engines = pools[0].engines
        yield _gauge("event_loop_tasks", "Tasks of the event loop, including this scrape's.", len(asyncio.all_tasks()))
        counters = [engine.counters for pool in pools for engine in pool.engines]
        waiting = sum(pool.queue.n_unsent for pool in pools) + sum(c.waiting for c in counters)
        yield _gauge(
            "requests_running", "Sequences being generated; a request has n of them.", sum(c.running for c in counters)
        )
        yield _gauge("requests_waiting", "Sequences in the queue; a request has n of them.", waiting)
        yield _gauge("kv_cache_usage_ratio", "Fraction of the KV cache blocks in use.", _cache_usage(engines))
        yield _gauge("engine_ready", "1 if an engine is ready.", bool(pools[0].ready))
        yield from _capacity(pools[0])
        yield from _health(pools[0])
        yield self._build_info(pools[0])
        yield from self._processes(engines)
        if len(engines) > 1:
            yield from _by_replica(engines)

    def _build_info(self, pool: EnginePool) -> Metric:
        numerics = pool.ready.numerics if pool.ready else ""
        labels = {**self._versions, "numerics": numerics}
        return InfoMetricFamily("inkstream_build", "Versions, and the numerics of the loaded engine.", labels)

    def _processes(self, engines: Sequence[Replica]) -> Iterator[Metric]:
        """CPU time and memory of each engine process; nothing where the system has no /proc."""
        replica = ["replica"]
        cpu = CounterMetricFamily(
            "inkstream_engine_process_cpu_seconds", "CPU time of the engine process.", labels=replica
        )
        memory = GaugeMetricFamily(
            "inkstream_engine_process_resident_memory_bytes", "Resident memory of the engine process.", labels=replica
        )
        for index, engine in enumerate(engines):
            self._pid = engine.supervisor.pid or 0
            for read in self._process.collect() if self._pid else ():
                for labelled in (cpu, memory):
                    if read.name == labelled.name:
                        labelled.add_metric([str(index)], read.samples[0].value)
        yield from (cpu, memory)


def _installed(package: str) -> str:
    """Version of an installed package; empty if it is not installed. The API process does not import torch."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return ""


def _capacity(pool: EnginePool) -> Iterator[Metric]:
    """Limits of the gauges above. An engine that will not be restarted has no capacity."""
    slots = sum(engine.max_running for engine in pool.engines if not engine.supervisor.is_stopped)
    totals = [engine.counters for engine in pool.engines]
    yield _gauge("requests_running_limit", "Most sequences that the engines generate at once.", slots)
    yield _gauge("load_ratio", "Sequences running and waiting, of those that can run at once.", _load(pool, slots))
    yield _gauge("requests_waiting_limit", "Most sequences in the queue; more get 503.", pool.queue.max_requests)
    yield _gauge("prompt_tokens_waiting", "Prompt tokens in the queue.", pool.queue.prompt_tokens)
    limit = pool.queue.max_prompt_tokens
    yield _gauge("prompt_tokens_waiting_limit", "Most prompt tokens in the queue; more get 503.", limit)
    yield _gauge("kv_cache_blocks_used", "KV cache blocks in use.", sum(c.blocks_active for c in totals))
    yield _gauge("kv_cache_blocks", "KV cache blocks of all engines.", sum(c.blocks_total for c in totals))


def _load(pool: EnginePool, slots: int) -> float:
    """Above 1 there is a queue: proportional to the work, unlike CPU time or the queue alone, so autoscalers use it."""
    counters = [engine.counters for engine in pool.engines]
    count = pool.queue.n_unsent + sum(one.running + one.waiting for one in counters)
    return count / slots if slots else float(count > 0)


def _health(pool: EnginePool) -> Iterator[Metric]:
    """Ages are the largest among engines that have not failed permanently; everything else is a sum."""
    engines = pool.engines
    supervisors = [e.supervisor for e in engines if not e.supervisor.is_stopped] or [e.supervisor for e in engines]
    yield _gauge(
        "engine_report_age_seconds",
        "Seconds since the engine's last report.",
        max(one.report_age for one in supervisors),
    )
    yield _gauge(
        "engine_progress_age_seconds",
        "Seconds since the engine's last step with work; 0 while it is idle.",
        max(one.progress_age for one in supervisors),
    )
    yield _gauge(
        "requests_suspect",
        "Requests that were in flight in an engine crash and have not continued since.",
        sum(e.n_suspects for e in engines),
    )
    yield _counter(
        "replayed_requests", "Requests that continued on a restarted engine.", sum(e.replayed for e in engines)
    )
    yield _counter(
        "held_streams",
        "Times that a stream was suspended because its client did not read.",
        pool.n_suspensions,
    )
    totals = [engine.cumulative_counters for engine in engines]
    yield _counter("preemptions", "Sequences that were preempted.", sum(c.preemptions for c in totals))
    yield _counter("spec_drafted", "Draft tokens that steps have verified.", sum(c.drafted for c in totals))
    yield _counter("spec_accepted", "Draft tokens that were accepted.", sum(c.accepted for c in totals))
    violations = sum(c.block_violations for c in totals)
    yield _counter("block_violations", "Leak checks of the KV cache blocks that found a violation.", violations)
    yield _starts(engines)
    yield _counter("engine_restarts", "Engine processes that exited.", sum(e.supervisor.restarts for e in engines))


def _starts(engines: Sequence[Replica]) -> Metric:
    """One series per startup phase: the slowest engine's time."""
    seconds: dict[str, float] = {}
    for engine in engines:
        for phase, seconds_taken in engine.supervisor.start_seconds.items():
            seconds[phase] = max(seconds_taken, seconds.get(phase, 0.0))
    help_text = "Duration of an engine's last startup, by phase."
    metric = GaugeMetricFamily("inkstream_engine_start_seconds", help_text, labels=["phase"])
    for phase, seconds_taken in seconds.items():
        metric.add_metric([phase.replace(" ", "_")], seconds_taken)
    return metric


def _by_replica(engines: Sequence[Replica]) -> Iterator[Metric]:
    """One series per engine, from startup on."""
    ready = _labelled("ready", "1 if this engine is ready.")
    running = _labelled("requests_running", "Sequences that this engine is generating.")
    waiting = _labelled("requests_waiting", "Sequences that this engine has and is not generating.")
    usage = _labelled("kv_cache_usage_ratio", "Fraction of this engine's KV cache blocks in use.")
    for index, engine in enumerate(engines):
        label = [str(index)]
        ready.add_metric(label, float(bool(engine.ready)))
        running.add_metric(label, engine.counters.running)
        waiting.add_metric(label, engine.counters.waiting)
        usage.add_metric(label, _cache_usage([engine]))
    yield from (ready, running, waiting, usage)


def _cache_usage(engines: Sequence[Replica]) -> float:
    total = sum(engine.counters.blocks_total for engine in engines)
    return sum(engine.counters.blocks_active for engine in engines) / total if total else 0.0


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"inkstream_{name}", help_text, float(value))


def _counter(name: str, help_text: str, value: float) -> Metric:
    return CounterMetricFamily(f"inkstream_{name}", help_text, value)


def _labelled(name: str, help_text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"inkstream_replica_{name}", help_text, labels=["replica"])


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Unless the scraper asks for OpenMetrics."""
_OPENMETRICS_END = b"# EOF\n"
_LAG_INTERVAL_SECONDS = 0.1
RENDER_SHARE = 0.05
"""Of the event loop's time, for /metrics."""
RENDER_RESERVE_SECONDS = 0.1
_FAST_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_SLOW_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The metrics of one service, in their own registry, so that two services in one process do not collide."""

    def __init__(
        self,
        pools: Callable[[], Sequence[EnginePool]],
        connections: ConnectionLimits,
        key_names: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`pools` returns the current engine pool, followed by those that are shutting down; `key_names` the keys'."""
        self._registry = CollectorRegistry()
        budget, turn = TimeBudget(RENDER_SHARE, RENDER_RESERVE_SECONDS), asyncio.Lock()
        self._prometheus = SharedRendering(partial(rendered_families, self._registry, generate_latest), budget, turn)
        self._openmetrics = SharedRendering(partial(_openmetrics_texts, self._registry), budget, turn)
        self._gaps = _InterTokenLatency()
        self._registry.register(self._gaps)
        self._key_usage = KeyUsage(key_names)
        self._registry.register(self._key_usage)
        self._registry.register(EngineState(pools))
        self._registry.register(_ConnectionState(connections))
        ProcessCollector(registry=self._registry)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"inkstream_{name}", help_text, buckets=buckets, registry=self._registry)

        def counter(name: str, help_text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"inkstream_{name}", help_text, labels, registry=self._registry)

        self._first_token = histogram("time_to_first_token_seconds", "Request submitted to first token.", _SLOW_BUCKETS)
        self._duration = histogram("request_duration_seconds", "Request submitted to its end.", _SLOW_BUCKETS)
        self._queue = histogram("queue_duration_seconds", "Request submitted to its first step.", _SLOW_BUCKETS)
        self._prefill = histogram("prefill_duration_seconds", "First step to first token.", _SLOW_BUCKETS)
        self._lag = histogram("event_loop_lag_seconds", "Delay of a timer of the event loop.", _FAST_BUCKETS)
        self._prompt_tokens = counter("prompt_tokens_total", "Prompt tokens.")
        self._generation_tokens = counter("generation_tokens_total", "Generated tokens.")
        self._cached_tokens = counter("cached_prompt_tokens_total", "Prompt tokens found in the prefix cache.")
        self._requests = counter("requests_total", "Finished requests.", ("finish_reason",))
        self._rejected = counter("rejected_total", "Rejected requests.", ("reason",))
        self._reloads = counter("weights_reloads_total", "Hot reloads of the weights.", ("outcome",))
        # A series that appears with its first event has no rate before the second one.
        for metric, words in (
            (self._requests, ("stop", "length", "timeout", "cancelled", "disconnected", "error")),
            (self._rejected, ("queue_full", "quota", "not_ready", "busy", "failed", "invalid")),
            (self._reloads, ("switched", "refused")),
        ):
            for word in words:
                metric.labels(word)

    async def watch_loop(self) -> None:
        """Measures the event loop's lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_INTERVAL_SECONDS
            await asyncio.sleep(_LAG_INTERVAL_SECONDS)
            self._lag.observe(max(0.0, loop.time() - due))

    async def page(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics and their content type: OpenMetrics if `accept` asks for it, else Prometheus' text format."""
        if "application/openmetrics-text" in accept:
            return await self._openmetrics.text(), openmetrics.CONTENT_TYPE_LATEST
        return await self._prometheus.text(), CONTENT_TYPE

    def record_rejected(self, reason: str) -> None:
        """Counts a rejected request; `reason` is one of a few fixed words."""
        self._rejected.labels(reason).inc()

    def record_reload(self, outcome: Literal["switched", "refused"]) -> None:
        """Counts a hot reload by outcome."""
        self._reloads.labels(outcome).inc()

    def record_progress(self, completion: Completion) -> None:
        """Records inter-token latencies, so that long streams are visible while they run."""
        self._gaps.add(completion.inter_token_latencies)
        completion.inter_token_latencies.clear()

    def record_finished(
        self, completion: Completion, finish_reason: str, duration: float, exemplar: dict[str, str] | None, key: str
    ) -> None:
        """Records a finished request of the API key with the name `key`.

        `finish_reason` is one of a few fixed words, `exemplar` points to its trace.
        """
        self._key_usage.record(
            key, 0 if completion.times.started is None else completion.prompt_tokens, completion.n_sampled
        )
        self.record_progress(completion)
        clock = completion.times
        self._requests.labels(finish_reason).inc()
        self._duration.observe(duration, exemplar)
        if clock.started is not None:
            self._prompt_tokens.inc(completion.prompt_tokens)
        self._generation_tokens.inc(completion.n_sampled)
        self._cached_tokens.inc(completion.cached_tokens)
        if clock.started is not None:
            self._queue.observe(clock.started - clock.submitted, exemplar)
        if clock.first_token is not None and completion.n_tokens:
            self._first_token.observe(clock.first_token - clock.submitted, exemplar)
            if clock.started is not None:
                self._prefill.observe(clock.first_token - clock.started, exemplar)


class SharedRendering:
    """Renders one text for all requests that arrive before the rendering begins, within a budget of time.

    No request gets a text that was begun before it: it waits until the budget allows another rendering, which takes 3
    ms on an idle machine and 20 ms on a busy one. No quota limits these requests.
    """

    def __init__(self, parts: Callable[[], Iterator[bytes]], budget: TimeBudget, turn: asyncio.Lock) -> None:
        """`parts` renders the text piece by piece. `turn`: of all texts that share the budget."""
        self._parts, self._budget, self._turn = parts, budget, turn
        self._next: asyncio.Task[bytes] | None = None
        """The rendering that has not begun."""

    async def text(self) -> bytes:
        """The text at a time after this call."""
        if self._next is None:
            self._next = asyncio.create_task(self._render())
        return await asyncio.shield(self._next)  # others may wait for it, too

    async def _render(self) -> bytes:
        async with self._turn:
            await asyncio.sleep(self._budget.wait_seconds)
            self._next = None
            parts, time_slice = list[bytes](), TimeSlice()
            began = time.monotonic()
            for part in self._parts():
                parts.append(part)
                if time_slice.is_due:
                    self._budget.spend(time.monotonic() - began)
                    await time_slice.pause_if_due()
                    began = time.monotonic()
            self._budget.spend(time.monotonic() - began)
            return b"".join(parts)


class _Family(Collector):
    """A registry of one metric: prometheus_client renders whole registries."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def rendered_families(registry: CollectorRegistry, render: Callable[[Collector], bytes]) -> Iterator[bytes]:
    """The text of a registry, one metric at a time."""
    return (render(_Family(metric)) for metric in registry.collect())


def _openmetrics_texts(registry: CollectorRegistry) -> Iterator[bytes]:
    for text in rendered_families(registry, openmetrics.generate_latest):
        yield text.removesuffix(_OPENMETRICS_END)
    yield _OPENMETRICS_END


class _InterTokenLatency(Collector):
    """Histogram four times as fast as prometheus_client's, because it observes every token."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_FAST_BUCKETS) + 1)
        self._sum = 0.0

    def add(self, gaps: Iterable[float]) -> None:
        for gap in gaps:
            self._counts[bisect_left(_FAST_BUCKETS, gap)] += 1
            self._sum += gap

    def collect(self) -> Iterator[Metric]:
        names = [*map(str, _FAST_BUCKETS), "+Inf"]
        yield HistogramMetricFamily(
            "inkstream_inter_token_latency_seconds",
            "Time between two tokens of a request.",
            buckets=list(zip(names, accumulate(self._counts), strict=True)),
            sum_value=self._sum,
        )


class _ConnectionState(Collector):
    """Collects the number of connections, HTTP requests and dropped log lines on each scrape."""

    def __init__(self, connections: ConnectionLimits) -> None:
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        yield _gauge("connections", "Open connections.", self._connections.count)
        yield _gauge("connections_limit", "Most open connections; more get 503.", self._connections.limits.connections)
        requests = CounterMetricFamily(
            "inkstream_http_requests",
            "Finished HTTP requests; the route is none for unknown paths and for requests rejected before routing.",
            labels=["method", "route", "status"],
        )
        for (method, route, status), count in self._connections.requests.items():
            requests.add_metric([method, route, str(status)], count)
        yield requests
        cut = CounterMetricFamily(
            "inkstream_connections_cut", "Connections that were rejected or aborted.", labels=["reason"]
        )
        for reason, count in self._connections.cut_by_reason.items():
            cut.add_metric([reason], count)
        yield cut
        dropped = "Log lines dropped because they were not read as fast as they were written."
        yield _counter("log_lines_dropped", dropped, logs.dropped())
