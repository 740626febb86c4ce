"""An open-loop load generator: requests arrive at a fixed rate, independent of earlier answers.

A closed loop waits for answers, and so offers an overloaded service just what it can bear. This one does not wait; it
is bounded in count and in time. `run(plan)` measures in a process of its own, `started(plan)` lets the test look at the
service meanwhile, `offer(plan)` is for a test that has an event loop already.

Light, as it shares the cores with what it measures: a protocol without streams or tasks, answers that are looked at
and not parsed. It knows the end of an answer, three kinds of events (token, done, error), the status and Retry-After.
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

import msgspec
from msgspec import Struct

from app.common import event_loop
from benchmarks.concurrency import percentile
from tests.support import ROOT

_TOKEN, _DONE, _ERROR = b"event: token\n", b"event: done\n", b"event: error\n"
_CARRY = max(map(len, (_TOKEN, _DONE, _ERROR))) - 1
_REFUSED = (429, 503)


class Plan(Struct, frozen=True, kw_only=True):
    """The offered load."""

    url: str
    bodies: tuple[bytes, ...]
    """JSON, used in turn; no body is GET. `SEED` in one is replaced by the number of the request."""
    rate: float
    """Requests a second."""
    seconds: float
    path: str = "/complete"
    headers: tuple[tuple[str, str], ...] = ()
    most: int = 100_000
    """Never more requests than this."""
    patience: float = 10.0
    """Seconds after the last arrival until what is still open is cut."""


class Outcome(Struct, frozen=True, kw_only=True):
    """What became of one request. Times are seconds since it was due, which is not later than it was sent."""

    due: float
    """Monotonic seconds, by the machine's clock: comparable between processes."""
    late: float
    """How much later than due it was sent: the generator's own fault."""
    status: int = 0
    """0 where no answer came."""
    retry_after: int | None = None
    first_byte: float | None = None
    first_token: float | None = None
    gaps: tuple[float, ...] = ()
    """Between reads that brought tokens."""
    tokens: int = 0
    """Events with tokens."""
    end: float | None = None
    """None where it was cut."""
    error: str = ""
    """Why there is no whole answer: refused connection, reset, cut, or an `error` event in the stream."""

    @property
    def is_good(self) -> bool:
        """A whole answer of status 200, and no error in it."""
        return self.status == 200 and not self.error

    @property
    def is_refused(self) -> bool:
        """429 or 503."""
        return self.status in _REFUSED


class Spread(Struct, frozen=True):
    """Seconds; all zero where there is nothing."""

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
    gaps: Spread
    end: Spread
    """Seconds to the end of a good answer."""
    late: Spread


def spread(values: Iterable[float]) -> Spread:
    """Percentiles of some seconds."""
    ordered = sorted(values)
    if not ordered:
        return Spread(0, 0.0, 0.0, 0.0)
    return Spread(len(ordered), percentile(ordered, 50), percentile(ordered, 99), ordered[-1])


def summary(outcomes: Sequence[Outcome]) -> Summary:
    """All there is to say about them."""
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
        gaps=spread(gap for o in good for gap in o.gaps),
        end=spread(o.end for o in good if o.end is not None),
        late=spread(o.late for o in outcomes),
    )


class Load:
    """A generator in a process of its own."""

    def __init__(self, plan: Plan) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.seconds = plan.seconds
        self._longest = plan.seconds + plan.patience + 120  # it starts and sends late where others have the cores
        # Not a pipe: the test reads nothing while it watches the service, and uvloop's processes write only what fits.
        self._results = tempfile.TemporaryFile()  # noqa: SIM115 - stop() closes it
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.support.load.open_loop"],
            stdin=subprocess.PIPE,
            stdout=self._results,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin
        self._process.stdin.write(msgspec.msgpack.encode(plan))
        self._process.stdin.close()
        self._process.stdin = None

    def stop(self) -> None:
        """Ends it at once; any number of times."""
        with self._process, self._results:
            self._process.kill()

    def outcomes(self) -> list[Outcome]:
        """Waits for the end."""
        assert self._process.wait(timeout=self._longest) == 0, "the load generator failed"
        self._results.seek(0)
        return msgspec.msgpack.decode(self._results.read(), type=list[Outcome])


@contextmanager
def started(plan: Plan) -> Iterator[Load]:
    """Runs the load in a separate process, which ends with the block at the latest."""
    load = Load(plan)
    try:
        yield load
    finally:
        load.stop()


def run(plan: Plan) -> list[Outcome]:
    """Runs the load in a separate process to its end. Outcomes in the order of arrival."""
    with started(plan) as load:
        return load.outcomes()


