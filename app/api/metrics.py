"""Prometheus metrics of one service and of its engines."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from app.common import logs
from app.engine_client.client import EngineClient
from app.engine_client.engine_pool import EnginePool
from app.generation.session import GenerationSession
from app.http.connection_limits import ConnectionLimits


class EngineState(Collector):
    """Collects the state of the engine clients on each scrape."""

    def __init__(self, fleets: Callable[[], Sequence[EnginePool]]) -> None:
        """`fleets` gives the one that serves now, and behind it those that end."""
        self._fleets = fleets

    def collect(self) -> Iterator[Metric]:
        fleets = self._fleets()
        engines = fleets[0].engines
        yield _gauge("event_loop_tasks", "Tasks of the event loop, this scrape's own too.", len(asyncio.all_tasks()))
        everywhere = [engine.counters for fleet in fleets for engine in fleet.engines]
        yield _gauge("requests_running", "Texts being computed, n of a request.", sum(c.running for c in everywhere))
        yield _gauge("requests_waiting", "Texts in the queue, n of a request.", sum(c.waiting for c in everywhere))
        yield _gauge("kv_cache_usage_ratio", "Share of the cache blocks in use.", _used(engines))
        yield _gauge("engine_ready", "1 when an engine is ready.", bool(fleets[0].ready))
        yield from _health(engines)
        if len(engines) > 1:
            yield from _by_replica(engines)


def _health(engines: Sequence[EngineClient]) -> Iterator[Metric]:
    """Ages are the largest among engines that have not failed permanently; everything else is a sum."""
    watched = [e.supervisor for e in engines if not e.supervisor.is_stopped] or [e.supervisor for e in engines]
    yield _gauge(
        "engine_report_age_seconds", "Since the engine was heard of last.", max(one.report_age for one in watched)
    )
    yield _gauge(
        "engine_progress_age_seconds",
        "Since the engine's last step that did anything; 0 where it has nothing to do.",
        max(one.progress_age for one in watched),
    )
    yield _gauge("requests_suspect", "In flight in a crash, and not gone on since.", sum(e.n_suspects for e in engines))
    yield _counter("replayed_requests", "Requests that went on with the next engine.", sum(e.replayed for e in engines))
    yield _counter("held_streams", "Times that a stream waited for its reader.", sum(e.n_suspensions for e in engines))
    cumulative = [engine.cumulative_counters for engine in engines]
    yield _counter("preemptions", "Sequences that gave way.", sum(c.preemptions for c in cumulative))
    violations = sum(c.block_violations for c in cumulative)
    yield _counter("block_violations", "Looks at the cache's blocks that found one amiss.", violations)
    yield _starts(engines)
    yield _counter("engine_restarts", "Engine processes that ended.", sum(e.supervisor.restarts for e in engines))


def _starts(engines: Sequence[EngineClient]) -> Metric:
    """One series per startup phase: the slowest engine's time."""
    seconds: dict[str, float] = {}
    for engine in engines:
        for phase, took in engine.supervisor.start_seconds.items():
            seconds[phase] = max(took, seconds.get(phase, 0.0))
    text = "What the last start of an engine took, by phase."
    metric = GaugeMetricFamily("inkstream_engine_start_seconds", text, labels=["phase"])
    for phase, took in seconds.items():
        metric.add_metric([phase.replace(" ", "_")], took)
    return metric


def _by_replica(engines: Sequence[EngineClient]) -> Iterator[Metric]:
    """One series per engine, from startup on."""
    ready = _labelled("ready", "1 when this engine is ready.")
    running = _labelled("requests_running", "Texts that this engine computes.")
    waiting = _labelled("requests_waiting", "Texts in the queue of this engine.")
    usage = _labelled("kv_cache_usage_ratio", "Share of this engine's cache blocks in use.")
    for place, engine in enumerate(engines):
        label = [str(place)]
        ready.add_metric(label, float(bool(engine.ready)))
        running.add_metric(label, engine.counters.running)
        waiting.add_metric(label, engine.counters.waiting)
        usage.add_metric(label, _used([engine]))
    yield from (ready, running, waiting, usage)


def _used(engines: Sequence[EngineClient]) -> float:
    total = sum(engine.counters.blocks_total for engine in engines)
    return sum(engine.counters.blocks_active for engine in engines) / total if total else 0.0


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"inkstream_{name}", text, float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"inkstream_{name}", text, value)


