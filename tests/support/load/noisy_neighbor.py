"""Latency of a tenant's requests alone and concurrent with another tenant's load.

Run as a program, it is the attacker: it reads a Load from standard input, and sends requests until it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import Struct

from app.common import event_loop
from benchmarks.client import Client, Exchange, parse_address
from tests.support.load.open_loop import spawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Median seconds of the victim's requests, and the number of requests of each kind."""

    alone: float
    concurrent: float
    n: int

    @property
    def ratio(self) -> float:
        """Slowdown of the victim by the load."""
        return self.concurrent / self.alone


class Load(Struct, frozen=True, kw_only=True):
    """The attacker's requests, sent in turn; each client reads a response before it sends the next request."""

    url: str
    key: str
    requests: Sequence[tuple[str, Any]]
    clients: int
    method: str = "POST"
    """GET sends no bodies."""
    pause: float = 0.0
    """Seconds between requests of a client."""
    outcomes: str = ""
    """File to which each response appends a line: status and error message."""


def measure_cost(victim: Callable[[], float], load: Load, *, rounds: int, each: int) -> Cost:
    """Measures the victim's requests with and without the load in alternation, under the same machine conditions."""
    alone: list[float] = []
    concurrent: list[float] = []
    victim()
    for _ in range(rounds):
        if alone:
            _wait_until_quiet(victim, statistics.median(alone))
        alone += [victim() for _ in range(each)]
        with running_load(load):
            concurrent += [victim() for _ in range(each)]
    return Cost(alone=statistics.median(alone), concurrent=statistics.median(concurrent), n=rounds * each)


def _wait_until_quiet(victim: Callable[[], float], alone: float) -> None:
    """Waits until the service has finished the attacker's last requests, which would distort `alone`."""
    end = time.monotonic() + 15
    while max(victim() for _ in range(3)) > 2 * alone and time.monotonic() < end:
        pass


@contextlib.contextmanager
def running_load(load: Load, warm_up: float = 0.5) -> Iterator[None]:
    """Runs the attacker as a separate process."""
    process = spawn("tests.support.load.noisy_neighbor", load, subprocess.PIPE)
    assert process.stdout
    try:
        assert process.stdout.readline() == b"sent\n"
        time.sleep(warm_up)
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class _Discarded(Exchange):
    """Stores only the last piece of the response, to save the attacker CPU time that the victim's measurement needs."""

    def on_body(self, piece: bytes) -> None:
        self._pieces = [piece]


async def _attack(load: Load) -> None:
    address = replace(parse_address(load.url), key=load.key)
    wires = itertools.cycle(
        [
            address.request(load.method, path, b"" if load.method == "GET" else json.dumps(body).encode())
            for path, body in load.requests
        ]
    )
    file = os.open(load.outcomes, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if load.outcomes else None

    async def client() -> None:
        connection = Client(address)
        while True:
            exchange = await connection.run(_Discarded(next(wires)))
            if file is not None and exchange.status:
                message = "" if exchange.status == 200 else json.loads(exchange.body)["error"]["message"]
                os.write(file, f"{exchange.status} {message}\n".encode())
            # Ignores Retry-After, but does not flood the service.
            await asyncio.sleep(max(load.pause, 0.05 if exchange.status in (0, 503) else 0.0))

    async with asyncio.TaskGroup() as group:
        for _ in range(load.clients):
            group.create_task(client())
        await asyncio.sleep(0.1)
        os.write(1, b"sent\n")


if __name__ == "__main__":
    event_loop.run(_attack(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Load)))
