"""Raw HTTP on a plain socket, for requests that no client library would send."""

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
"""Default timeout in seconds."""


def connect(server: Server, *, receive_buffer: int | None = None) -> socket.socket:
    """Connects with a timeout of a minute; a small `receive_buffer` soon fills up if the test does not read."""
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(PATIENCE)
    parts = urlsplit(server.url)
    connection.connect((parts.hostname, parts.port))
    return connection


def reset(connection: socket.socket) -> None:
    """Closes the connection with a RST, also with unread data."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def get_request(path: str = "/health/live", *headers: str) -> bytes:
    """The bytes of a GET request; headers as `Name: value`."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def post_request(body: dict[str, Any], path: str = "/complete", *headers: str) -> bytes:
    """The bytes of a POST request with a JSON body."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + data


def read_all(connection: socket.socket) -> bytes:
    """Reads until the server closes or resets the connection."""
    got = b""
    try:
        while part := connection.recv(65536):
            got += part
    except ConnectionError:
        pass
    return got


def read_response(connection: socket.socket) -> bytes:
    """Reads one response with a Content-Length from an open connection."""
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
    """Status of the first response in these bytes; 0 if there is none."""
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0


def error_of(answer: bytes) -> dict[str, Any]:
    """The error object of the only response in these bytes; checks its fields and its X-Request-Id."""
    head, _, body = answer.partition(b"\r\n\r\n")
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) >= {"message", "type", "param", "code", "request_id"}
    assert f"x-request-id: {error['request_id']}".encode() in head.lower()
    return error


def seconds_until_close(connection: socket.socket) -> tuple[float, bytes]:
    """Seconds until the server closes the connection, and what it sent."""
    began = time.monotonic()
    received = read_all(connection)
    return time.monotonic() - began, received


def send_slowly(connection: socket.socket, data: bytes, pause: float) -> bytes:
    """Sends a byte per `pause` until all is sent or the server responds; returns the response until the close."""
    connection.settimeout(pause)
    for i in range(len(data)):
        try:
            connection.sendall(data[i : i + 1])
            if received := connection.recv(1):
                connection.settimeout(PATIENCE)
                return received + read_all(connection)
            return b""
        except TimeoutError:
            continue
        except ConnectionError:
            return b""
    connection.settimeout(PATIENCE)
    return read_all(connection)
