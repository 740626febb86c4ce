"""S29: Bodies that are still arriving take bounded memory, whatever one key holds back, and another key's arrive."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.http.raw_client import connect, status_of
from tests.support.keyed_server import Keyring, bearer
from tests.support.processes import memory
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

_BODY = b'{"prompt":"' + b"a" * 1_000_000 + b'","max_tokens":1,"stream":false}'
_CHUNKS = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (_BODY[i : i + 8192] for i in range(0, 10**6, 8192)))
_KINDS = {
    "with a declared length": ("", b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY[:-1]),
    "in chunks": ("", b"Transfer-Encoding: chunked\r\n\r\n" + _CHUNKS),
    "with an Idempotency-Key": ("Idempotency-Key: k%d\r\n", b"Content-Length: %d\r\n\r\n" % len(_BODY) + _BODY[:-1]),
}


@pytest.fixture(scope="module")
def server(serve_module: Services, ring: Keyring, faults: Faults) -> Server:
    """Bodies may take ten minutes."""
    flags = ("--body-timeout", "600", "--max-connections", "4096")
    environment = faults.removing("incoming_bodies.unlimited")
    return serve_module(*flags, ring=ring, fake_ms=1, environment=environment, is_killed=True)


def _megabytes(server: Server) -> float:
    return memory(server.process.pid, "RssAnon") / 1e6


@contextmanager
def _unfinished(server: Server, key: str, kind: str, n: int) -> Iterator[list[socket.socket]]:
    """Clients of a key that have sent all of a body of 1 MB but its last byte, as far as the service reads it."""
    extra, rest = _KINDS[kind]
    head = f"POST /complete HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{extra}"
    head += f"Authorization: Bearer {key}\r\n"

    def send(connection: socket.socket, index: int) -> None:
        connection.settimeout(3)
        with contextlib.suppress(OSError):  # the service does not read the rest, or has refused it
            connection.sendall((head % index if extra else head).encode() + rest)

    with ExitStack() as stack:
        connections = [stack.enter_context(connect(server)) for _ in range(n)]
        threads = [threading.Thread(target=send, args=[each, i]) for i, each in enumerate(connections)]
        for start in range(0, n, 50):
            for thread in threads[start : start + 50]:
                thread.start()
            for thread in threads[start : start + 50]:
                thread.join()
        time.sleep(1)
        yield connections
    until = time.monotonic() + 30
    while server.metric("connections", bearer(key)) > 1 and time.monotonic() < until:
        time.sleep(0.1)


def _held(server: Server, ring: Keyring, kind: str, n: int) -> float:
    """MB of memory that unfinished bodies take."""
    before = _megabytes(server)
    with _unfinished(server, ring.keys["attacker"], kind, n):
        held = []
        for _ in range(10):  # the service may still be reading
            held.append(_megabytes(server) - before)
            time.sleep(0.3)
        return max(held)


@pytest.mark.parametrize("kind", _KINDS)
def test_unfinished_bodies_of_a_key_take_bounded_memory(
    server: Server, ring: Keyring, promise: Promise, kind: str
) -> None:
    n = promise.size(150, 600)
    held = _held(server, ring, kind, n)
    promise.at_most(f"memory of unfinished bodies of 1 MB, {kind}", held, target=64, floor=96, n=n, unit="MB")


def test_large_bodies_of_another_key_arrive_meanwhile(server: Server, ring: Keyring, promise: Promise) -> None:
    n, whole = promise.size(20, 100), 0
    with _unfinished(server, ring.keys["attacker"], "with a declared length", 80):
        for _ in range(n):
            response = httpx.post(
                f"{server.url}/tokenize",
                json={"prompt": "fox " * 100_000},
                headers=ring.headers("victim"),
                timeout=60,
            )
            whole += response.status_code == 200
    promise.all_of("large bodies read while another key holds back 80", whole, n)


def test_more_waiting_bodies_of_a_key_are_refused(server: Server, ring: Keyring, promise: Promise) -> None:
    """Half of 32 MiB is read, 16 bodies, and 32 more wait."""
    with _unfinished(server, ring.keys["attacker"], "with a declared length", 120) as connections:
        waiting, statuses, ends = list(connections), list[int](), time.monotonic() + 10
        while len(statuses) < 70 and time.monotonic() < ends:
            readable, _, _ = select.select(waiting, [], [], 1)
            statuses += [status_of(connection.recv(65536)) for connection in readable]
            waiting = [connection for connection in waiting if connection not in readable]
    assert set(statuses) == {429}
    promise.at_least("bodies refused with 429 out of 120", len(statuses), target=70, n=120)


def test_memory_without_reservations_is_detected(server: Server, ring: Keyring, faults: Faults) -> None:
    """Positive control."""
    with faults.armed("incoming_bodies.unlimited", "remove"):
        assert _held(server, ring, "with a declared length", 150) > 96
