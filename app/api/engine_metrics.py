"""What the engines say of themselves, as Prometheus metrics, at each scrape: sums, and each engine by its number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.engine_client.client import EngineClient
from app.engine_client.engine_pool import EnginePool


class EngineState(Collector):
    """Reads the engines' clients when somebody scrapes."""

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
    """Ages are those of the worst engine that is not given up, all else is a sum."""
    watched = [e.supervisor for e in engines if not e.supervisor.is_gone] or [e.supervisor for e in engines]
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
    yield _counter("held_streams", "Times that a stream waited for its reader.", sum(e.n_holds for e in engines))
    lasting = [engine.lasting for engine in engines]
    yield _counter("preemptions", "Sequences that gave way.", sum(c.preemptions for c in lasting))
    violations = sum(c.block_violations for c in lasting)
    yield _counter("block_violations", "Looks at the cache's blocks that found one amiss.", violations)
    yield _starts(engines)
    yield _counter("engine_restarts", "Engine processes that ended.", sum(e.supervisor.restarts for e in engines))


def _starts(engines: Sequence[EngineClient]) -> Metric:
    """There are as many series as an engine's start has phases; of several engines the slowest in each counts."""
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
    """There are as many series as engines, from the start on."""
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
