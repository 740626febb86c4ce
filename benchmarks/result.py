"""Result of a load run: table rows for people, one JSON line for programs."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.statistics import Level

TABLE_HEAD = (
    "streams  requests  errors  tokens/s  requests/s  first token p50/p99 ms  inter-token p50/p99 ms\n"
    "-------  --------  ------  --------  ----------  ----------------------  ----------------------"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine the load ran on, which is the server's too unless --allow-remote was given."""

    cpu: str
    cores: int
    python: str
    system: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Grows by a level at a time: each step is a new object."""

    date: str
    url: str
    machine: Machine
    server: Any
    """What GET /v1/models answered; None if that was not JSON."""
    settings: dict[str, Any]
    levels: tuple[Level, ...] = ()
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether any request failed, or a level ended with nothing finished."""
        return any(level.errors or not level.completed for level in self.levels)


def this_machine() -> Machine:
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def row(level: Level) -> str:
    first, inter = level.first_token_ms, level.inter_token_ms
    text = (
        f"{level.streams:7}  {level.requests:8}  {level.errors:6}  {level.output_tokens_per_second:8.1f}"
        f"  {level.requests_per_second:10.2f}  {_pair(first.p50, first.p99):>22}  {_pair(inter.p50, inter.p99):>22}"
    )
    if level.unfinished:
        text += f"\n         {level.unfinished} unfinished when the level was stopped after {level.seconds:.1f} s"
    if level.first_error is not None:
        text += f"\n         first error: {level.first_error}"
    return text


def json_line(result: LoadResult) -> str:
    return msgspec.json.encode({"benchmark": "load", **msgspec.to_builtins(result)}).decode()


def _pair(p50: float | None, p99: float | None) -> str:
    return "- / -" if p50 is None or p99 is None else f"{p50:.2f} / {p99:.2f}"


def _cpu_model() -> str:
    """Linux says it in /proc/cpuinfo; elsewhere Python knows a coarser name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
