"""An HTTP/1.1 client on plain sockets that sends any bytes and parses responses strictly."""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, BinaryIO


class MalformedResponse(ValueError):
    """The service sent bytes that are not a sequence of HTTP/1.1 responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of the service."""

    host: str
    port: int

    def connect(self, *, timeout: float = 10.0) -> socket.socket:
        """An open connection that sends at once."""
        connection = socket.create_connection((self.host, self.port), timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A final response; `headers` has the first value of each name, in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float = 0.0

    def json(self) -> Any:
        """The body as JSON; None where it is not JSON."""
        with suppress(ValueError):
            return json.loads(self.body)
        return None


def as_json(value: object) -> str:
    """The body as one line, to send or for a reproduction."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def request_bytes(
    method: str, path: str, *, key: str | None = None, body: Any = None, headers: Iterable[str] = ()
) -> bytes:
    """A well-formed request; a body comes with its Content-Length, bytes as they are and anything else as JSON."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1"]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    data = b""
    if body is not None:
        data = body if isinstance(body, bytes) else as_json(body).encode()
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1", "replace") + data


def call(
    address: Address,
    method: str,
    path: str,
    *,
    key: str | None = None,
    body: Any = None,
    headers: Iterable[str] = (),
    timeout: float = 30.0,
) -> Response:
    """One request on a connection of its own.

    Raises:
        OSError: no connection, no response within the timeout, or a reset.
        MalformedResponse: the response is not HTTP, or more than one.
    """
    message = request_bytes(method, path, key=key, body=body, headers=[*headers, "Connection: close"])
    began = time.monotonic()
    with address.connect(timeout=timeout) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # an early refusal may close before all is sent
            connection.sendall(message)
        raw = read_until_close(connection, seconds=timeout)
    responses = parse_responses(raw)
    if not responses:
        raise TimeoutError(f"no complete response in {timeout:.0f} s, only {raw[:80]!r}")
    if len(responses) > 1:
        raise MalformedResponse(f"{len(responses)} responses to one request")
    return replace(responses[0], seconds=time.monotonic() - began)


def read_until_close(connection: socket.socket, *, seconds: float, most: int = 64 << 20) -> bytes:
    """What is received until the service closes or resets, the time limit, or this many bytes."""
    raw, ends = bytearray(), time.monotonic() + seconds
    with suppress(OSError):
        while len(raw) < most:
            connection.settimeout(max(0.001, ends - time.monotonic()))
            part = connection.recv(1 << 16)
            if not part:
                break
            raw += part
    return bytes(raw)


def parse_responses(raw: bytes) -> list[Response]:
    """All final responses; an incomplete one at the end is left out. Raises MalformedResponse."""
    responses, file = [], io.BytesIO(raw)
    with suppress(ConnectionError):
        while file.tell() < len(raw):
            responses.append(next_response(file))
    return responses


def next_response(file: BinaryIO) -> Response:
    """The next final response.

    Raises:
        ConnectionError: the bytes end before it does.
        MalformedResponse: it is not one.
    """
    status, headers = _head(file)
    while status < 200:
        status, headers = _head(file)
    if status in (204, 304):
        body = b""
    elif headers.get("transfer-encoding", "").lower() == "chunked":
        body = b"".join(_chunks(file))
    elif "content-length" in headers:
        body = _exactly(file, int(headers["content-length"]))
    else:
        raise MalformedResponse("a response that has neither Content-Length nor chunks")
    return Response(status=status, headers=headers, body=body)


def _head(file: BinaryIO) -> tuple[int, dict[str, str]]:
    version, _, rest = _line(file).partition(" ")
    if version != "HTTP/1.1" or not rest[:3].isdecimal():
        raise MalformedResponse(f"not a status line: {version} {rest}"[:80])
    headers: dict[str, str] = {}
    while line := _line(file):
        name, colon, value = line.partition(":")
        if not colon:
            raise MalformedResponse(f"not a header: {line[:80]!r}")
        headers.setdefault(name.lower(), value.strip())
    return int(rest[:3]), headers


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    size = 1
    while size:
        line = _line(file)
        try:
            size = int(line, 16)
        except ValueError:
            raise MalformedResponse(f"not a chunk size: {line[:40]!r}") from None
        yield _exactly(file, size)
        if _line(file):
            raise MalformedResponse("a chunk that is longer than it says")


def _line(file: BinaryIO) -> str:
    line = file.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("the bytes end within a response")
    if not line.endswith(b"\r\n"):
        raise MalformedResponse(f"a line without CR: {line[:80]!r}")
    return line[:-2].decode("latin-1")


def _exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise ConnectionError("the bytes end within a response")
    return data


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event, and when it arrived."""

    name: str
    data: Any
    at: float


@contextmanager
def open_stream(
    address: Address, body: dict[str, Any], *, key: str | None, timeout: float = 30.0
) -> Iterator[tuple[int, Iterator[Event]]]:
    """The status and the events of POST /complete; the end of the block closes the connection."""
    with address.connect(timeout=timeout) as connection, connection.makefile("rb") as file:
        connection.sendall(request_bytes("POST", "/complete", key=key, body=body))
        yield _head(file)[0], _events(file)


def _events(file: BinaryIO) -> Iterator[Event]:
    """Events until `done`, `error` or the end."""
    name, text = "", b""
    for part in _chunks(file):
        now = time.monotonic()
        *lines, text = (text + part).split(b"\n")
        for line in lines:
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                yield Event(name, json.loads(line[6:]), now)
                if name in ("done", "error"):
                    return


def token_gaps(events: Iterable[Event]) -> list[float]:
    """Seconds between token events as the client sees them."""
    return [later - earlier for earlier, later in pairwise(e.at for e in events if e.name == "token")]


def text_of(events: Iterable[Event]) -> str:
    """The text of a stream of one choice."""
    return "".join(event.data["text"] for event in events if event.name == "token")


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; infinity where nothing was measured."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("inf")
