"""A running service that asks for keys, its keys, and raw requests that no HTTP library would send."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from app.access.api_keys import add_key, new_key, revoke_key, stored
from tests.support.http.raw_client import status_of as status_of
from tests.support.servers import Server


@dataclass(slots=True)
class Keyring:
    """A keys file and the keys that tests know from it."""

    file: Path
    keys: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, file: Path, *names: str) -> Keyring:
        """New keys without quotas."""
        ring = cls(file)
        for name in names:
            ring.add(name)
        return ring

    def add(self, name: str, **limits: Any) -> str:
        """A new key, with the quotas of app/access/api_keys.py."""
        self.keys[name] = new_key()
        add_key(self.file, stored(self.keys[name], name, **limits))
        return self.keys[name]

    def revoke(self, name: str) -> str:
        """The key that is none any more."""
        revoke_key(self.file, name)
        return self.keys.pop(name)

    def headers(self, name: str) -> dict[str, str]:
        """For httpx."""
        return bearer(self.keys[name])


def bearer(key: str) -> dict[str, str]:
    """The header of a key."""
    return {"Authorization": f"Bearer {key}"}


def exchange(url: str, request: bytes, *, seconds: float = 60.0) -> bytes:
    """All that a service answers to these bytes until it closes, or is silent for that long."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        received = b""
        # A service that refuses a body unread may be done before all of it was sent.
        with contextlib.suppress(TimeoutError, ConnectionError):
            connection.sendall(request)
            while part := connection.recv(65536):
                received += part
    return received


def raw(method: str, target: str, *headers: str, body: bytes = b"") -> bytes:
    """A request in HTTP/1.1 that ends its connection; `headers` may be wrong in any way."""
    lines = [f"{method} {target} HTTP/1.1", *headers, "Connection: close"]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def log_lines(server: Server) -> list[dict[str, Any]]:
    """The lines of a log in JSON so far; fails where one is no JSON object."""
    lines = server.log_text().splitlines()
    parsed = [json.loads(line) for line in lines]
    assert all(isinstance(line, dict) and {"time", "level", "message"} <= line.keys() for line in parsed)
    return parsed


def request_lines(server: Server) -> list[dict[str, Any]]:
    """Log lines about a request."""
    return [line for line in log_lines(server) if line["message"] == "request"]


def line_of(server: Server, answer: httpx.Response) -> dict[str, Any]:
    """The one line of this request, once it is written."""
    request_id = answer.headers["x-request-id"]
    assert server.has_logged(request_id)
    (line,) = [line for line in request_lines(server) if line["request_id"] == request_id]
    return line
