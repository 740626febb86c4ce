"""Each request is logged in one line of JSON, however it ends, with its id, route, outcome and times."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.keyed_server import Keyring, log_lines, raw_request, request_lines, wait_for_log_line
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

FIELDS = {"time", "level", "message", "request_id", "method", "route", "status", "key", "outcome", "duration_ms"}
COMPLETION_FIELDS = {
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "queue_ms",
    "first_token_ms",
    "tokens_per_second",
}


@pytest.fixture(scope="module")
def logged(
    serve_module: Services, tmp_path_factory: pytest.TempPathFactory, faults: Faults
) -> Iterator[tuple[Server, Keyring]]:
    ring = Keyring.of(tmp_path_factory.mktemp("logged") / "keys.json", "alice")
    flags = ("--log-format", "json", "--log-level", "debug")  # probes and scrapes are logged at this level
    running = serve_module(*flags, ring=ring, fake_ms=1, environment=faults.environment)
    yield running, ring
    assert all(line["level"] in ("debug", "info", "warning") for line in log_lines(running))


def test_every_kind_of_request_end_is_logged_in_one_line(logged: tuple[Server, Keyring], promise: Promise) -> None:
    server, ring = logged
    alice, text = ring.headers("alice"), {"prompt": "x", "max_tokens": 3}
    key, wrong = {"headers": alice}, "invalid_request_error"
    long, short = {**key, "json": {"prompt": "x" * 90000}}, {**key, "json": text}
    cases: list[tuple[str, str, dict[str, Any], str | None, int, str]] = [
        ("POST", "/complete", short, "/complete", 200, "length"),
        ("POST", "/complete", {**key, "json": {**text, "stream": False}}, "/complete", 200, "length"),
        ("POST", "/v1/completions", short, "/v1/completions", 200, "length"),
        ("POST", "/score", {**key, "json": {"prompt": "x"}}, "/score", 200, "length"),
        ("POST", "/complete", {**key, "json": {**text, "top_p": 2}}, "/complete", 400, wrong),
        ("POST", "/complete?a=b", {**key, "content": "{"}, "/complete", 415, wrong),
        ("POST", "/complete", {**key, "json": {"prompt": "x" * (1 << 20)}}, "/complete", 413, "body_too_large"),
        ("POST", "/complete", long, "/complete", 400, "context_length_exceeded"),
        ("POST", "/complete", {"json": text}, None, 401, "missing_api_key"),
        ("GET", "/nothing", key, None, 404, "not_found_error"),
        ("GET", "/v1/models/other", key, "/v1/models/{model_id:path}", 404, "model_not_found"),
        ("PATCH", "/complete", key, "/complete", 405, wrong),
        ("GET", "/health", {"headers": {"Host": "evil.example"}}, None, 421, "unknown_host"),
        ("GET", "/health/live", {}, "/health/live", 200, "ok"),
        ("GET", "/metrics", key, "/metrics", 200, "ok"),
    ]
    logged_requests = 0
    for method, path, sent, route, status, outcome in cases:
        answer = httpx.request(method, f"{server.url}{path}", timeout=60, **sent)
        line = wait_for_log_line(server, answer)
        assert (answer.status_code, line["status"], line["outcome"]) == (status, status, outcome), line
        assert line["route"] == route and line["key"] == (
            "alice" if route != "/health/live" and status not in (401, 421) else None
        )
        assert line.keys() == (FIELDS | COMPLETION_FIELDS if outcome == "length" else FIELDS), line
        assert 0 < line["duration_ms"] < 60_000
        logged_requests += 1
    promise.all_of("kinds of request end logged in one line of JSON", logged_requests, len(cases))


@pytest.mark.parametrize("pause", [0.0, 0.2])
def test_malformed_body_is_logged_in_one_line_with_its_request_id(logged: tuple[Server, Keyring], pause: float) -> None:
    """Both before and after the application has started the request; the connection itself responds."""
    server, ring = logged
    key, before = f"Authorization: Bearer {ring.keys['alice']}", len(request_lines(server))
    head = raw_request(
        "POST", "/complete", "Host: x", key, "Content-Type: application/json", "Transfer-Encoding: chunked"
    )
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=60) as client:
        client.sendall(head if pause else head + b"no chunk\r\n")
        time.sleep(pause)
        client.sendall(b"no chunk\r\n" if pause else b"")
        answer = b"".join(iter(lambda: client.recv(4096), b"")).decode()
    (name,) = re.findall(r"x-request-id: (\S+)", answer)
    assert server.has_logged(name)
    (line,) = request_lines(server)[before:]
    assert (line["request_id"], line["route"], line["key"]) == (name, "/complete", "alice")
    assert (line["status"], line["outcome"]) == (400, "bad_request") and answer.startswith("HTTP/1.1 400 ")


def test_disconnect_and_resume_are_two_log_lines(logged: tuple[Server, Keyring], faults: Faults) -> None:
    server, ring = logged
    faults.arm("engine.forward", "sleep", seconds=0.5, after=5)  # the completion ends after the client has left
    with httpx.stream(
        "POST", f"{server.url}/complete", headers=ring.headers("alice"), json={"prompt": "x", "max_tokens": 500}
    ) as answer:
        name = answer.headers["x-request-id"]
        next(answer.iter_lines())
    line = wait_for_log_line(server, answer)
    faults.disarm("engine.forward")
    assert (line["status"], line["outcome"]) == (200, "disconnected")
    again = httpx.get(f"{server.url}/complete/{name}/events?after=0", headers=ring.headers("alice"), timeout=60)
    line = wait_for_log_line(server, again)
    assert line["stream"] == name and line["outcome"] == "length" and line["completion_tokens"] == 500


def test_concurrent_requests_are_logged_in_one_line_each(logged: tuple[Server, Keyring], promise: Promise) -> None:
    server, ring = logged
    n, before = promise.size(200, 1000), len(request_lines(server))

    def ask() -> None:
        with httpx.Client(headers=ring.headers("alice"), timeout=60) as client:
            for i in range(n // 10):
                client.post(f"{server.url}/complete", json={"prompt": "x", "max_tokens": i % 3, "stream": i % 2 == 0})

    threads = [threading.Thread(target=ask) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.wait_for(lambda: len(request_lines(server)) - before >= n)
    time.sleep(0.2)  # time for surplus lines
    lines = request_lines(server)[before:]
    assert len({line["request_id"] for line in lines}) == len(lines)
    promise.all_of("concurrent requests logged in one line each", len(lines), n)
