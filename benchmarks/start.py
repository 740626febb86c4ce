"""Startup time of the service: `python -m benchmarks.start [--starts N] [--kernels native,torch]`.

Seconds from the start of the process until /health/live answers, until /health/ready answers with 200, and until the
first token of the first request arrives. Kinds of kernels alternate; medians and ranges. Native kernels should be in
the cache (`inkstream compile`); otherwise an uncounted first start builds them. The last line of stdout is one JSON
object. Exit status: 0; 1 if the service does not start or does not answer.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.completion_client import CompletionRequest, Failed, complete
from benchmarks.http_client import Connection, ProtocolError, error_text
from benchmarks.machine_info import this_machine
from benchmarks.service_process import ServiceProcess, ServiceStartError, start_service
from model.command_line import OneLineParser

_REQUEST = CompletionRequest(prompt="Once upon a time", max_tokens=4, temperature=0.8, seed=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupTimes:
    """Seconds from the start of the process."""

    live: float
    ready: float
    first_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Seconds."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupSummary:
    """Results of one kind of kernels."""

    kernels: str
    starts: int
    live: Range
    ready: Range
    first_token: Range


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = OneLineParser(prog="python -m benchmarks.start", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--weights", type=Path, default=Path("weights"), help="weights directory (%(default)s)")
    add("--kernels", default="native,torch", metavar="KIND,KIND", help="kinds of kernels (%(default)s)")
    add("--starts", type=int, default=9, metavar="N", help="counted starts of each kind (%(default)s)")
    flags = parser.parse_args(argv)
    kernel_kinds = flags.kernels.split(",")
    if flags.starts < 1:
        parser.error("--starts must be 1 or more")
    try:
        summaries = _measure(flags.weights.resolve(), kernel_kinds, flags.starts)
    except (ServiceStartError, OSError, ProtocolError) as error:
        print(f"error: {error_text(error)}", file=sys.stderr)
        return 1
    print(f"{'kernels':8}{'live s (range)':>24}{'ready s (range)':>24}{'first token s (range)':>24}")
    for kind in summaries:
        print(f"{kind.kernels:8}{_cell(kind.live):>24}{_cell(kind.ready):>24}{_cell(kind.first_token):>24}")
    print(msgspec.json.encode({"benchmark": "start", "machine": this_machine(), "kinds": summaries}).decode())
    return 0


def summarize(kernels: str, starts: Sequence[StartupTimes]) -> StartupSummary:
    """Medians and ranges of at least one start."""
    live, ready, first = ([getattr(s, name) for s in starts] for name in ("live", "ready", "first_token"))
    return StartupSummary(
        kernels=kernels, starts=len(starts), live=_range(live), ready=_range(ready), first_token=_range(first)
    )


def _measure(weights: Path, kernel_kinds: Sequence[str], n_starts: int) -> list[StartupSummary]:
    starts: dict[str, list[StartupTimes]] = {kind: [] for kind in kernel_kinds}
    for number in range(n_starts + 1):
        for kind in kernel_kinds:
            with start_service(["--weights", str(weights), "--kernels", kind]) as service:
                start = asyncio.run(_measure_startup(service))
            if number:
                starts[kind].append(start)
    return [summarize(kind, summaries) for kind, summaries in starts.items()]


async def _measure_startup(service: ServiceProcess) -> StartupTimes:
    connection = Connection(service.address)
    try:
        live = await service.wait_for(connection, "/health/live")
        ready = await service.wait_for(connection, "/health/ready")
        outcome = await complete(connection, _REQUEST)
    finally:
        connection.close()
    if isinstance(outcome, Failed) or outcome.first_token is None:
        raise ProtocolError(outcome.message if isinstance(outcome, Failed) else "the first completion had no text")
    return StartupTimes(live=live, ready=ready, first_token=ready + outcome.first_token)


def _range(seconds: Sequence[float]) -> Range:
    return Range(median=statistics.median(seconds), least=min(seconds), most=max(seconds))


def _cell(seconds: Range) -> str:
    return f"{seconds.median:.2f} ({seconds.least:.2f}-{seconds.most:.2f})"


if __name__ == "__main__":
    sys.exit(main())
