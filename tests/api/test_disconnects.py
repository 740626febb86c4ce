"""Clients that disconnect, in every state: their resources are freed at once, long before their texts would end."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.completion_client import whole
from tests.support.model.tiny_models import tiny_weights
from tests.support.servers import Server, is_clean, start_server, stop_server

pytestmark = pytest.mark.slow

# 40 of these take minutes unless they are canceled.
ENDLESS: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True}
SOON = 30.0  # how soon is promised in tests/promises/test_r04_leaving_clients.py
_HEAD = b"POST /complete HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def long_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a long context."""
    return tiny_weights(tmp_path_factory.mktemp("long") / "tiny", context=8192)


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory, long_weights: Path) -> Iterator[Server]:
    """A service whose requests last."""
    server = start_server(tmp_path_factory.mktemp("server"), long_weights)
    yield server
    assert stop_server(server) == 0
    assert "Traceback" not in server.log.read_text()


def _request(server: Server, *, stream: bool, seed: int = 0) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(ENDLESS | {"stream": stream, "seed": seed}).encode()
    connection.sendall(_HEAD % len(data) + data)
    return connection


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("disconnect", [socket.socket.close, _reset])
@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_free_everything(
    long_server: Server, stream: bool, disconnect: Callable[[socket.socket], None]
) -> None:
    """40 clients, more than run at once, so that some disconnect while queued."""
    connections = [_request(long_server, stream=stream, seed=i) for i in range(40)]
    assert long_server.wait_for(lambda: long_server.metric("requests_waiting") > 0)
    if stream:
        assert connections[0].recv(10)
    for connection in connections:
        disconnect(connection)
    assert is_clean(long_server, SOON)


def test_many_that_leave_at_random_moments_leave_nothing_behind(long_server: Server) -> None:
    def visit(i: int) -> None:
        connection = _request(long_server, stream=bool(i % 3), seed=i)
        time.sleep(0.003 * (i % 17))
        connection.close()

    threads = [threading.Thread(target=visit, args=(i,)) for i in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_clean(long_server, SOON)
    assert whole(long_server.url, prompt="a", max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error(long_server: Server) -> None:
    host, port = long_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(_HEAD % 1000 + b'{"prompt": "a')
        time.sleep(0.2)
    time.sleep(0.2)
    assert "Traceback" not in long_server.log.read_text()


def test_a_service_that_forgets_to_free_is_noticed(tmp_path: Path, long_weights: Path) -> None:
    """Positive control: the same visit to a service whose streams do not close."""
    sabotage = (
        "from app.engine_client.token_stream import TokenStream as Stream; "
        "Stream.close = Stream.pause = lambda self: None"
    )
    server = start_server(tmp_path, long_weights, sabotage=sabotage)
    try:
        connections = [_request(server, stream=True, seed=i) for i in range(40)]
        assert server.wait_for(lambda: server.metric("requests_waiting") > 0)
        for connection in connections:
            connection.close()
        assert not is_clean(server, 3.0), "and so it stays for minutes"
    finally:
        server.process.kill()
        server.process.wait()
