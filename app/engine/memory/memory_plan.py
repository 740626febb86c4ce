"""Where a GPU's memory goes, before the cache takes its part: sums, and a table for the log. Pure.

total
+-- share (--gpu-memory-utilization) ------------------------------+-- left free --+
| weights | activations of the largest step | graphs | cache       |               |
+-- less where other processes, and CUDA itself, hold more than what is left free -+
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

_SPARE_SHARE = 64
"""A 64th of the memory is nobody's: kernels are loaded when they are first used, and torch leaves gaps."""


class PlanRow(NamedTuple):
    """A line of the table."""

    what: str
    size: int | None
    """Bytes; None: not measured."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one GPU."""

    total: int
    utilization: float
    """Share of all memory that the service may take, 0 to 1."""
    weights: int
    activations: int
    """Most that a step takes for itself, measured."""
    graphs: int = 0
    """Kept for captured steps."""
    other: int = 0
    """CUDA's own part and other processes."""
    cache: int = 0
    """Taken for keys and values in the end."""

    @property
    def share(self) -> int:
        """What the service may take."""
        return int(self.total * self.utilization)

    @property
    def limit(self) -> int:
        """What it can take: others may hold a part of its share."""
        return max(0, min(self.share, self.total - self.other - self.total // _SPARE_SHARE))

    @property
    def needed(self) -> int:
        """What it takes before the cache."""
        return self.weights + self.activations + self.graphs

    @property
    def cache_room(self) -> int:
        """What is left for the cache."""
        return max(0, self.limit - self.needed)

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """The plan as people read it."""
        return (
            PlanRow("GPU memory", self.total),
            PlanRow("CUDA, other processes", self.other),
            PlanRow("may be taken", self.limit, f"--gpu-memory-utilization {self.utilization:g}"),
            PlanRow("weights", self.weights),
            PlanRow("activations", self.activations, "measured at the largest step"),
            PlanRow("graphs", self.graphs, "kept for captured steps"),
            PlanRow("cache", self.cache),
            PlanRow("not taken", self.limit - self.needed - self.cache),
        )

    def refusal(self) -> str:
        """What is left and why, for whoever asked for more."""
        taken = f"{mib(self.weights)} of weights, {mib(self.activations)} of activations, {mib(self.graphs)} of graphs"
        held = f"; {mib(self.other)} are taken by others" if self.limit < self.share else ""
        source = f"--gpu-memory-utilization {self.utilization:g} of {mib(self.total)}{held}"
        return f"{mib(self.cache_room)} are left of {mib(self.limit)} ({source}) after {taken}"

    def utilization_for(self, cache: int) -> float | None:
        """The least --gpu-memory-utilization, in hundredths, that has room for such a cache; None: none has."""
        for hundredths in range(1, 101):
            if replace(self, utilization=hundredths / 100).cache_room >= max(1, cache):
                return hundredths / 100
        return None


def host_rows(*, free: int, weights: int, cache: int) -> tuple[PlanRow, ...]:
    """The plan of a CPU: what is known before the first step."""
    return (
        PlanRow("free memory", free),
        PlanRow("weights", weights, "loaded already"),
        PlanRow("activations", None),
        PlanRow("cache", cache, "at most half of the free memory"),
    )


def table(rows: Sequence[PlanRow]) -> list[str]:
    """One line for each row, in columns."""
    names, sizes = max(len(row.what) for row in rows), [mib(row.size) for row in rows]
    width = max(map(len, sizes))
    notes = [f" ({row.note})" if row.note else "" for row in rows]
    return [f"{row.what:<{names}}  {size:>{width}}{note}" for row, size, note in zip(rows, sizes, notes, strict=True)]


def mib(size: int | None) -> str:
    """Bytes for people, whole MiB; a GPU has ten thousands of them."""
    return "not measured" if size is None else f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size >> 10} KiB"
