"""An HTTP/1.1 client on plain sockets that sends any bytes and parses answers strictly."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any


class MalformedAnswer(Exception):
    """The service sent bytes that are not a sequence of HTTP/1.1 responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of the service."""

    host: str
    port: int

    def connect(self, *, timeout: float = 10.0, receive_buffer: int = 0) -> socket.socket:
        """An open connection; a small receive buffer makes a slow reader felt early."""
        connection = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(timeout)
        try:
            connection.connect((self.host, self.port))
        except OSError:
            connection.close()
            raise
        return connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One final response."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    seconds: float = 0.0

    def header(self, name: str) -> str | None:
        """The first header of that name."""
        return next((value for key, value in self.headers if key == name.lower()), None)

    def json(self) -> Any:
        """The body as JSON; None where it is not JSON."""
        with suppress(ValueError):
            return json.loads(self.body)
        return None


def request_bytes(
    method: str,
    path: str,
    *,
    key: str | None = None,
    body: bytes | None = None,
    headers: Iterable[str] = (),
) -> bytes:
    """A well-formed request; a body comes with its Content-Length and as JSON."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1"]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1", "replace") + (body or b"")


def call(
    address: Address,
    method: str,
    path: str,
    *,
    key: str | None = None,
    body: Any = None,
    headers: Iterable[str] = (),
    timeout: float = 30.0,
) -> Answer:
    """One request on a connection of its own; bytes are sent as they are, other bodies as JSON.

    Raises:
        OSError: no connection, no answer within the timeout, or a reset.
        MalformedAnswer: the answer is not HTTP, or more than one.
    """
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    began = time.monotonic()
    with address.connect(timeout=timeout) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # an early refusal may close before all is sent
            connection.sendall(request_bytes(method, path, key=key, body=data, headers=[*headers, "Connection: close"]))
        raw = read_until_close(connection, seconds=timeout)
    answers = parse_answers(raw)
    if not answers:
        raise TimeoutError(f"no complete answer in {timeout:.0f} s, only {raw[:80]!r}")
    if len(answers) > 1:
        raise MalformedAnswer(f"{len(answers)} answers to one request")
    final = answers[0]
    return Answer(status=final.status, headers=final.headers, body=final.body, seconds=time.monotonic() - began)


def read_until_close(connection: socket.socket, *, seconds: float, most: int = 64 << 20) -> bytes:
    """What arrives until the service closes, a reset, the time limit, or so many bytes."""
    parts, size, ends = [], 0, time.monotonic() + seconds
    with suppress(OSError):
        while size < most:
            connection.settimeout(max(0.001, ends - time.monotonic()))
            part = connection.recv(1 << 16)
            if not part:
                break
            parts.append(part)
            size += len(part)
    return b"".join(parts)


def read_answer(connection: socket.socket, pending: bytes = b"") -> tuple[Answer | None, bytes]:
    """The next final response of a connection that stays open, and the bytes behind it; None at its end."""
    raw = pending
    while True:
        with suppress(_Incomplete):
            answer, rest = _parse_one(raw)
            if answer.status >= 200:
                return answer, rest
            raw = rest
            continue
        try:
            part = connection.recv(1 << 16)
        except OSError:
            return None, raw
        if not part:
            return None, raw
        raw += part


def parse_answers(raw: bytes) -> list[Answer]:
    """All final responses in there; an incomplete one at the end is left out.

    Raises:
        MalformedAnswer: some bytes are not a response.
    """
    answers = []
    while raw:
        try:
            answer, raw = _parse_one(raw)
        except _Incomplete:
            break
        if answer.status >= 200:
            answers.append(answer)
    return answers


class _Incomplete(Exception):
    """More bytes are needed."""


