"""No error reveals internals: no path, no class, no traceback, and no more than 200 characters of the request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx

from app.api.native.routes import CompleteRequest
from app.api.openai.schemas import ChatRequest, CompletionsRequest
from app.api.score import ScoreRequest
from app.api.tokens import DetokenizeRequest, TokenizeRequest
from tests.support.keyed_server import raw_request, send_raw
from tests.support.promise_figures import Promise
from tests.support.servers import Server

BODIES = {
    "/complete": CompleteRequest,
    "/v1/completions": CompletionsRequest,
    "/v1/chat/completions": ChatRequest,
    "/score": ScoreRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
LONG = "long" * 100
VALUES: list[Any] = [
    None, True, -1, 0, 2**31, 2**64, 1.5, 1e308, "", "x", LONG, "\x00\n\x1b[31m", "\ufffe", [], [None], [[]], [LONG],
    [1, "x"], {}, {"a": 1}, {LONG: LONG}, {"type": LONG}, "(", "[", "start:", {"type": "object", "properties": 5},
    [{"role": 5}], {"5": LONG},
]  # fmt: skip
INTERNALS = re.compile(
    r"Traceback|File \"|\.py\b|\.rs\b|\.so\b|site-packages|/usr/|/home/|/root/|/tmp/|/work/|/proc/|/var/"
    r"|<class|object at 0x|0x[0-9a-f]{6,}|\b[a-z_]+\.[a-z_]+\.[a-z_]+\("
    r"|\b[A-Z][A-Za-z]*(?:Error|Exception|Warning|Request|Response|Fields|Panic)\b"
    r"|pydantic|starlette|fastapi|uvicorn|msgspec|httptools|llguidance|tokenizers|torch|\bpanicked\b|RUST_BACKTRACE"
    r"|Input should be an instance|\bdict\b|\bstr\b|NoneType|function-|union_tag"
)


def _wrong(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Bodies with one field set to a sample of values of every kind."""
    random = Random(21)
    for path, model in BODIES.items():
        base = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
        base = {"tokens": [5]} if path == "/detokenize" else base
        short = {} if path in ("/score", "/tokenize", "/detokenize") else {"max_tokens": 0, "stream": False}
        for name in model.model_fields:
            for value in random.sample(VALUES, min(rounds, len(VALUES))):
                # The fake engine computes no scores.
                if not (value and (name in ("echo", "logprobs") or (path, name) == ("/score", "prompt"))):
                    yield path, {**base, **short, name: value}


def _problems(text: str) -> list[str]:
    """Forbidden contents of an error."""
    error = json.loads(text)["error"]
    assert error.keys() >= {"message", "type", "param", "code", "request_id"}, text
    message = error["message"]
    found = INTERNALS.findall(message)
    if len(message) > 600:
        found.append(f"{len(message)} characters")
    if LONG[:204] in text:
        found.append("more than 200 characters of the request")
    if any(ord(c) < 32 or ord(c) == 127 for c in message.replace("\n", "")):
        found.append("a control character")
    return found


def test_errors_reveal_no_internals(fake_server: Server, promise: Promise) -> None:
    n_errors, leaked = 0, []
    with httpx.Client(base_url=fake_server.url, timeout=60) as client:
        for path, body in _wrong(promise.size(6, len(VALUES))):
            answer = client.post(path, json=body)
            assert answer.status_code in (200, 400, 404), (path, body, answer.text)
            if answer.status_code != 200:
                n_errors += 1
                leaked += [(path, body, problem, answer.text) for problem in _problems(answer.text)]
    assert n_errors > 300 and not leaked, leaked[:5]
    promise.all_of("errors for invalid bodies that show no internals", n_errors - len(leaked), n_errors)


def test_errors_of_every_status_have_the_same_form(fake_server: Server) -> None:
    json_type = "Content-Type: application/json"
    host, chat = "Host: localhost", b'{"messages": [{"role": "user", "content": "x"}]}'
    cases = [
        (raw_request("GET", f"/{LONG}", host), 404),
        (raw_request("BREW", "/complete", host), 400),
        (raw_request("PATCH", "/complete", host), 405),
        (raw_request("GET", f"/v1/models/{LONG}", host), 404),
        (raw_request("GET", f"/complete/{LONG}/events?after={LONG}", host), 400),
        (raw_request("GET", "/complete/x/events", host, f"Last-Event-ID: {LONG}"), 404),
        (raw_request("DELETE", f"/complete/{LONG}", host), 404),
        (raw_request("GET", "/web/none", host), 404),
        (raw_request("GET", "/", "Host: a b"), 400),
        (raw_request("GET", "/", f"Host: {LONG}.example"), 400),
        (raw_request("GET", "/", "Host: a.example"), 421),
        (raw_request("POST", "/complete", host, "Content-Type: x/y", body=b"{}"), 415),
        (raw_request("POST", "/complete", host, json_type, "Content-Length: 2000000"), 413),
        (raw_request("POST", "/complete", host, json_type, body=b"{"), 400),
        (raw_request("POST", "/v1/chat/completions", host, json_type, body=chat), 400),
    ]
    for request, status in cases:
        head, _, body = send_raw(fake_server.url, request).partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode()), (request[:80], head)
        if b"application/json" in head:  # the protocol below the application answers invalid HTTP, in one line
            assert _problems(body.decode()) == [], body
            name = json.loads(body)["error"]["request_id"]
            assert f"x-request-id: {name}".encode() in head
        else:
            assert status == 400 and len(body) < 100 and not INTERNALS.search(body.decode()), body


def test_messages_with_internals_are_detected() -> None:
    """Control."""
    wrong = ("KeyError: 'x'", 'File "/usr/lib/x.py", line 3', "<class 'str'>", "pydantic says no", LONG, "a\x1bb")
    for message in (*wrong, "CompleteRequest is wrong"):
        body = {"message": message, "type": "", "param": None, "code": None, "request_id": ""}
        assert _problems(json.dumps({"error": body})), message