async def offer(plan: Plan) -> list[Outcome]:
    """The same in this event loop."""
    address = plan.url.removeprefix("http://").split(":")
    host, port = address[0], int(address[1])
    count = min(plan.most, int(plan.rate * plan.seconds))
    begin = time.monotonic() + 0.05
    exchanges: list[_Exchange] = []
    idle: deque[_Wire] = deque()
    opening: set[asyncio.Task[None]] = set()

    async def open_and_send(exchange: _Exchange) -> None:
        try:
            _, wire = await asyncio.get_running_loop().create_connection(lambda: _Wire(idle), host, port)
            wire.send(exchange)
        except OSError as error:
            exchange.finish(time.monotonic(), type(error).__name__)

    for number in range(count):
        due = begin + number / plan.rate
        if (wait := due - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        elif not number % 20:
            await asyncio.sleep(0)  # behind: answers are still read
        exchange = _Exchange(due, _request(plan, host, number))
        exchanges.append(exchange)
        while idle and idle[-1].is_closed:
            idle.pop()
        if idle:
            idle.pop().send(exchange)
        else:
            task = asyncio.create_task(open_and_send(exchange))
            opening.add(task)
            task.add_done_callback(opening.discard)
    limit = time.monotonic() + plan.patience
    for exchange in exchanges:
        while not exchange.is_done and time.monotonic() < limit:  # noqa: ASYNC110 - an event for each would cost more
            await asyncio.sleep(0.02)
    for exchange in exchanges:
        if not exchange.is_done:
            exchange.cut()
    for wire in idle:
        wire.close()
    for task in opening:
        task.cancel()
    return [exchange.outcome() for exchange in exchanges]


def _request(plan: Plan, host: str, number: int) -> bytes:
    body = plan.bodies[number % len(plan.bodies)].replace(b"SEED", str(number).encode()) if plan.bodies else b""
    extra = "".join(f"{name}: {value}\r\n" for name, value in plan.headers)
    if not body:
        return f"GET {plan.path} HTTP/1.1\r\nHost: {host}\r\n{extra}\r\n".encode()
    head = f"POST {plan.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{extra}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Exchange:
    """A request and what has come of it."""

    def __init__(self, due: float, request: bytes) -> None:
        self.request = request
        self.is_done = False
        self.wire: _Wire | None = None
        self._due = due
        self._sent = due
        self._head = b""
        self._status = 0
        self._retry_after: int | None = None
        self._length: int | None = None
        self._tail = b""
        self._first_byte: float | None = None
        self._first_token: float | None = None
        self._last_token = 0.0
        self._gaps: list[float] = []
        self._tokens = 0
        self._end: float | None = None
        self._error = ""
        self._is_done = self._is_stream = False

    def sent(self, now: float) -> None:
        self._sent = now

    def feed(self, data: bytes, now: float) -> bool:
        """Takes bytes of the answer; whether it is whole with them."""
        self._first_byte = self._first_byte or now
        if not self._status:
            self._head += data
            head, found, data = self._head.partition(b"\r\n\r\n")
            if not found:
                return False
            self._read_head(head)
        if self._length is not None:
            self._length -= len(data)
            return self._length <= 0
        seen = self._tail + data
        if new := seen.count(_TOKEN):
            self._note_tokens(new, now)
        self._is_done |= _DONE in seen
        if _ERROR in seen:
            self._error = "error event"
        self._tail = seen[-_CARRY:]
        return seen.endswith(b"0\r\n\r\n")

    def finish(self, now: float, error: str = "") -> None:
        self.is_done, self._end = True, now
        self._error = error or self._error
        if self._is_stream and not self._is_done and not self._error:
            self._error = "the stream ended without done"

    def cut(self) -> None:
        self.is_done, self._error = True, "cut"
        if self.wire:
            self.wire.close()

    def outcome(self) -> Outcome:
        def since(at: float | None) -> float | None:
            return None if at is None else at - self._due

        return Outcome(
            due=self._due,
            late=self._sent - self._due,
            status=self._status,
            retry_after=self._retry_after,
            first_byte=since(self._first_byte),
            first_token=since(self._first_token),
            gaps=tuple(self._gaps),
            tokens=self._tokens,
            end=since(self._end),
            error=self._error,
        )

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        self._status = int(first[9:12])
        for line in lines:
            name, _, value = line.partition(b":")
            match name.lower():
                case b"content-length":
                    self._length = int(value)
                case b"retry-after":
                    self._retry_after = int(value)
                case b"content-type":
                    self._is_stream = b"event-stream" in value

    def _note_tokens(self, new: int, now: float) -> None:
        if self._first_token is None:
            self._first_token = now
        else:
            self._gaps.append(now - self._last_token)
        self._last_token = now
        self._tokens += new


class _Wire(asyncio.Protocol):
    """A keep-alive connection with one request at a time."""

    def __init__(self, idle: deque[_Wire]) -> None:
        self.is_closed = False
        self._idle = idle
        self._exchange: _Exchange | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def send(self, exchange: _Exchange) -> None:
        assert self._transport
        if self.is_closed:
            exchange.finish(time.monotonic(), "closed before it was sent")
            return
        self._exchange, exchange.wire = exchange, self
        exchange.sent(time.monotonic())
        self._transport.write(exchange.request)

    def close(self) -> None:
        self.is_closed = True
        if self._transport:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange and exchange.feed(data, time.monotonic()):
            self._exchange = None
            exchange.finish(time.monotonic())
            if not self.is_closed:
                self._idle.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if self._exchange and not self._exchange.is_done:
            self._exchange.finish(time.monotonic(), type(exc).__name__ if exc else "closed in mid-answer")


if __name__ == "__main__":
    given = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Plan)
    sys.stdout.buffer.write(msgspec.msgpack.encode(event_loop.run(offer(given))))
    sys.stdout.buffer.flush()
