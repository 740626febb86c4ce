"""API keys of a service, raw requests that no HTTP library would send, and JSON log lines."""

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
    """A keys file and the secret keys in it, by name."""

    file: Path
    keys: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, file: Path, *names: str) -> Keyring:
        """Makes a keys file with new keys without quotas."""
        ring = cls(file)
        for name in names:
            ring.add(name)
        return ring

    def add(self, name: str, **limits: Any) -> str:
        """Adds a new key with quotas (app/access/api_keys.py), and returns it."""
        self.keys[name] = new_key()
        add_key(self.file, stored(self.keys[name], name, **limits))
        return self.keys[name]

    def revoke(self, name: str) -> str:
        """Revokes a key, and returns it."""
        revoke_key(self.file, name)
        return self.keys.pop(name)

    def headers(self, name: str) -> dict[str, str]:
        """Request headers with a key."""
        return bearer(self.keys[name])


def bearer(key: str) -> dict[str, str]:
    """The Authorization header of a key."""
    return {"Authorization": f"Bearer {key}"}


def send_raw(url: str, request: bytes, *, seconds: float = 60.0) -> bytes:
    """Sends bytes, and returns the response until the service closes the connection or is silent for `seconds`."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        received = b""
        # A service that rejects a request before reading its body may close before all of it was sent.
        with contextlib.suppress(TimeoutError, ConnectionError):
            connection.sendall(request)
            while part := connection.recv(65536):
                received += part
    return received


def raw_request(method: str, target: str, *headers: str, body: bytes = b"") -> bytes:
    """An HTTP/1.1 request with Connection: close; `headers` may be malformed."""
    lines = [f"{method} {target} HTTP/1.1", *headers, "Connection: close"]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def log_lines(server: Server) -> list[dict[str, Any]]:
    """The parsed lines of a JSON log so far; fails if a line is not a JSON object."""
    lines = server.log_text().splitlines()
    parsed = [json.loads(line) for line in lines]
    assert all(isinstance(line, dict) and {"time", "level", "message"} <= line.keys() for line in parsed)
    return parsed


def request_lines(server: Server) -> list[dict[str, Any]]:
    """Log lines of requests."""
    return [line for line in log_lines(server) if line["message"] == "request"]


def wait_for_log_line(server: Server, answer: httpx.Response) -> dict[str, Any]:
    """Waits for the log line of this request; there must be exactly one."""
    request_id = answer.headers["x-request-id"]
    assert server.has_logged(request_id)
    (line,) = [line for line in request_lines(server) if line["request_id"] == request_id]
    return line
