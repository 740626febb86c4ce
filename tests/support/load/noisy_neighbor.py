"""Two tenants of one service: latency of a victim's requests alone, and concurrent with an attacker's load.

As a program, it is the attacker: it reads a Load from standard input, and works until it is killed.
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
    """Seconds of the victim's requests: medians, and how many there were of each kind."""

    alone: float
    concurrent: float
    n: int

    @property
    def ratio(self) -> float:
        """How many times as long the victim waits."""
        return self.concurrent / self.alone


class Load(Struct, frozen=True, kw_only=True):
    """The attacker's requests, in turn; a client sends its next one when it has read the answer to its last."""

    url: str
    key: str
    requests: Sequence[tuple[str, Any]]
    clients: int
    pause: float = 0.0
    """Seconds between two requests of a client."""
    outcomes: str = ""
    """File to which a line for each response is appended: its status, and the message of an error."""


def cost(victim: Callable[[], float], load: Load, *, rounds: int, each: int) -> Cost:
    """The victim's requests without and with the load in turns, so that both see the same machine."""
    alone: list[float] = []
    concurrent: list[float] = []
    victim()
    for _ in range(rounds):
        if alone:
            _wait_until_quiet(victim, statistics.median(alone))
        alone += [victim() for _ in range(each)]
        with running(load):
            concurrent += [victim() for _ in range(each)]
    return Cost(alone=statistics.median(alone), concurrent=statistics.median(concurrent), n=rounds * each)


def _wait_until_quiet(victim: Callable[[], float], alone: float) -> None:
    """The service may go on with the attacker's last requests for a while, which would count as alone."""
    end = time.monotonic() + 15
    while max(victim() for _ in range(3)) > 2 * alone and time.monotonic() < end:
        pass


@contextlib.contextmanager
def running(load: Load, warm_up: float = 0.5) -> Iterator[None]:
    """The attacker, as a process of its own."""
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
    """Keeps the last piece of its answer only: the attacker must not use the cores that the victim is measured on."""

    def on_body(self, piece: bytes) -> None:
        self._pieces = [piece]


async def _attack(load: Load) -> None:
    address = replace(parse_address(load.url), key=load.key)
    wires = itertools.cycle([address.request("POST", path, json.dumps(body).encode()) for path, body in load.requests])
    file = os.open(load.outcomes, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if load.outcomes else None

    async def client() -> None:
        connection = Client(address)
        while True:
            exchange = await connection.run(_Discarded(next(wires)))
            if file is not None and exchange.status:
                message = "" if exchange.status == 200 else json.loads(exchange.body)["error"]["message"]
                os.write(file, f"{exchange.status} {message}\n".encode())
            # A client that ignores Retry-After, but is no flood.
            await asyncio.sleep(max(load.pause, 0.05 if exchange.status in (0, 503) else 0.0))

    async with asyncio.TaskGroup() as group:
        for _ in range(load.clients):
            group.create_task(client())
        await asyncio.sleep(0.1)
        os.write(1, b"sent\n")


if __name__ == "__main__":
    event_loop.run(_attack(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Load)))
