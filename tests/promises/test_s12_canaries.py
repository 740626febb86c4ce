"""What clients send never reaches a log, a metric or another client's response: prompts, outputs, schemas, keys,
headers, URLs.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import secrets
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.common import logs
from app.http.request_log import RequestLogMiddleware
from tests.support.armed_faults import Faults
from tests.support.keyed_server import Keyring, log_lines, raw_request, send_raw, wait_for_log_line
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

_ENDPOINTS = ("/complete", "/v1/completions")


@pytest.fixture(scope="module")
def watched(serve_module: Services, tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, Keyring, Faults]:
    folder = tmp_path_factory.mktemp("watched")
    ring, faults = Keyring.of(folder / "keys.json", "alice", "bob"), Faults(folder / "faults")
    flags, environment = ("--log-level", "debug"), faults.environment
    server = serve_module(*flags, ring=ring, fake_ms=1, environment=environment, logs_tracebacks=True)
    return server, ring, faults


class Canaries:
    """Creates unique words and searches texts for them."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def new(self) -> str:
        self.made.append(f"canary{secrets.token_hex(6)}")
        return self.made[-1]

    def found_in(self, text: str) -> list[str]:
        return [canary for canary in self.made if canary in text]


def _bodies(canary: Canaries) -> list[dict[str, Any]]:
    """Valid and invalid requests with a canary in every text field."""
    new = canary.new
    base = {"max_tokens": 2, "stream": False}
    return [
        {**base, "prompt": new(), "stop": [new(), new()], "echo": True},
        {**base, "prompt": [new(), new()], "n": 2},
        {**base, "prompt": f"{new()}\n\x1b[31m{new()}\u2028{new()}"},
        {**base, "prompt": new(), "regex": f"({new()}|[a-z]+"},
        {**base, "prompt": new(), "regex": new(), "max_tokens": 0},
        {**base, "prompt": new(), "json_schema": {"type": new(), "properties": {new(): {"$ref": f"#/{new()}"}}}},
        {**base, "prompt": new(), "grammar": f"start: {new()}"},
        {**base, "prompt": new(), "suffix": new()},
        {**base, "prompt": new(), "source": new()},
        {**base, "prompt": {new(): new()}},
        {**base, "prompt": [new(), 5]},
        {**base, "prompt": new(), "max_tokens": new()},
        {**base, "prompt": new(), "logit_bias": {new(): 5}},
        {**base, "prompt": new(), "user": f"{new()}!", "request_id": new()},
        {**base, "prompt": new(), new(): new(), "model": new()},
        {**base, "prompt": f"{new()} " * 9000},
    ]


def _send(server: Server, ring: Keyring, canary: Canaries) -> None:
    new, alice = canary.new, ring.headers("alice")
    for path in _ENDPOINTS:
        for body in _bodies(canary):
            httpx.post(f"{server.url}{path}", headers=alice, json=body, timeout=60)
        for content in (f'{{"prompt": "{new()}', f'{{"prompt": "\\ud800{new()}"}}', f'["{new()}"]', f"{new()}"):
            headers = {**alice, "Content-Type": "application/json"}
            httpx.post(f"{server.url}{path}", headers=headers, content=content, timeout=60)
    chat = {"messages": [{"role": new(), "content": new()}]}
    score, tokenize = {"prompt": [5], "user": new() + "!"}, {"prompt": new()}
    for path, body in (("/v1/chat/completions", chat), ("/score", score), ("/tokenize", tokenize)):
        httpx.post(f"{server.url}{path}", headers=alice, json=body, timeout=60)
    events = f"/complete/{new()}/events?after={new()}"
    for target in (f"/{new()}", f"/v1/models/{new()}?{new()}={new()}", events, f"/web/{new()}"):
        httpx.get(f"{server.url}{target}", headers={**alice, "Last-Event-ID": f"{new()}:1"})
    httpx.delete(f"{server.url}/complete/{new()}", headers=alice)
    key = f"Authorization: Bearer {ring.keys['alice']}"
    for head in (
        raw_request("GET", "/health", f"Host: {new()}.example"),
        raw_request(new().upper(), f"/{new()}", "Host: localhost", key),
        raw_request("GET", "/v1/models", "Host: localhost", f"Authorization: Bearer {new()}"),
        raw_request("GET", "/v1/models", "Host: localhost", f"Authorization: {new()} {new()}"),
        raw_request("GET", "/health", "Host: localhost", f"X-{new()}: {new()}", f"Cookie: {new()}",
                    f"User-Agent: {new()}\x07"),
        raw_request("GET", f"http://{new()}@localhost/{new()}", "Host: localhost", key),
        f"GET {new()}\r\n\r\n".encode(),
        raw_request("GET", f"/{new()}%0d%0aX: {new()}", "Host: localhost", key, f"Referer: http://x/{new()}"),
        raw_request("POST", "/complete", "Host: localhost", key, f"Content-Type: {new()}", body=new().encode()),
    ):  # fmt: skip
        send_raw(server.url, head)


