"""The proxy itself does what it says, and a connection without toxics is as it was."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.support.http.toxic_proxy import ToxicProxy, Toxics


class _Echo(socketserver.BaseRequestHandler):
    """Sends back what it gets, and says `bye` to a FIN."""

    def handle(self) -> None:
        while data := self.request.recv(65536):
            self.request.sendall(data)
        self.request.sendall(b"bye")


@pytest.fixture
def echo() -> Iterator[str]:
    """The address of an echo."""
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield "http://127.0.0.1:{1}".format(*server.server_address)
        server.shutdown()
        thread.join()


def _connect(proxy: ToxicProxy) -> socket.socket:
    parts = urlsplit(proxy.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def _all_of(connection: socket.socket) -> bytes:
    got = b""
    while part := connection.recv(65536):
        got += part
    return got


def test_bytes_and_half_closes_go_through_unchanged(echo: str) -> None:
    with ToxicProxy(echo) as proxy, _connect(proxy) as connection:
        data = bytes(range(256)) * 1000
        threading.Thread(target=lambda: (connection.sendall(data), connection.shutdown(socket.SHUT_WR))).start()
        assert _all_of(connection) == data + b"bye"
        assert proxy.n_connections == 1


def test_exactly_so_many_bytes_arrive_before_a_cut(echo: str) -> None:
    with ToxicProxy(echo, down=Toxics(cut_after=1000)) as proxy:
        for _ in range(3):
            with _connect(proxy) as connection:
                connection.sendall(b"x" * 5000)
                assert len(_all_of(connection)) == 1000


def test_a_reset_is_a_reset(echo: str) -> None:
    with ToxicProxy(echo, down=Toxics(cut_after=10, reset=True)) as proxy, _connect(proxy) as connection:
        connection.sendall(b"x" * 100)
        with pytest.raises(ConnectionResetError):
            _all_of(connection)


def test_all_can_be_dropped_at_once(echo: str) -> None:
    with ToxicProxy(echo) as proxy, _connect(proxy) as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        proxy.drop_all()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_a_stall_keeps_the_connection_and_lets_nothing_through(echo: str) -> None:
    with ToxicProxy(echo, down=Toxics(stall_after=10)) as proxy, _connect(proxy) as connection:
        connection.sendall(b"x" * 100)
        assert len(connection.recv(100)) <= 10
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            _all_of(connection)


def test_pieces_are_small_and_late(echo: str) -> None:
    with ToxicProxy(echo, up=Toxics(chunk=1, latency=0.02)) as proxy, _connect(proxy) as connection:
        began = time.monotonic()
        connection.sendall(b"0123456789")
        assert len(connection.recv(100)) < 10 or time.monotonic() - began >= 0.2, "all of them, and not late"
        connection.shutdown(socket.SHUT_WR)
        _all_of(connection)
        assert time.monotonic() - began >= 0.2
