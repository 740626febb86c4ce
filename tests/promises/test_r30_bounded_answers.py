"""R30: A response of any size is written from bounded memory, and its quota is held until the last byte.

Slow readers take a few bytes per second, so that the write timeout does not disconnect them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.http.raw_client import connect, post_request
from tests.support.keyed_server import Keyring, bearer
from tests.support.processes import memory
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

TEXT = "Once upon a time there was a fox who sang to the moon. "
MAX_MEMORY_KIB = 2048
"""Per reader."""
FLAGS = ("--write-timeout", "600", "--max-running", "64", "--kv-blocks", "40000")


def _anonymous(server: Server) -> int:
    """Anonymous bytes only: the kernel may evict and reload library pages at any time."""
    return memory(server.process.pid, "RssAnon")


@contextmanager
def slow_readers(server: Server, n: int, request: bytes, bytes_per_second: int = 300) -> Iterator[list[socket.socket]]:
    """`n` clients whose responses have started, and which read slowly."""
    stop = threading.Event()

    def read() -> None:
        while not stop.wait(1):
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.recv(bytes_per_second, socket.MSG_DONTWAIT)

    with ExitStack() as stack:
        connections = [stack.enter_context(connect(server, receive_buffer=4096)) for _ in range(n)]
        for connection in connections:
            connection.sendall(request)
        for connection in connections:
            connection.settimeout(120)
            assert connection.recv(12, socket.MSG_PEEK).startswith(b"HTTP/1.1 200"), connection.recv(2000)
        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield connections
        finally:
            stop.set()
            reader.join()


def _memory_and_size(server: Server, n: int, path: str, body: dict[str, Any]) -> tuple[float, float]:
    """KiB of memory per slow reader, and MB of a response."""
    whole = httpx.post(f"{server.url}{path}", json=body, timeout=120)  # also a warm-up
    assert whole.status_code == 200 and whole.json()
    before = _anonymous(server)
    with slow_readers(server, n, post_request(body, path)) as readers:
        time.sleep(2)
        assert len(readers) == n and server.metric("connections") >= n
        held = (_anonymous(server) - before) / n / 1024
    return held, len(whole.content) / 1e6


def _kinds(parts: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Requests whose responses have about 10 MB divided by `parts`."""
    scored = {"prompt": [5, 9, 200, 31] * (1900 // parts), "logprobs": 20}
    written = {"prompt": "a", "n": 4, "max_tokens": 1900 // parts, "logprobs": 20}
    return {
        "tokenize": ("/tokenize", {"prompt": TEXT * (6400 // parts)}),
        "detokenize": ("/detokenize", {"tokens": [262, 300, 270, 310] * (50_000 // parts)}),
        "score": ("/score", scored),
        "complete": ("/complete", {**written, "stream": False, "ignore_eos": True}),
        "completions with echo": ("/v1/completions", {"max_tokens": 0, "echo": True, **scored}),
    }


KINDS = _kinds(1)


@pytest.fixture(scope="module")
def server(serve_module: Services) -> Server:
    """One service for all kinds: memory freed by one kind is small compared with what the next would hold."""
    return serve_module(*FLAGS, fake_ms=1)


@pytest.mark.parametrize("kind", KINDS)
def test_slow_readers_of_large_responses_hold_little_memory(server: Server, promise: Promise, kind: str) -> None:
    n = promise.size(16, 25)
    held, megabytes = promise.measured(
        lambda: _memory_and_size(server, n, *KINDS[kind]), lambda found: found[0] <= MAX_MEMORY_KIB
    )
    print(kind, held, megabytes)
    assert megabytes > 6, "the response must be large"
    promise.at_most(f"memory of a slow reader ({kind})", held, target=MAX_MEMORY_KIB, unit="KiB", n=n)
    assert server.wait_for(lambda: server.metric("connections") <= 1, 60)


def test_encoding_the_whole_response_at_once_is_detected(serve: Services, faults: Faults) -> None:
    """Positive control: the service encodes the response before it sends the first byte."""
    faults.arm("json_stream.at_once", "yes")
    server = serve(*FLAGS, fake_ms=1, environment=faults.removing("json_stream.at_once"))
    assert _memory_and_size(server, 3, *KINDS["tokenize"])[0] > 2 * MAX_MEMORY_KIB


def _status(server: Server, path: str, body: dict[str, Any], key: str) -> int:
    return httpx.post(f"{server.url}{path}", json=body, headers=bearer(key), timeout=60).status_code


def test_quota_is_held_until_the_last_byte_or_the_deadline(serve: Services, tmp_path: Path, promise: Promise) -> None:
    """Two keys with concurrency 4: a fifth request gets 429 until the response deadline ends the four."""
    ring = Keyring.of(tmp_path / "keys.json", "metrics")
    kinds = {kind: ring.add(kind, concurrency=4) for kind in ("tokenize", "score")}
    # The sum is the deadline, 33 s, so eight responses can start in time on a busy machine. Its readers empty their
    # buffers each second: the server learns of smaller reads late, and then the write timeout would end them first.
    seconds = ("--request-timeout", "20", "--body-timeout", "1", "--write-timeout", "12")
    server = serve(*FLAGS, *seconds, "--keys-file", str(ring.file), fake_ms=1)

    def cut() -> float:
        return server.metric('connections_cut_total{reason="answer_timeout"}', ring.headers("metrics"))

    def short(kind: str) -> int:
        return _status(server, "/tokenize", {"prompt": "a"}, kinds[kind])

    with ExitStack() as stack:
        for kind, key in kinds.items():
            path, body = _kinds(4)[kind]  # still more than the kernel and the transport buffer
            request = post_request(body, path, f"Authorization: Bearer {key}")
            stack.enter_context(slow_readers(server, 4, request, bytes_per_second=4096))
            statuses = [short(kind) for _ in range(3)]
            promise.all_of(f"requests beyond a key's concurrency that get 429 ({kind})", statuses.count(429), 3)
        began = time.monotonic()
        assert server.wait_for(lambda: cut() == 8, 73), server.metrics_text(ring.headers("metrics"))
        late = time.monotonic() - began
        for kind in kinds:
            freed = server.wait_for(lambda kind=kind: short(kind) == 200, 10)
            ended = 4 if freed and late < 43 else 0
            promise.all_of(f"slow readers ended by the deadline ({kind})", ended, 4)
    assert "without completing" not in server.log.read_text()


def test_quota_is_released_after_the_response_or_a_disconnect(serve: Services, tmp_path: Path) -> None:
    ring = Keyring(tmp_path / "keys.json")
    key = ring.add("one", concurrency=1)
    server = serve(*FLAGS, "--keys-file", str(ring.file), fake_ms=1)
    # Still more than the kernel and the transport buffer.
    for kind, (path, body) in _kinds(4).items():
        assert [_status(server, path, body, key) for _ in range(2)] == [200, 200], kind
        with slow_readers(server, 1, post_request(body, path, f"Authorization: Bearer {key}")):
            assert _status(server, path, body, key) == 429
        assert server.wait_for(lambda path=path, body=body: _status(server, path, body, key) == 200, 10)
