"""Load test of the whole service with the default weights, started as `make serve` starts it."""

from __future__ import annotations

from collections.abc import Iterator

from app.common import event_loop
from benchmarks import load
from benchmarks.gpu.results import Finding, StageContext
from benchmarks.load import LoadPlan, LoadResult
from benchmarks.service_process import running, serve_command


def http(context: StageContext) -> Iterator[Finding]:
    """Check: no request fails."""
    streams = (2,) if context.tiny else (1, 8, 32, 256)
    flags = ["--weights", str(context.weights), "--device", context.device, "--max-running", str(max(streams))]
    with running(serve_command(*flags, "--tokens-per-step", str(max(256, 8 * max(streams))))) as service:
        yield Finding(what="start until ready", value=service.wait_for_route("/health/ready"), unit="s")
        plan = LoadPlan(
            url=service.url,
            streams=streams,
            max_tokens=8 if context.tiny else 128,
            requests=4 if context.tiny else None,
            temperature=0.8,
            seconds=5.0 if context.tiny else max(1.0, (context.seconds_left - 3) / len(streams)),
        )
        yield from _findings(event_loop.run(load.run(plan)))


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
