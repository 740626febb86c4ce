"""Shared helpers: percentiles, ranges, alternation, facts about the machine, the last line of output."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from model.command_line import OneLineParser

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine a benchmark ran on."""

    cpu: str
    cores: int
    python: str
    system: str


def this_machine() -> Machine:
    return Machine(
        cpu=_cpu_model(),
        cores=available_cores(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    """CPU model from /proc/cpuinfo on Linux, else Python's coarser name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def command_line(name: str, doc: str | None) -> OneLineParser:
    """The parser of a benchmark's flags, described by the first line of its module's docstring."""
    return OneLineParser(prog=f"python -m benchmarks.{name}", description=(doc or "").partition("\n")[0])


def now_text() -> str:
    """Date and time, for results."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def json_line(benchmark: str, **result: object) -> str:
    """The last line of a benchmark's output: one JSON object."""
    return msgspec.json.encode({"benchmark": benchmark, **result}).decode()


def print_result(benchmark: str, **result: object) -> None:
    """Prints the last line of a benchmark's output, with date and machine."""
    print(json_line(benchmark, date=now_text(), machine=this_machine(), **result), flush=True)


def alternate(measurements: Mapping[str, Callable[[], T]], rounds: int) -> list[dict[str, T]]:
    """Takes each measurement once per round, in rotating order; discards the first round.

    So a slow moment of the machine affects all of them, and the first round warms them up.
    """
    names = list(measurements)
    results = [{name: measurements[name]() for name in in_turn(names, number)} for number in range(rounds + 1)]
    return results[1:]


def in_turn(names: Sequence[str], number: int) -> Sequence[str]:
    """The order of a round: each round begins with another one."""
    first = number % len(names)
    return (*names[first:], *names[:first])


def median_of(rounds: Sequence[Mapping[str, float]], name: str, by: str = "") -> float:
    """Median of one measurement over the rounds, or of its ratios to another one, round by round."""
    return statistics.median(round_[name] / (round_[by] if by else 1) for round_ in rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Summary of samples."""

    median: float
    least: float
    most: float


def range_of(samples: Sequence[float]) -> Range:
    """Summarizes at least one sample."""
    return Range(median=statistics.median(samples), least=min(samples), most=max(samples))


def percentile(values: Sequence[float], percent: int) -> float:
    """Linearly interpolated (numpy's default; Hyndman and Fan, type 7)."""
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Milliseconds; None if nothing was measured."""

    p50: float | None
    p99: float | None

    def __str__(self) -> str:
        return "- / -" if self.p50 is None or self.p99 is None else f"{self.p50:.2f} / {self.p99:.2f}"


def percentiles_ms(seconds: Sequence[float]) -> Percentiles:
    """Of seconds in any order."""
    if not seconds:
        return Percentiles(p50=None, p99=None)
    return Percentiles(p50=percentile(seconds, 50) * 1000, p99=percentile(seconds, 99) * 1000)
