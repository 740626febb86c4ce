"""R6: Connections that send nothing, or half a request head, are closed to make room for clients that send a request.

A connection that is being answered, or whose body arrives, is never closed for that.

Behind nginx, which is one address to the service, nginx closes silent and idle connections in the same way, but not
those with half a head: beyond worker_connections they keep others out until client_header_timeout. Its limit_conn
bounds the requests of one client.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.http.nginx import needs_nginx, running_nginx
from tests.support.http.raw_client import STREAM, get, post, read_all, status_of
from tests.support.http.socket_queues import has_read_all
from tests.support.promise_figures import Promise
from tests.support.servers import Server, start_server, stop_server

MOST, OF_ONE = 40, 20
HALF_HEAD, HALF_BODY = get()[:-2], post({"prompt": "a" * 100})[:-50]
KINDS = {"silent": b"", "half a head": HALF_HEAD, "idle": get()}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Server]:
    """A service that lets few in."""
    flags = (f"--max-connections={MOST}", f"--max-connections-per-address={OF_ONE}")
    server = start_server(tmp_path_factory.mktemp("small"), weights, *flags, fake_ms=1)
    yield server
    assert stop_server(server) == 0
    assert "Traceback" not in server.log.read_text()


@pytest.fixture
def connections(small: Server) -> Iterator[list[socket.socket]]:
    """Connections; the fixture closes them and waits until the service has dropped them."""
    connections: list[socket.socket] = []
    yield connections
    for connection in connections:
        connection.close()
    assert small.wait_for(lambda: small.metric("connections") <= 1)


def _connect(url: str, address: str, data: bytes = b"") -> socket.socket:
    port = int(url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), 60, source_address=(address, 0))
    connection.sendall(data)
    return connection


def _ask(url: str, address: str) -> int:
    body = {"prompt": "a", "max_tokens": 2, "stream": False}
    with _connect(url, address, post(body, "/complete", "Connection: close")) as connection:
        return status_of(read_all(connection))


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(65536))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [1, 5])
def test_a_crowd_keeps_no_other_client_out(
    small: Server, connections: list[socket.socket], promise: Promise, kind: str, times: int
) -> None:
    for _ in range(OF_ONE * times):
        connections += [_connect(small.url, address, KINDS[kind]) for address in ("127.0.0.2", "127.0.0.3")]
    assert small.wait_for(lambda: has_read_all(small))
    answers = [_ask(small.url, address) for address in ("127.0.0.9", "127.0.0.2", "127.0.0.3") for _ in range(5)]
    promise.all_of(f"requests answered beside a crowd that is {kind}", answers.count(200), len(answers))


@pytest.mark.parametrize("data", [HALF_BODY, post({**STREAM, "max_tokens": 8000})], ids=["body", "answer"])
def test_who_has_a_request_is_not_sent_off(small: Server, connections: list[socket.socket], data: bytes) -> None:
    """The reverse: where no connection is idle, the service evicts none, and existing connections stay."""
    connections += [_connect(small.url, address, data) for _ in range(OF_ONE) for address in ("127.0.0.2", "127.0.0.3")]
    assert small.wait_for(lambda: has_read_all(small))  # until then they are as silent as any
    assert [_ask(small.url, address) for address in ("127.0.0.9", "127.0.0.2")] == [503, 503]
    assert all(_is_open(connection) for connection in connections)


@needs_nginx
def test_behind_nginx_one_client_cannot_take_all_connections(
    small: Server, connections: list[socket.socket], tmp_path: Path
) -> None:
    """deploy/nginx/inkstream.conf, with lower limits."""
    text = (ROOT / "deploy/nginx/inkstream.conf").read_text()
    for old, new in {
        "inkstream:8000": small.url.removeprefix("http://"),
        "listen 8080": "listen 127.0.0.1:PORT",
        "inkstream_clients 1024": "inkstream_clients 5",
    }.items():
        assert old in text
        text = text.replace(old, new)
    with running_nginx(tmp_path, text, f"worker_connections {MOST};") as url:
        connections += [_connect(url, "127.0.0.2", HALF_BODY) for _ in range(5)]
        assert small.wait_for(lambda: _ask(url, "127.0.0.2") == 503)
        assert _ask(url, "127.0.0.9") == 200
        for data in (b"", get("/health/live")):
            connections += [_connect(url, "127.0.0.3", data) for _ in range(2 * MOST)]
            assert _ask(url, "127.0.0.9") == 200
