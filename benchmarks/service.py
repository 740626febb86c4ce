"""Overhead of the service around the engine: the real service with a fake engine, on loopback.

`python -m benchmarks.service [--weights DIR] [--streams 1,8,32] [--step-ms MS]`. For each API and number of streams:
CPU microseconds per token of the API process, of the fake engine and of the load generator, tokens per second, time to
first token, and gaps between reads. Linux only: reads CPU times from /proc. The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from app.common import event_loop
from benchmarks.concurrency import percentile
from benchmarks.stream_clients import Endpoint, StreamClients
from model.command_line import OneLineParser

_START_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One API at one number of streams."""

    door: str
    """The endpoint; results keep this key."""
    streams: int
    step_ms: float
    tokens_per_second: float
    api_us: float
    """CPU microseconds of the API process per token."""
    engine_us: float
    """CPU microseconds of the fake engine per token: the cost of the engine's end of the pipe, and little else."""
    load_us: float
    """CPU microseconds of this process per token."""
    first_token_ms: float
    gap_p50_ms: float
    gap_p99_ms: float


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 if the service does not start or does not answer."""
    parser = OneLineParser(prog="python -m benchmarks.service", description=__doc__)
    add = parser.add_argument
    add("--weights", default="weights", help="weights directory whose tokenizer is used (%(default)s)")
    add("--streams", default="1,8,32", help="numbers of streams (%(default)s)")
    add("--doors", default="complete,openai", help="complete, openai, or both")
    add("--tokens", type=int, default=128, help="tokens per request (%(default)s)")
    add("--seconds", type=float, default=3.0, help="seconds per measurement (%(default)s)")
    add("--step-ms", type=float, help="step time of the fake engine; 0: no pause (0.3 + 0.085 per stream)")
    flags = parser.parse_args(argv)
    costs = []
    print("door      streams  step ms  tokens/s  us/token: API  engine  load   first token ms   gap p50 / p99 ms")
    for endpoint in flags.doors.split(","):
        for streams in map(int, flags.streams.split(",")):
            step_ms = 0.3 + 0.085 * streams if flags.step_ms is None else flags.step_ms
            cost = _measure(flags.weights, Endpoint(endpoint), streams, step_ms, flags.tokens, flags.seconds)
            if cost is None:
                return 1
            costs.append(cost)
            print(
                f"{endpoint:8}  {streams:7}  {step_ms:7.2f}  {cost.tokens_per_second:8.0f}  {cost.api_us:13.1f}  "
                f"{cost.engine_us:6.1f}  {cost.load_us:4.1f}  {cost.first_token_ms:15.2f}   "
                f"{cost.gap_p50_ms:7.2f} / {cost.gap_p99_ms:.2f}",
                flush=True,
            )
    print(json.dumps({"benchmark": "service", "tokens": flags.tokens, "costs": [asdict(cost) for cost in costs]}))
    return 0


def _measure(
    weights: str, endpoint: Endpoint, streams: int, step_ms: float, tokens: int, seconds: float
) -> Cost | None:
    command = [sys.executable, "-m", "benchmarks.fake_engine", weights, str(step_ms)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as file:
            service = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            port = _wait_for_port(service, log)
            if port is None:
                print(log.read_text(), end="", file=sys.stderr)
                return None
            return event_loop.run(_load(service.pid, port, endpoint, streams, step_ms, tokens, seconds))
        finally:
            service.terminate()
            service.wait()


def _wait_for_port(service: subprocess.Popen[bytes], log: Path) -> int | None:
    deadline = time.monotonic() + _START_SECONDS
    while service.poll() is None and time.monotonic() < deadline:
        text = log.read_text()
        if "ready:" in text and (found := re.search(r"listening on \S+:(\d+)", text)):
            time.sleep(0.3)  # the tokenizer loads in parallel with the engine
            return int(found.group(1))
        time.sleep(0.02)
    return None


async def _load(
    pid: int, port: int, endpoint: Endpoint, streams: int, step_ms: float, tokens: int, seconds: float
) -> Cost | None:
    clients = StreamClients(endpoint, port, tokens)
    await clients.open(streams)
    await asyncio.sleep(min(1.0, seconds / 3))  # warm-up: opens every stream, takes every path
    (engine_pid,) = _children(pid)
    clients.reset_counts()
    before = (_cpu_seconds(pid), _cpu_seconds(engine_pid), time.process_time(), time.monotonic())
    await asyncio.sleep(seconds)
    after = (_cpu_seconds(pid), _cpu_seconds(engine_pid), time.process_time(), time.monotonic())
    counted, first, gaps = clients.n_tokens, sorted(clients.first_tokens), sorted(clients.gaps)
    clients.close()
    if clients.failure or not counted or not first or not gaps:
        print(f"error: {clients.failure or 'no request finished in time; raise --seconds'}", file=sys.stderr)
        return None
    api, engine, load, wall = (end - begin for begin, end in zip(before, after, strict=True))
    return Cost(
        door=endpoint.value,
        streams=streams,
        step_ms=step_ms,
        tokens_per_second=counted / wall,
        api_us=api / counted * 1e6,
        engine_us=engine / counted * 1e6,
        load_us=load / counted * 1e6,
        first_token_ms=percentile(first, 50) * 1e3,
        gap_p50_ms=percentile(gaps, 50) * 1e3,
        gap_p99_ms=percentile(gaps, 99) * 1e3,
    )


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _cpu_seconds(pid: int) -> float:
    """CPU time of all threads; schedstat counts nanoseconds, /proc/PID/stat only ticks."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


if __name__ == "__main__":
    sys.exit(main())
