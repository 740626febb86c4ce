"""What traces cost: python -m tests.tools.tracing_cost. CPU time per request, with exporting, beside that of a request.

The spans of a completion are made as the service makes them, with a collector in a process of its own. The other figure
is the API process' CPU time for a streamed completion of 20 tokens around the fake engine. Each is the least of ten
rounds, since other work on the machine can only add to it.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

from app.http.tracing import Tracing
from tests.support import ROOT
from tests.support.otlp_collector import otlp_collector
from tests.support.servers import Server, running_server

ROUNDS, REQUESTS, TOKENS = 10, 400, 20
PHASES = ("admission", "tokenize", "queue", "prefill", "decode")
NUMBERS = ("gen_ai.request.max_tokens", "gen_ai.request.choice.count", "gen_ai.usage.input_tokens")
NAMES = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.model")
ROUTE = SimpleNamespace(path="/complete", include_in_schema=True, tags=[])


def trace_one(tracing: Tracing) -> None:
    """The calls of one streamed completion (app/http/request_log.py, app/api/request_handle.py)."""
    started = time.monotonic()
    trace = tracing.request({"method": "POST", "headers": [], "route": ROUTE}, started)
    trace.start()
    trace.hold()
    if trace.exemplar:
        attributes = dict.fromkeys(NAMES, "inkstream") | dict.fromkeys(NUMBERS, 20)
        trace.add(attributes, [(name, started, time.monotonic(), {}) for name in PHASES])
    trace.end_completion([], None)
    trace.end_response("req-1", "alice", 200, "length")


def microseconds_of_a_trace(ratio: str) -> float:
    """CPU time of this process for the spans of a request, where `ratio` of all requests are sampled."""
    os.environ["OTEL_TRACES_SAMPLER"], os.environ["OTEL_TRACES_SAMPLER_ARG"] = "traceidratio", ratio

    def run() -> float:
        tracing, before = Tracing(os.environ, "0"), time.process_time()
        for _ in range(REQUESTS):
            trace_one(tracing)
        tracing.close()
        return time.process_time() - before

    return _least(run)


def microseconds_of_a_request(server: Server) -> float:
    """CPU time of the API process."""
    load = ["--streams", "4", "--requests", str(REQUESTS), "--max-tokens", str(TOKENS), "--json-only"]
    command = [sys.executable, "-m", "benchmarks.load", "--url", server.url, *load]

    def run() -> float:
        before = _cpu_seconds(server.process.pid)
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        return _cpu_seconds(server.process.pid) - before

    return _least(run)


def _least(run: Callable[[], float]) -> float:
    return min(run() for _ in range(ROUNDS)) / REQUESTS * 1e6


def _cpu_seconds(pid: int) -> float:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def _collect(ready: Connection) -> None:
    with otlp_collector() as collector:
        ready.send(collector.url)
        ready.recv()


def main() -> None:
    """Prints the figures."""
    mine, other = multiprocessing.Pipe()
    collecting = multiprocessing.get_context("spawn").Process(target=_collect, args=(other,))
    collecting.start()
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = mine.recv()
    shares = {name: microseconds_of_a_trace(name) for name in ("0", "0.1", "1")}
    mine.send("end")
    collecting.join()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder), ROOT / "weights", fake_ms=0) as server,
    ):
        request = microseconds_of_a_request(server)
    print(f"a request of {TOKENS} tokens, without traces: {request:.0f} us of the API process")
    for ratio, cost in shares.items():
        print(f"traces, {float(ratio):4.0%} of requests sampled: {cost:5.1f} us a request, {cost / request:+.1%}")


if __name__ == "__main__":
    main()
