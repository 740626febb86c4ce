"""Load test of the whole service with the default weights, started as `make serve` starts it."""

from __future__ import annotations

from collections.abc import Iterator

from app.common import event_loop
from benchmarks import load
from benchmarks.gpu.finding import Bench, Finding
from benchmarks.http_client import Connection
from benchmarks.plan import LoadPlan
from benchmarks.result import LoadResult
from benchmarks.running import Running, running


def run(bench: Bench) -> Iterator[Finding]:
    """A law: no request fails."""
    streams = (2,) if bench.tiny else (1, 8, 32, 256)
    flags = ["--weights", str(bench.weights), "--device", bench.device, "--max-running", str(max(streams))]
    with running([*flags, "--tokens-per-step", str(max(256, 8 * max(streams)))]) as service:
        seconds = event_loop.run(_ready(service))
        yield Finding(what="start until ready", value=seconds, unit="s")
        plan = LoadPlan(
            url=f"http://127.0.0.1:{service.address.port}",
            streams=streams,
            max_tokens=8 if bench.tiny else 128,
            requests=4 if bench.tiny else None,
            temperature=0.8,
            seconds=5.0 if bench.tiny else max(1.0, (bench.seconds_left - 3) / len(streams)),
        )
        yield from _findings(event_loop.run(load.run(plan)))


async def _ready(service: Running) -> float:
    connection = Connection(service.address)
    return await service.wait(connection, "/health/ready")


def _findings(result: LoadResult) -> Iterator[Finding]:
    for level in result.levels:
        first, inter = level.first_token_ms, level.inter_token_ms
        yield Finding(
            what=f"{level.streams} streams",
            value=level.output_tokens_per_second,
            unit="tokens/s",
            ok=not level.errors,
            note=level.first_error
            or f"first token p50/p99 {first.p50 or 0:.1f}/{first.p99 or 0:.1f} ms, gaps {inter.p50 or 0:.2f}/"
            f"{inter.p99 or 0:.2f} ms; {level.unfinished} unfinished",
        )
