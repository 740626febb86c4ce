"""Two tenants of one service: latency of a victim's requests alone, and concurrent with an attacker's load.

As a program, it is the attacker: `-m tests.support.load.noisy_neighbor URL KEY CLIENTS PAUSE [FILE]` reads JSON
[[path, body], ...] from standard input and sends them, each client one after another, until it is killed. FILE gets a
line for each response: its status, and the message of an error.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The attacker's requests; each client sends all of them over and over, and begins with another one."""

    url: str
    key: str
    requests: Sequence[tuple[str, Any]]
    clients: int
    pause: float = 0.0
    """Seconds between two requests of a client."""
    outcomes: Path | None = None
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


def _wait_until_quiet(victim: Callable[[], float], alone: float, seconds: float = 15.0) -> None:
    """The service may go on with the attacker's last requests for a while, which would count as alone."""
    end = time.monotonic() + seconds
    while max(victim() for _ in range(3)) > 2 * alone and time.monotonic() < end:
        pass


@contextlib.contextmanager
def running(load: Load, warm_up: float = 0.5) -> Iterator[None]:
    """The attacker, as a process of its own."""
    command = [sys.executable, "-m", "tests.support.load.noisy_neighbor", load.url, load.key, str(load.clients)]
    command += [str(load.pause), *([str(load.outcomes)] if load.outcomes else [])]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps(load.requests))
        process.stdin.close()
        assert process.stdout.readline() == "sent\n"
        time.sleep(warm_up)
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _attack(url: str, key: str, requests: Sequence[tuple[str, bytes]], pause: float, outcomes: int | None) -> None:
    address = url.removeprefix("http://")
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(address, timeout=300)
    for i, (path, body) in enumerate(itertools.cycle(requests)):
        try:
            connection.request("POST", path, body, headers)
            if not i:
                os.write(1, b"sent\n")
            response = connection.getresponse()
            end = b""
            while part := response.read(1 << 16):
                end = part
            if outcomes is not None:
                message = "" if response.status == 200 else json.loads(end)["error"]["message"]
                os.write(outcomes, f"{response.status} {message}\n".encode())
            # A client that ignores Retry-After, but is no flood.
            time.sleep(max(pause, 0.05 if response.status == 503 else 0.0))
        except OSError:
            connection.close()


def _main(url: str, key: str, clients: int, pause: float, outcomes: str | None = None) -> None:
    sent = [(path, json.dumps(body).encode()) for path, body in json.loads(sys.stdin.read())]
    file = os.open(outcomes, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if outcomes else None
    for client in range(clients):
        first = client % len(sent)
        arguments = (url, key, sent[first:] + sent[:first], pause, file)
        threading.Thread(target=_attack, args=arguments).start()
    threading.Event().wait()


if __name__ == "__main__":
    _main(*sys.argv[1:3], int(sys.argv[3]), float(sys.argv[4]), *sys.argv[5:])
