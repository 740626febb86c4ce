"""Metrics of several services as one page: each sample gets a label that says whose it is. Knows no metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
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


def merged(pages: Mapping[str, str], own: CollectorRegistry) -> bytes:
    """pages: Prometheus text by the name of the replica. own: what the front counts."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Pages(pages))
    return generate_latest(registry) + generate_latest(own)
