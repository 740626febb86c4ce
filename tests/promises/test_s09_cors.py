"""No page of another origin can read a response or start a completion, unless its origin was allowed."""

from __future__ import annotations

import httpx
import pytest

from tests.support.keyed_server import Keyring, raw_request, request_lines, send_raw, status_of
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

ALLOWED, OTHER = "https://notes.example", "https://evil.example"
FORMS = (
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "text/plain",
    "text/plain; a=application/json",
)
"""Requests that a form or a script can send to another origin without a preflight."""


@pytest.fixture(scope="module")
def cors_server(serve_module: Services, tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, Keyring]:
    ring = Keyring.of(tmp_path_factory.mktemp("cors_server") / "keys.json", "alice")
    origins = f"{ALLOWED},http://localhost:3000"
    return serve_module("--allow-origin", origins, ring=ring, fake_ms=1), ring


def _preflight(server: Server, origin: str, *, method: str = "POST", headers: str = "content-type") -> httpx.Response:
    request_headers = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": headers,
    }
    return httpx.request("OPTIONS", f"{server.url}/complete", headers=request_headers)


def _cors_headers(answer: httpx.Response) -> set[str]:
    return {name for name in answer.headers if name.startswith("access-control-")}


def test_no_origin_is_allowed_by_default(fake_server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    for origin in (OTHER, ALLOWED, "null", "http://localhost:8000", fake_server.url):
        answers = [
            _preflight(fake_server, origin),
            httpx.get(f"{fake_server.url}/v1/models", headers={"Origin": origin}),
            httpx.post(f"{fake_server.url}/complete", headers={"Origin": origin}, json=body),
        ]
        assert [_cors_headers(answer) for answer in answers] == [set()] * 3, origin
        assert answers[0].status_code == 405


def test_cross_site_forms_cannot_start_a_completion(fake_server: Server, promise: Promise) -> None:
    """The service refuses requests that need no preflight without reading the body."""
    json_body, refused, tried = b'{"prompt": "x", "max_tokens": 1}', 0, 0
    for path in ("/complete", "/v1/completions", "/v1/chat/completions", "/score", "/tokenize", "/detokenize"):
        for kind in (*FORMS, None):
            headers = ["Host: localhost", f"Origin: {OTHER}", *([f"Content-Type: {kind}"] if kind else [])]
            status = status_of(send_raw(fake_server.url, raw_request("POST", path, *headers, body=json_body)))
            tried += 1
            refused += status == 415
    promise.all_of("form posts refused", refused, tried)
    assert not any(
        line["outcome"] in ("length", "stop") for line in request_lines(fake_server) if line["status"] == 415
    )


def test_only_allowed_origins_get_cors_headers(cors_server: tuple[Server, Keyring], promise: Promise) -> None:
    server, ring = cors_server
    for origin in (ALLOWED, "http://localhost:3000"):
        answer = _preflight(server, origin, headers="authorization, content-type, last-event-id")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
        assert "Origin" in answer.headers["vary"]
        allowed = answer.headers["access-control-allow-headers"].lower()
        assert all(name in allowed for name in ("authorization", "content-type", "last-event-id"))
        assert "access-control-allow-credentials" not in answer.headers
    near = ["https://notes.example.evil.example", "https://evilnotes.example", "http://notes.example", "https://NOTES.example",
            "https://notes.example:8443", "https://notes.example/", "null", "*", "", f"{ALLOWED},{OTHER}"]  # fmt: skip
    refused = 0
    for origin in near:
        answer = _preflight(server, origin)
        assert answer.status_code == 403 and answer.json()["error"]["type"] == "permission_error", origin
        refused += "access-control-allow-origin" not in answer.headers
        read = httpx.get(f"{server.url}/v1/models", headers={"Origin": origin, **ring.headers("alice")})
        assert "access-control-allow-origin" not in read.headers, origin
    promise.all_of("other origins refused", refused, len(near))
    assert _preflight(server, ALLOWED, method="PATCH").status_code == 400
