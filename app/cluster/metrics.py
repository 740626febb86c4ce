"""Merges the metrics of several replicas; adds a label with the replica to each sample."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from prometheus_client import CollectorRegistry, Gauge, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Pages(Collector):
    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for server, page in sorted(self._pages.items()):
            for family in text_string_to_metric_families(page):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [s._replace(labels={**s.labels, "server": server}) for s in family.samples]
        return families.values()


class Presence:
    """Tracks which replicas answered the last broadcast, and which did only earlier."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._silent = Gauge(
            "inkstream_relay_silent_replicas",
            "Replicas that did not answer in time.",
            registry=registry,
        )
        self._answers = Gauge(
            "inkstream_relay_replica_answers",
            "1 where the replica answered with the others, 0 where it did only before.",
            ["server"],
            registry=registry,
        )
        self._known: set[str] = set()

    def note(self, names: Collection[str], silent: int) -> None:
        """Records the replicas that answered and the number that did not; if all did, forgets earlier ones."""
        self._known = self._known.union(names) if silent else set(names)
        self._silent.set(silent)
        self._answers.clear()
        for name in self._known:
            self._answers.labels(name).set(name in names)


def merged(pages: Mapping[str, str], own: CollectorRegistry) -> bytes:
    """pages: Prometheus text by replica name. own: the gateway's metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Pages(pages))
    return generate_latest(registry) + generate_latest(own)