def _labelled(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"inkstream_replica_{name}", text, labels=["replica"])


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LAG_PAUSE = 0.1
_FAST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_SLOW = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The metrics of one service, in a registry of its own, so that two services in one process do not collide."""

    def __init__(self, fleets: Callable[[], Sequence[EnginePool]], connections: ConnectionLimits) -> None:
        """`fleets` gives the one that serves now, and behind it those that end."""
        self._registry = CollectorRegistry()
        self._gaps = _Gaps()
        self._registry.register(self._gaps)
        self._registry.register(EngineState(fleets))
        self._registry.register(_ConnectionState(connections))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"inkstream_{name}", text, buckets=buckets, registry=self._registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"inkstream_{name}", text, labels, registry=self._registry)

        self._first_token = histogram("time_to_first_token_seconds", "Request submitted to first token.", _SLOW)
        self._duration = histogram("request_duration_seconds", "Request submitted to its end.", _SLOW)
        self._queue = histogram("queue_duration_seconds", "Request submitted to its first step.", _SLOW)
        self._prefill = histogram("prefill_duration_seconds", "First step to first token.", _SLOW)
        self._lag = histogram("event_loop_lag_seconds", "How late the event loop serves a timer.", _FAST)
        self._prompt_tokens = counter("prompt_tokens_total", "Tokens of prompts.")
        self._generation_tokens = counter("generation_tokens_total", "Tokens generated.")
        self._cached_tokens = counter("cached_prompt_tokens_total", "Prompt tokens found in the prefix cache.")
        self._requests = counter("requests_total", "Requests that ended.", ("finish_reason",))
        self._rejected = counter("rejected_total", "Requests that were refused.", ("reason",))
        self._reloads = counter("weights_reloads_total", "New weights that were loaded while serving.", ("outcome",))
        for outcome in ("switched", "refused"):
            self._reloads.labels(outcome)

    async def watch_loop(self) -> None:
        """Measures the event loop's lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_PAUSE
            await asyncio.sleep(_LAG_PAUSE)
            self._lag.observe(max(0.0, loop.time() - due))

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def rejected(self, reason: str) -> None:
        """Counts a refused request; `reason` is one of a few fixed words."""
        self._rejected.labels(reason).inc()

    def reloaded(self, outcome: Literal["switched", "refused"]) -> None:
        """Counts a hot reload by outcome."""
        self._reloads.labels(outcome).inc()

    def progressed(self, completion: GenerationSession) -> None:
        """Records inter-token latencies, so that long streams are visible while they run."""
        if completion.inter_token_latencies:
            self._gaps.add(completion.inter_token_latencies)
            completion.inter_token_latencies.clear()

    def ended(self, completion: GenerationSession, finish_reason: str, duration: float) -> None:
        """Records a finished request; `finish_reason` is one of a few fixed words."""
        self.progressed(completion)
        clock = completion.times
        self._requests.labels(finish_reason).inc()
        self._duration.observe(duration)
        if clock.started is not None:
            self._prompt_tokens.inc(completion.prompt_tokens)
        self._generation_tokens.inc(completion.n_tokens)
        self._cached_tokens.inc(completion.cached_tokens)
        if clock.started is not None:
            self._queue.observe(clock.started - clock.submitted)
        if clock.first_token is not None and completion.n_tokens:
            self._first_token.observe(clock.first_token - clock.submitted)
            if clock.started is not None:
                self._prefill.observe(clock.first_token - clock.started)


class _Gaps(Collector):
    """A histogram four times as fast as prometheus_client's own: it observes every token."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_FAST) + 1)
        self._sum = 0.0

    def add(self, gaps: Iterable[float]) -> None:
        for gap in gaps:
            self._counts[bisect_left(_FAST, gap)] += 1
            self._sum += gap

    def collect(self) -> Iterator[Metric]:
        names = [*map(str, _FAST), "+Inf"]
        yield HistogramMetricFamily(
            "inkstream_inter_token_latency_seconds",
            "Between two tokens of a request.",
            buckets=list(zip(names, accumulate(self._counts), strict=True)),
            sum_value=self._sum,
        )


class _ConnectionState(Collector):
    """Collects the number of connections and of dropped log lines on each scrape."""

    def __init__(self, connections: ConnectionLimits) -> None:
        self._connections = connections

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("inkstream_connections", "Connections there are.", self._connections.count)
        cut = CounterMetricFamily("inkstream_connections_cut", "Connections refused or cut.", labels=["reason"])
        for reason, count in self._connections.cut.items():
            cut.add_metric([reason], count)
        yield cut
        yield CounterMetricFamily(
            "inkstream_log_lines_dropped", "Lines of the log that were not read as fast as written.", logs.dropped()
        )