def _fail(server: Server, ring: Keyring, faults: Faults, canary: Canaries) -> None:
    """Crash the engine with a canary in its exception, and others in memory."""
    body = {"prompt": canary.new(), "max_tokens": 200, "stream": False, "speculate": False}
    faults.arm("engine.step", "raise", times=1, after=50, note=canary.new())  # the engine steps only when it has work
    httpx.post(f"{server.url}/complete", headers=ring.headers("alice"), json=body, timeout=60)
    assert not faults.is_armed("engine.step")
    assert server.wait_for(lambda: httpx.get(f"{server.url}/health/ready").status_code == 200, 30)


def _disconnect(server: Server, ring: Keyring, canary: Canaries) -> None:
    """A client that disconnects in the middle of its stream."""
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": canary.new(), "max_tokens": 500}).encode()
    key = f"Authorization: Bearer {ring.keys['alice']}"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            raw_request("POST", "/complete", "Host: localhost", key, "Content-Type: application/json", body=body)
        )
        connection.recv(100)


def test_canaries_never_reach_logs_metrics_or_other_clients(
    watched: tuple[Server, Keyring, Faults], promise: Promise
) -> None:
    server, ring, faults = watched
    canary = Canaries()
    canary.made += [key[4:] for key in ring.keys.values()]
    for _ in range(promise.size(1, 20)):
        _send(server, ring, canary)
        _disconnect(server, ring, canary)
    _fail(server, ring, faults, canary)
    bob_canaries = Canaries()
    responses = [
        httpx.get(f"{server.url}{path}", headers=ring.headers("bob")).text
        for path in ("/metrics", "/v1/models", "/health")
    ]
    for path in _ENDPOINTS:
        for body in _bodies(bob_canaries):
            responses.append(httpx.post(f"{server.url}{path}", headers=ring.headers("bob"), json=body, timeout=60).text)
    assert server.has_logged("InjectedFault")
    wait_for_log_line(
        server, httpx.get(f"{server.url}/v1/models", headers=ring.headers("bob"))
    )  # earlier lines are written, too
    log = server.log.read_text()
    found = canary.found_in(log) + bob_canaries.found_in(log) + canary.found_in("".join(responses))
    lines = log_lines(server)
    assert any(line.get("key") == "alice" for line in lines), "the log must contain the requests"
    assert any("InjectedFault" in str(line.get("trace")) for line in lines), "the log must contain the exception"
    n = len(canary.made) + len(bob_canaries.made)
    promise.at_most("canaries in logs, metrics and other clients' responses", len(found), target=0, n=n)
    assert not found


@pytest.mark.parametrize("how", ["text", "json"])
def test_exceptions_are_logged_without_their_messages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, how: logs.Format
) -> None:
    canary = secrets.token_hex(8)
    for name in ("httpx", "httpcore"):  # the test's own HTTP client
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    logs.set_up("debug", how)

    class PanicException(BaseException):
        """A Rust panic as it appears in Python."""

    async def fails(_scope: Any, _receive: Any, _send: Any) -> None:
        try:
            {}[canary]
        except KeyError as error:
            raise PanicException(canary) from error

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=RequestLogMiddleware(fails))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(f"/{canary}", content=canary)

    answer = asyncio.run(ask())
    assert answer.status_code == 500 and canary not in answer.text

    async def forgotten() -> None:
        async def raise_it() -> None:
            raise ValueError(canary)

        task = asyncio.create_task(raise_it())
        await asyncio.sleep(0.01)
        del task

    asyncio.run(forgotten())
    sys.excepthook(ValueError, ValueError(canary), None)
    thread = threading.Thread(target=lambda: int(canary + "x"))
    thread.start()
    thread.join()
    logging.getLogger("inkstream").error("x", exc_info=OSError(5, os.strerror(5), canary))
    logged = capsys.readouterr().err
    assert canary not in logged
    names = ("PanicException", "KeyError", "never retrieved", "ValueError", "Input/output error")
    for word in (*names, Path(__file__).name):
        assert word in logged, word
    assert answer.json()["error"]["request_id"] in logged


@pytest.mark.parametrize("how", ["text", "json"])
def test_control_characters_are_escaped_in_logs(capsys: pytest.CaptureFixture[str], how: logs.Format) -> None:
    logs.set_up("info", how)
    nasty = "a\nb\r\x1b[2J\x00\x07\x85\u2028\u202e\x9b31m"
    logging.getLogger("inkstream").info("told: %s", nasty, extra={"fields": {"key": nasty}})
    text = capsys.readouterr().err
    assert text.endswith("\n") and text.count("\n") == 1
    assert all(c.isprintable() for c in text[:-1]) and "told: a\\nb" in text


def test_log_that_quotes_a_message_is_detected() -> None:
    """Control: Python's own formatter prints the message."""
    canary, stream = Canaries(), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.handle(logging.LogRecord("x", 40, "", 0, "x", None, (ValueError, ValueError(canary.new()), None)))
    assert canary.found_in(stream.getvalue())


def test_only_the_log_module_formats_tracebacks() -> None:
    """Only app/common/logs.py formats exceptions."""
    app = Path(logs.__file__).parents[1]
    words = ("print_exc", "format_exc", "traceback.format", "traceback.print")
    assert [p for p in app.rglob("*.py") if any(word in p.read_text() for word in words)] == []
