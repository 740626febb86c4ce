"""HTTP byte by byte on a plain socket, as no client library would send it."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any
from urllib.parse import urlsplit

from tests.support.servers import Server

STREAM: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
PATIENCE = 60.0
"""Time-out in seconds for events without a deadline of their own."""


def connect(server: Server, *, receive_buffer: int | None = None) -> socket.socket:
    """A connection with patience of a minute; one with a small buffer fills up soon when it is not read."""
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(PATIENCE)
    parts = urlsplit(server.url)
    connection.connect((parts.hostname, parts.port))
    return connection


def reset(connection: socket.socket) -> None:
    """Closes it with a RST, whatever there is to read."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def get(path: str = "/health/live", *headers: str) -> bytes:
    """A GET; headers as `Name: value`."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def post(body: dict[str, Any], path: str = "/complete", *headers: str) -> bytes:
    """A POST of JSON."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + data


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes; a reset is an end, too."""
    got = b""
    try:
        while part := connection.recv(65536):
            got += part
    except ConnectionError:
        pass
    return got


def read_answer(connection: socket.socket) -> bytes:
    """Reads one answer with a Content-Length, while the connection stays open."""
    got = b""
    while b"\r\n\r\n" not in got:
        part = connection.recv(1)
        assert part, got
        got += part
    (length,) = [int(v) for k, _, v in (line.partition(b": ") for line in got.split(b"\r\n")) if k == b"content-length"]
    while length > 0:
        part = connection.recv(length)
        assert part, got
        got, length = got + part, length - len(part)
    return got


def status_of(answer: bytes) -> int:
    """The status of the first answer in there; 0 where there is none."""
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0


def error_of(answer: bytes) -> dict[str, Any]:
    """The error object of the only answer in there, whose header names its request too."""
    head, _, body = answer.partition(b"\r\n\r\n")
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) >= {"message", "type", "param", "code", "request_id"}
    assert f"x-request-id: {error['request_id']}".encode() in head.lower()
    return error


def seconds_until_close(connection: socket.socket) -> tuple[float, bytes]:
    """How long the server keeps it, and what it says."""
    began = time.monotonic()
    said = read_all(connection)
    return time.monotonic() - began, said


def dribble(connection: socket.socket, data: bytes, pause: float) -> bytes:
    """Sends a byte at a time until all is sent or the server has something to say; that, until the close."""
    connection.settimeout(pause)
    for i in range(len(data)):
        try:
            connection.sendall(data[i : i + 1])
            if said := connection.recv(1):
                connection.settimeout(PATIENCE)
                return said + read_all(connection)
            return b""
        except TimeoutError:
            continue
        except ConnectionError:
            return b""
    connection.settimeout(PATIENCE)
    return read_all(connection)
