"""Input without end: floods on connections without a key, and large bodies whose last byte never arrives."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import ExitStack, suppress
from random import Random

from tests.redteam.attack import Load, Setting, attack, measure_slowdown
from tests.redteam.http_client import request_bytes
from tests.redteam.service import Target, resident_bytes

VICTIM, ATTACKER = 0, 1
CONNECTIONS = 16
FACTOR = 4.0
"""Floor of the promise on a stream beside sixteen connections without a key."""
VICTIM_SECONDS = 20.0
UNFINISHED = 300
MOST_UNFINISHED_BYTES = 96 << 20
_STREAM = {"prompt": "a", "max_tokens": 64, "ignore_eos": True, "stream": False}
_PATHS = (
    "GET /health/live",
    "GET /",
    "GET /nothing",
    "POST /complete",
    "POST /v1/completions",
    "GET /metrics",
    "PUT /",
)


class FloodGenerator:
    """What a connection sends first, and what it then sends again and again."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def next(self) -> tuple[bytes, bytes]:
        """A random flood."""
        return self.rng.choice(
            [self._chunks, self._chunks, self._chunks, self._trailers, self._body, self._requests, self._head]
        )()

    def _start(self, *headers: str) -> bytes:
        method, path = self.rng.choice(_PATHS).split()
        key = self.rng.choice([None, None, "wrong"])
        return request_bytes(method, path, key=key, headers=["Content-Type: application/json", *headers])

    def _chunks(self) -> tuple[bytes, bytes]:
        size = self.rng.choice([1, 1, 2, 16, 1000])
        extension = self.rng.choice([b"", b"", b";a", b";a=b;c=d"])
        chunk = b"%x%b\r\n%b\r\n" % (size, extension, b"a" * size)
        return self._start("Transfer-Encoding: chunked"), chunk * (200_000 // len(chunk) + 1)

    def _trailers(self) -> tuple[bytes, bytes]:
        return self._start("Transfer-Encoding: chunked") + b"0\r\n", b"a:b\r\n" * self.rng.choice([1, 50, 20_000])

    def _body(self) -> tuple[bytes, bytes]:
        return self._start(f"Content-Length: {10 ** self.rng.randint(5, 12)}"), b"a" * self.rng.choice(
            [1, 1000, 200_000]
        )

    def _requests(self) -> tuple[bytes, bytes]:
        upgrade = self.rng.choice([(), ("Connection: upgrade", "Upgrade: h2c"), ("Expect: 100-continue",)])
        return b"", self._start("Content-Length: 0", *upgrade) * self.rng.choice([1, 1, 8])

    def _head(self) -> tuple[bytes, bytes]:
        line = self.rng.choice([b"a:b\r\n", b"x-pad: " + b"a" * 1000 + b"\r\n", b"a", b"\0", b"\r\n"])
        return self._start()[:-2], line * self.rng.choice([1, 10, 3000])


@attack("endless-input", share=12.0)
def endless_input(setting: Setting) -> None:
    """Sixteen connections without a key that send as much as the service reads, during another key's completion."""
    target, report, floods = setting.target, setting.report, FloodGenerator(setting.rng)
    report.limit = f"{FACTOR:g} times that beside silent connections"
    worst = 0.0
    for _ in setting.tries(most=min(setting.most_tries, 6)):
        first, then = floods.next()
        flood = Load(lambda _, a=first, b=then: _send(target, a, b), CONNECTIONS)  # type: ignore[misc]
        silent = Load(lambda _: _send(target, b"", b""), CONNECTIONS)
        found = measure_slowdown(lambda: _victim(target), flood, budget=setting.budget.share(0.3), baseline=silent)
        figure = f"{found.loaded * 1e3:.0f} ms, beside silent connections {found.alone * 1e3:.0f} ms"
        repro = f"{CONNECTIONS} connections: {first[:300]!r}, then {then[:60]!r} x {len(then)} bytes without end"
        if found.loaded > FACTOR * found.alone + 0.1:
            report.add("high", f"a completion of another key takes {figure}", repro, group="flood")
        if found.loaded / found.alone > worst:
            worst, report.worst = found.loaded / found.alone, figure
        target.settle()


def _send(target: Target, first: bytes, then: bytes) -> None:
    """Sends for two seconds on one connection, and discards what comes back."""
    until = time.monotonic() + 2
    with target.address.connect(timeout=2) as connection:
        connection.settimeout(None)  # with a time-out of Python's, recv() below would wait
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 2, 0))
        connection.sendall(first)
        while time.monotonic() < until:
            if not then:
                time.sleep(0.1)
                continue
            connection.sendall(then)
            with suppress(BlockingIOError):
                if not connection.recv(1 << 16, socket.MSG_DONTWAIT):
                    return


def _victim(target: Target) -> float:
    response = target.call("POST", "/complete", tenant=VICTIM, body=_STREAM, timeout=VICTIM_SECONDS)
    return response.seconds if response.status == 200 else VICTIM_SECONDS


@attack("unfinished-bodies", share=8.0, needs_launcher=True)
def unfinished_bodies(setting: Setting) -> None:
    """Bodies of a megabyte of one key without their last byte, with and without chunks and an Idempotency-Key."""
    report = setting.report
    report.limit = f"{MOST_UNFINISHED_BYTES >> 20} MiB for {UNFINISHED} bodies"
    with setting.own_launcher.running("--body-timeout", "120") as target, ExitStack() as stack:
        before, peak = resident_bytes(target.pid), 0
        for number in range(UNFINISHED):
            if not setting.budget and number > 100:
                break
            report.tries += 1
            connection = stack.enter_context(target.address.connect())
            connection.settimeout(0.2)
            with suppress(OSError):  # the service has refused the body, or does not read it
                connection.sendall(_unfinished(setting.rng, target.keys[ATTACKER], number))
            peak = max(peak, resident_bytes(target.pid) - before)
        whole = target.call("POST", "/tokenize", tenant=VICTIM, body={"prompt": "a " * 200_000}, timeout=VICTIM_SECONDS)
    report.worst = f"{peak >> 20} MiB for {report.tries} bodies"
    repro = f"{report.tries} x POST /complete with a body of 1 MB without its last byte, of one key"
    if peak > MOST_UNFINISHED_BYTES:
        report.add("high", f"bodies that have not arrived take {report.worst}", repro, group="memory")
    if whole.status != 200:
        report.add("high", f"another key's body of 400 kB gets {whole.status}", repro, group="starved")


def _unfinished(rng: Random, key: str | None, number: int) -> bytes:
    body = b'{"prompt":"' + b"a" * 1_000_000 + b'"}'
    headers = rng.choice([[], [], [f"Idempotency-Key: {number}"]])
    if rng.random() < 0.7:
        return request_bytes("POST", "/complete", key=key, body=body, headers=headers)[:-1]
    headers = ["Content-Type: application/json", "Transfer-Encoding: chunked", *headers]
    parts = [body[i : i + 9000] for i in range(0, len(body), 9000)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return request_bytes("POST", "/complete", key=key, headers=headers) + chunks
