"""Two tenants of one service: latency of a victim's requests alone, and concurrent with an attacker's load.

As a program, it is the attacker: `-m tests.support.load.noisy_neighbor URL KEY CLIENTS` reads JSON [[path, body], ...]
from standard input and sends them, each client one after another, until it is killed.
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
from typing import Any

from tests.support.paths import ROOT


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


def _attack(url: str, key: str, requests: Sequence[tuple[str, bytes]]) -> None:
    address = url.removeprefix("http://")
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(address, timeout=300)
    for i, (path, body) in enumerate(itertools.cycle(requests)):
        try:
            connection.request("POST", path, body, headers)
            if not i:
                os.write(1, b"sent\n")
            response = connection.getresponse()
            while response.read(1 << 16):
                pass
            if response.status == 503:
                time.sleep(0.05)  # a client that ignores Retry-After, but is no flood
        except OSError:
            connection.close()


if __name__ == "__main__":
    sent = [(path, json.dumps(body).encode()) for path, body in json.loads(sys.stdin.read())]
    for client in range(int(sys.argv[3])):
        first = client % len(sent)
        threading.Thread(target=_attack, args=(*sys.argv[1:3], sent[first:] + sent[:first])).start()
    threading.Event().wait()
