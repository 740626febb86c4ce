"""An open-loop load generator: requests arrive at a fixed rate, independent of earlier responses.

A closed loop waits for responses, and so never overloads a service. This one does not wait; it is bounded in count and
in time. `run(plan)` measures in a separate process; `started(plan)` lets the test watch the service meanwhile. Its
benchmarks/client.py has the clients.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO

import msgspec
from msgspec import Struct

from app.common import event_loop
from benchmarks.client import Client, Exchange, parse_address
from benchmarks.common import percentile
from tests.support import ROOT

_REFUSED = (429, 503)


class Plan(Struct, frozen=True, kw_only=True):
    """The offered load."""

    url: str
    bodies: tuple[bytes, ...]
    """JSON bodies, used in turn; without bodies, requests are GETs. `SEED` is replaced by the request's number."""
    rate: float
    """Requests per second."""
    seconds: float
    path: str = "/complete"
    headers: tuple[tuple[str, str], ...] = ()
    most: int = 100_000
    """Maximum number of requests."""
    patience: float = 10.0
    """Seconds after the last arrival after which open requests are cut off."""


class Outcome(Struct, frozen=True, kw_only=True):
    """Outcome of one request. Times are seconds since it was due, which is never after it was sent."""

    due: float
    """Seconds of the monotonic clock, comparable between processes."""
    status: int = 0
    """0 without a response."""
    retry_after: int | None = None
    first_token: float | None = None
    end: float | None = None
    """None if it was cut off."""
    error: str = ""
    """Why the response is incomplete: refused connection, reset, cut off, or an `error` event in the stream."""

    @property
    def is_good(self) -> bool:
        """Whether the response is complete, with status 200 and no error."""
        return self.status == 200 and not self.error

    @property
    def is_refused(self) -> bool:
        """Whether the status is 429 or 503."""
        return self.status in _REFUSED


class Spread(Struct, frozen=True):
    """Distribution of durations in seconds; all zero if there are none."""

    n: int
    p50: float
    p99: float
    most: float


class Summary(Struct, frozen=True, kw_only=True):
    """Figures for the assertions of a load test."""

    offered: int
    good: int
    refused: int
    statuses: dict[int, int]
    errors: dict[str, int]
    refusal: Spread
    """Seconds to the end of a refusal."""
    first_token: Spread


def spread(values: Iterable[float]) -> Spread:
    """Percentiles of durations."""
    ordered = sorted(values)
    if not ordered:
        return Spread(0, 0.0, 0.0, 0.0)
    return Spread(len(ordered), percentile(ordered, 50), percentile(ordered, 99), ordered[-1])


def summary(outcomes: Sequence[Outcome]) -> Summary:
    """Summarizes outcomes."""
    good = [o for o in outcomes if o.is_good]
    refused = [o for o in outcomes if o.is_refused]
    return Summary(
        offered=len(outcomes),
        good=len(good),
        refused=len(refused),
        statuses=dict(Counter(o.status for o in outcomes)),
        errors=dict(Counter(o.error for o in outcomes if o.error)),
        refusal=spread(o.end for o in refused if o.end is not None),
        first_token=spread(o.first_token for o in good if o.first_token is not None),
    )


def spawn(module: str, plan: Struct, stdout: int | IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts a load generator, which reads its plan from standard input."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-P", "-m", module]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, env=environment)
    assert process.stdin
    process.stdin.write(msgspec.msgpack.encode(plan))
    process.stdin.close()
    process.stdin = None
    return process


class Load:
    """A load generator in a separate process."""

    def __init__(self, plan: Plan) -> None:
        self._longest = plan.seconds + plan.patience + 120  # it starts and sends late on a busy machine
        # Not a pipe: the test does not read while it watches the service, and a uvloop process writes only what fits.
        self._results = tempfile.TemporaryFile()  # noqa: SIM115 - stop() closes it
        self._process = spawn("tests.support.load.open_loop", plan, self._results)

    def stop(self) -> None:
        """Kills the generator; idempotent."""
        with self._process, self._results:
            self._process.kill()

    def outcomes(self) -> list[Outcome]:
        """Waits for the end of the load."""
        assert self._process.wait(timeout=self._longest) == 0, "the load generator failed"
        self._results.seek(0)
        return msgspec.msgpack.decode(self._results.read(), type=list[Outcome])


@contextmanager
def started(plan: Plan) -> Iterator[Load]:
    """Runs the load in a separate process, which is killed at the end of the block."""
    load = Load(plan)
    try:
        yield load
    finally:
        load.stop()


def run(plan: Plan) -> list[Outcome]:
    """Runs the load in a separate process to its end; returns outcomes in order of arrival."""
    with started(plan) as load:
        return load.outcomes()


async def _offer(plan: Plan) -> list[Outcome]:
    address = parse_address(plan.url)
    count = min(plan.most, int(plan.rate * plan.seconds))
    begin = time.monotonic() + 0.05
    exchanges: list[Exchange] = []
    clients: list[Client] = []
    idle: deque[Client] = deque()
    opening: set[asyncio.Task[None]] = set()

    async def open_and_send(exchange: Exchange) -> None:
        client = Client(address)
        clients.append(client)
        try:
            await client.open()
        except OSError as error:
            exchange.end(type(error).__name__)
        else:
            send(client, exchange)

    def send(client: Client, exchange: Exchange) -> None:
        exchange.on_end = partial(idle.append, client)
        client.send(exchange)

    for number in range(count):
        due = begin + number / plan.rate
        if (wait := due - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        elif not number % 20:
            await asyncio.sleep(0)  # behind schedule: still read responses
        body = plan.bodies[number % len(plan.bodies)].replace(b"SEED", str(number).encode()) if plan.bodies else b""
        exchange = Exchange(address.request("POST" if body else "GET", plan.path, body, plan.headers))
        exchanges.append(exchange)
        while idle and not idle[-1].is_open:
            idle.pop()
        if idle:
            send(idle.pop(), exchange)
        else:
            task = asyncio.create_task(open_and_send(exchange))
            opening.add(task)
            task.add_done_callback(opening.discard)
    limit = time.monotonic() + plan.patience
    for exchange in exchanges:
        while exchange.ended is None and time.monotonic() < limit:  # noqa: ASYNC110 - one event per exchange would cost more
            await asyncio.sleep(0.02)
    outcomes = [_outcome(exchange, begin + number / plan.rate) for number, exchange in enumerate(exchanges)]
    for client in clients:
        client.close()
    for task in opening:
        task.cancel()
    return outcomes


def _outcome(exchange: Exchange, due: float) -> Outcome:
    retry_after, arrivals = exchange.headers.get("retry-after"), exchange.arrivals
    return Outcome(
        due=due,
        status=exchange.status,
        retry_after=int(retry_after) if retry_after else None,
        first_token=arrivals[0] - due if arrivals else None,
        end=exchange.ended and exchange.ended - due,
        error=_error(exchange),
    )


def _error(exchange: Exchange) -> str:
    if exchange.ended is None:
        return "cut"
    is_stream = "event-stream" in exchange.headers.get("content-type", "")
    if exchange.error or not is_stream:
        return exchange.error
    if b"event: error\n" in exchange.body:
        return "error event"
    return "" if b"event: done\n" in exchange.body else "the stream ended without done"


if __name__ == "__main__":
    given = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Plan)
    sys.stdout.buffer.write(msgspec.msgpack.encode(event_loop.run(_offer(given))))
    sys.stdout.buffer.flush()
