"""Connections without an API key that send as much as the service reads: python -m tests.support.load.keyless_flood."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from threading import Thread

from tests.support import ROOT

_HEAD = b"%b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%b\r\n"
_LIVE, _COMPLETE = b"GET /health/live", b"POST /complete"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
FLOODS: dict[str, tuple[bytes, bytes]] = {
    "tiny chunks after a response": (_HEAD % (_LIVE, _CHUNKED), b"1\r\na\r\n" * 40_000),
    "tiny chunks after a refusal": (_HEAD % (_COMPLETE, _CHUNKED), b"1\r\na\r\n" * 40_000),
    "chunk extensions": (_HEAD % (_LIVE, _CHUNKED), b"1;a=b;c=d\r\na\r\n" * 20_000),
    "trailers": (_HEAD % (_LIVE, _CHUNKED) + b"0\r\n", b"a:b\r\n" * 20_000),
    "a body without end": (_HEAD % (_COMPLETE, b"Content-Length: 99999999999\r\n"), b"a" * 262_144),
    "probes": (b"", _HEAD % (_LIVE, b"") * 8),
    "refused requests": (b"", _HEAD % (_COMPLETE, b"Content-Length: 2\r\n") + b"{}"),
    "unknown hosts": (b"", b"GET /health/live HTTP/1.1\r\nHost: evil.example\r\n\r\n"),
    "unknown paths": (b"", _HEAD % (b"GET /nothing", b"")),
    "pages": (b"", _HEAD % (b"GET /", b"")),
    "offers of an upgrade": (b"", _HEAD % (_LIVE, b"Connection: upgrade\r\nUpgrade: h2c\r\n")),
    "silent connections, a hundred each": (b"", b""),
    "half heads on a hundred connections each": (b"GET /health/live HTTP/1.1\r\nHo", b""),
}
"""What each connection sends once, and then without end. When the service closes it, another one follows.

A connection with nothing more to send stays open, and others follow at once: each slot holds the latest hundred.
"""
_HELD = 100


@contextlib.contextmanager
def keyless_flood(port: int, kind: str, connections: int) -> Iterator[None]:
    """Runs this module in a process of the lowest priority, whose own CPU time is no cost of the service."""
    command = [sys.executable, "-m", __spec__.name, str(port), kind, str(connections)]
    with subprocess.Popen(["nice", "-n", "19", *command], cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"started\n"
        try:
            yield
        finally:
            process.kill()


def _flood(port: int, head: bytes, data: bytes, until: float) -> None:
    if not data:
        _connect_without_end(port, head, until)
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            Thread(target=_read, args=[connection], daemon=True).start()
            connection.sendall(head)
            while time.monotonic() < until:
                connection.sendall(data)


def _connect_without_end(port: int, head: bytes, until: float) -> None:
    held: deque[socket.socket] = deque()
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            held[-1].sendall(head)
        if len(held) > _HELD:
            held.popleft().close()


def _read(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(65536):
            pass


def _main(port: int, kind: str, connections: int) -> None:
    until = time.monotonic() + 60
    for _ in range(connections):
        Thread(target=_flood, args=[port, *FLOODS[kind], until], daemon=True).start()
    time.sleep(0.5)
    os.write(1, b"started\n")
    time.sleep(60)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
