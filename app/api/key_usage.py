"""Metrics of each API key's completions, with a bounded number of labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

MAX_LABELS = 100
"""Keys with series of their own, in the order of the keys file: a scrape renders three series for each."""
OTHERS = "(other)"
"""Label of all other keys, also of removed ones whose completions end later. No key can have this name."""
_FAMILIES = (
    ("requests", "Finished completions, by the name of the API key."),
    ("prompt_tokens", "Prompt tokens, by the name of the API key."),
    ("generation_tokens", "Generated tokens, by the name of the API key."),
)


def visible_to(name: str, page: bytes) -> bytes:
    """The page of metrics without the series of keys other than `name`."""
    own = f'{{key="{name}"}}'.encode()
    lines = page.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(b"inkstream_key_") or own in line)


class KeyUsage(Collector):
    """Counts by the names in the keys file; a key that was removed from it loses its series."""

    def __init__(self, names: Callable[[], Sequence[str]]) -> None:
        """`names` returns the names of the current keys. Without keys all completions count for an empty name."""
        self._names = names
        self._counts: dict[str, list[int]] = {}

    def record(self, name: str, prompt_tokens: int, generation_tokens: int) -> None:
        """Counts a finished completion of the key with this name."""
        counts = self._counts.setdefault(name if name in self._labels() else OTHERS, [0, 0, 0])
        for index, count in enumerate((1, prompt_tokens, generation_tokens)):
            counts[index] += count

    def collect(self) -> Iterator[Metric]:
        names = self._names()
        labels = [*self._labels(), *([OTHERS] if OTHERS in self._counts or len(names) > MAX_LABELS else [])]
        self._counts = {label: self._counts.get(label, [0, 0, 0]) for label in labels}
        for index, (name, help_text) in enumerate(_FAMILIES):
            family = CounterMetricFamily(f"inkstream_key_{name}", help_text, labels=["key"])
            for label, counts in self._counts.items():
                family.add_metric([label], counts[index])
            yield family

    def _labels(self) -> Sequence[str]:
        return self._names()[:MAX_LABELS] or [""]