def _parse_one(raw: bytes) -> tuple[Answer, bytes]:
    head, separator, rest = raw.partition(b"\r\n\r\n")
    if not raw.startswith(b"HTTP/1.1 "[: len(raw)]):
        raise MalformedAnswer(f"not a status line: {raw[:80]!r}")
    if not separator:
        raise _Incomplete
    first, *lines = head.decode("latin-1").split("\r\n")
    try:
        status = int(first.split(" ")[1])
        headers = tuple((name.lower(), value.strip()) for name, value in (line.split(":", 1) for line in lines))
    except (ValueError, IndexError):
        raise MalformedAnswer(f"not a response head: {head[:200]!r}") from None
    body, rest = _body(status, dict(headers), rest)
    return Answer(status=status, headers=headers, body=body), rest


def _body(status: int, headers: dict[str, str], rest: bytes) -> tuple[bytes, bytes]:
    if status < 200 or status in (204, 304):
        return b"", rest
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return _chunks(rest)
    if "content-length" not in headers:
        raise MalformedAnswer("a response that has neither Content-Length nor chunks")
    length = int(headers["content-length"])
    if len(rest) < length:
        raise _Incomplete
    return rest[:length], rest[length:]


def _chunks(rest: bytes) -> tuple[bytes, bytes]:
    parts, position = [], 0
    while True:
        ends = rest.find(b"\r\n", position)
        if ends < 0:
            raise _Incomplete
        try:
            size = int(rest[position:ends], 16)
        except ValueError:
            raise MalformedAnswer(f"not a chunk size: {rest[position:ends][:40]!r}") from None
        position = ends + 2 + size + 2
        if len(rest) < position:
            raise _Incomplete
        if rest[position - 2 : position] != b"\r\n":
            raise MalformedAnswer("a chunk that is longer than it says")
        parts.append(rest[ends + 2 : position - 2])
        if size == 0:
            return b"".join(parts), rest[position:]


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event, and when it arrived."""

    name: str
    data: Any
    at: float


@contextmanager
def open_stream(
    address: Address,
    body: dict[str, Any],
    *,
    key: str | None,
    timeout: float = 30.0,
    method: str = "POST",
    path: str = "/complete",
    headers: Iterable[str] = (),
) -> Iterator[tuple[int, Iterator[Event]]]:
    """The status and the events of a stream; the end of the block closes the connection."""
    data = json.dumps(body).encode() if method == "POST" else None
    with address.connect(timeout=timeout) as connection:
        connection.sendall(request_bytes(method, path, key=key, body=data, headers=headers))
        head = b""
        while b"\r\n\r\n" not in head:
            part = connection.recv(1 << 16)
            if not part:
                raise ConnectionError("closed before the headers ended")
            head += part
        status = int(head.split(b" ", 2)[1])
        yield status, _events(connection, head.partition(b"\r\n\r\n")[2])


def _events(connection: socket.socket, raw: bytes) -> Iterator[Event]:
    """Events until `done`, `error` or the end."""
    name, text = "", b""
    for part in _decoded_chunks(connection, raw):
        now = time.monotonic()
        *lines, text = (text + part).split(b"\n")
        for line in lines:
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                yield Event(name, json.loads(line[6:]), now)
                if name in ("done", "error"):
                    return


def _decoded_chunks(connection: socket.socket, raw: bytes) -> Iterator[bytes]:
    while True:
        line, separator, rest = raw.partition(b"\r\n")
        if separator and (size := int(line, 16)) + 2 <= len(rest):
            if size == 0:
                return
            yield rest[:size]
            raw = rest[size + 2 :]
            continue
        part = connection.recv(1 << 16)
        if not part:
            return
        raw += part


def token_gaps(events: Iterable[Event]) -> list[float]:
    """Seconds between token events as the client sees them."""
    times = [event.at for event in events if event.name == "token"]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def text_of(events: Iterable[Event]) -> str:
    """The text of a stream of one choice."""
    return "".join(event.data["text"] for event in events if event.name == "token")


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; infinity where nothing was measured."""
    if not values:
        return float("inf")
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
