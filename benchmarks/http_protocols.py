"""Comparison of HTTP protocol classes: CPU time of the API process per request and per streamed event.

    python -m benchmarks.http_protocols [--rounds 5]

Each variant serves the same bare ASGI application in a process of its own; the variants take turns in every round.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import h11
import httptools
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.http.connection_limits import ConnectionLimits, HttpLimits
from app.http.http_protocol import HttpProtocol

_EVENT = b"event: token\ndata: " + b'{"text": " word", "index": 7, "id": "req-0123456789abcdef"}'.ljust(120) + b"\n\n"
_STREAMS = 32
_EVENTS = 300
_CLIENTS = 16
_REQUESTS = 150
"""Per client and round."""
_SECONDS = 60.0
_FIELDS = b"Host: localhost\r\nUser-Agent: benchmark/1.0\r\nAccept: */*\r\nAccept-Encoding: identity\r\n"
_BODY = b'{"prompt": "Once upon a time", "max_tokens": 16, "stream": false}'
_GET = b"GET /health/live HTTP/1.1\r\n" + _FIELDS + b"\r\n"
_POST = b"POST /complete HTTP/1.1\r\n" + _FIELDS + b"Content-Type: application/json\r\n"
_POST += b"Authorization: Bearer " + b"x" * 47 + b"\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
_STREAM = b"GET /stream HTTP/1.1\r\n" + _FIELDS + b"\r\n"
_CPU = b"GET /cpu HTTP/1.1\r\n" + _FIELDS + b"\r\n"


class _H11Parser:
    """h11's public API behind httptools' interface, to measure this project's protocol class on h11."""

    def __init__(self, events: HttpProtocol) -> None:
        self._events = events
        self._connection = h11.Connection(h11.SERVER)
        self._request = h11.Request(method="GET", target="/", headers=[("Host", "x")])

    def feed_data(self, data: bytes) -> None:
        self._connection.receive_data(data)
        while True:
            try:
                event = self._connection.next_event()
            except h11.RemoteProtocolError as error:
                raise httptools.HttpParserError(str(error)) from error
            if isinstance(event, h11.Request):
                self._request = event
                self._events.on_message_begin()
                self._events.on_url(event.target)
                for name, value in event.headers:
                    self._events.on_header(name, value)
                self._events.on_headers_complete()
            elif isinstance(event, h11.Data):
                self._events.on_body(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                self._events.on_message_complete()
                rest = self._connection.trailing_data[0]
                self._connection = h11.Connection(h11.SERVER)
                if rest:  # an empty feed means end of stream to h11
                    self._connection.receive_data(rest)
            else:
                return

    def get_method(self) -> bytes:
        return self._request.method

    def get_http_version(self) -> str:
        return self._request.http_version.decode()

    def should_keep_alive(self) -> bool:
        return True

    def should_upgrade(self) -> bool:
        return False


class _ConnectionOnH11(HttpProtocol):
    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.parser = _H11Parser(self)  # type: ignore[assignment]


def _ours(protocol: type[HttpProtocol]) -> Callable[[], Any]:
    seconds = dict.fromkeys(
        ("head_seconds", "body_seconds", "response_seconds", "write_seconds", "idle_seconds"), _SECONDS
    )
    sizes = {"header_bytes": 16384, "headers": 100, "url_bytes": 8192}
    limits = HttpLimits(connections=1000, per_address=1000, **sizes, **seconds)  # type: ignore[arg-type]
    return lambda: functools.partial(protocol, ConnectionLimits(limits))


_VARIANTS: dict[str, Callable[[], Any]] = {
    "ours, httptools": _ours(HttpProtocol),
    "ours, h11": _ours(_ConnectionOnH11),
    "uvicorn, httptools": lambda: HttpToolsProtocol,
    "uvicorn, h11": lambda: H11Protocol,
}


async def _application(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in range(_EVENTS):
            await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})
        return
    while (await receive()).get("more_body"):
        pass
    body = b"%.9f" % time.process_time() if scope["path"] == "/cpu" else b'{"text": "' + b"a" * 300 + b'"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _serve(variant: str, listener: socket.socket) -> None:
    config = uvicorn.Config(
        _application,
        http=cast(type[asyncio.Protocol], _VARIANTS[variant]()),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
    )
    uvloop.run(uvicorn.Server(config).serve(sockets=[listener]))


class _Client:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def fetch(self, request: bytes) -> bytes:
        """Sends a request, and returns the body of its response, which has a Content-Length."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return await self._reader.readexactly(int(length.partition(b":")[2]))

    async def fetch_many(self, request: bytes, n: int) -> None:
        for _ in range(n):
            await self.fetch(request)

    async def stream(self) -> None:
        self._writer.write(_STREAM)
        await self._reader.readuntil(b"\r\n0\r\n\r\n")


async def _connected(port: int, n: int) -> list[_Client]:
    return [_Client(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)) for _ in range(n)]


async def _measure(port: int) -> dict[str, float]:
    """Measures one round of one variant."""
    clients = await _connected(port, _STREAMS)
    figures: dict[str, float] = {}
    n = _CLIENTS * _REQUESTS
    for name, request in (("GET", _GET), ("POST", _POST)):
        before, began = float(await clients[0].fetch(_CPU)), time.perf_counter()
        await asyncio.gather(*(client.fetch_many(request, _REQUESTS) for client in clients[:_CLIENTS]))
        figures[f"{name}, requests/s"] = n / (time.perf_counter() - began)
        figures[f"{name}, us of CPU"] = 1e6 * (float(await clients[0].fetch(_CPU)) - before) / n
    before = float(await clients[0].fetch(_CPU))
    await asyncio.gather(*(client.stream() for client in clients))
    figures["event, us of CPU"] = 1e6 * (float(await clients[0].fetch(_CPU)) - before) / (_STREAMS * _EVENTS)
    return figures


@contextmanager
def _servers() -> Iterator[dict[str, int]]:
    """Starts the servers; maps variants to ports."""
    processes, ports = [], {}
    context = multiprocessing.get_context("spawn")
    try:
        for variant in _VARIANTS:
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            process = context.Process(target=_serve, args=(variant, listener), daemon=True)
            process.start()
            processes.append(process)
            ports[variant] = listener.getsockname()[1]
        yield ports
    finally:
        for process in processes:
            process.kill()


def main() -> None:
    """Prints the medians as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    figures: dict[str, list[dict[str, float]]] = {variant: [] for variant in _VARIANTS}
    with _servers() as ports:
        for _ in range(rounds + 1):  # the first round is the warm-up
            for variant, port in ports.items():
                figures[variant].append(uvloop.run(_measure(port)))
    columns = list(figures["ours, h11"][0])
    print("| protocol |", " | ".join(columns), "|\n|---|" + "---|" * len(columns))
    for variant, values in figures.items():
        cells = [f"{statistics.median(value[column] for value in values[1:]):.4g}" for column in columns]
        print(f"| {variant} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
