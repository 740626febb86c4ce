"""A request without a key gets nothing but the page, its files and the health checks, however it is spelled.

Advisories: vLLM #58144, #42594, #43426 (keys were required by path prefix, which other spellings of a path bypassed).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from app.common.settings import Settings
from app.main import create_app
from tests.support.http.raw_client import connect, read_response
from tests.support.keyed_server import Keyring, bearer, raw_request, request_lines, send_raw, status_of
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

PAGE = {"/", *(f"/web/{folder}{{name}}" for folder in ("", "documents/", "presets/", "request/", "text/", "tokens/"))}
PUBLIC = {*PAGE, "/health", "/health/live", "/health/ready"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "BREW")
SECRET = "the response of a route without an access mark"


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    return Keyring.of(tmp_path_factory.mktemp("keys") / "keys.json", "alice", "revoked")


@pytest.fixture(scope="module")
def keyed(serve_module: Services, ring: Keyring) -> Server:
    return serve_module("--log-level", "debug", ring=ring, fake_ms=1)  # logs public routes, too


def _app(ring: Keyring, tmp_path: Path) -> FastAPI:
    return create_app(Settings(weights=tmp_path, keys_file=ring.file))


def _routes(app: FastAPI) -> list[tuple[str, str]]:
    """(method, path) of every route in the OpenAPI document, and of those outside it."""
    routes = [(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods]
    return [*routes, *(("GET", path) for path in (*sorted(PAGE), "/docs", "/openapi.json")), ("HEAD", "/metrics")]


def _filled(path: str) -> str:
    return path.replace("{request_id}", "req-1").replace("{model_id}", "tiny").replace("{name}", "main.js")


def _spellings(path: str) -> list[str]:
    """Other ways to write a path; some may lead to the same route."""
    first = path[1:2] or "x"
    others = [f"/{path}", f"/.{path}", f"{path}/", f"{path}/.", path.upper(), f"/%2e{path}"]
    others += [f"/%{ord(first):02x}{path[2:]}"]
    others += [path.replace("/", "%2f"), f"/health/live/..{path}", f"/health/live/%2e%2e{path}", f"/web/..{path}"]
    others += [f"{path}?api_key=KEY", f"{path}?", f"{path}#/health", f"{path};/health", f"{path}%00", f"{path}%0a"]
    return [path, *others, f"http://127.0.0.1{path}", f"http://evil.example{path}"]


def _credentials(ring: Keyring) -> dict[str, list[str]]:
    good = ring.keys["alice"]
    malformed = [good, f"Basic {good}", f"Bearer{good}", "Bearer", "Bearer ", "Bearer \t", f"Token {good}", "\xff\xfe"]
    return {
        "none": [],
        "wrong": [f"Bearer ink-{'A' * 43}", f"Bearer {good[:-1]}", f"Bearer {good}x", f"Bearer {good} {good}"],
        "revoked": [f"Bearer {ring.keys['revoked']}"],
        "malformed": malformed,
    }


def _hosts(url: str) -> list[list[str]]:
    own = f"Host: {url.removeprefix('http://')}"
    forged = ["Host: localhost", "Host: 127.0.0.1/health/live", "Host: evil.example"]
    return [[own], [own, "X-Forwarded-Host: localhost"], *([host] for host in forged)]


def test_requests_without_a_valid_key_reach_no_route(
    keyed: Server, ring: Keyring, tmp_path: Path, promise: Promise
) -> None:
    """Every route x {no, malformed, wrong, revoked key}; each of these x path spellings and forged hosts."""
    # Revoke while the service runs, and wait until the revocation takes effect.
    key = ring.revoke("revoked")
    assert keyed.wait_for(lambda: httpx.get(f"{keyed.url}/v1/models", headers=bearer(key)).status_code == 401)
    ring.keys["revoked"] = key
    sent, leaks = 0, []
    for path, method, target, headers in _requests(keyed, ring, _routes(_app(ring, tmp_path))):
        body = b'{"prompt": "x", "max_tokens": 1}' if method == "POST" else b""
        answer = send_raw(keyed.url, raw_request(method, target, *headers, "Content-Type: application/json", body=body))
        sent += 1
        if not _is_refused(answer, path):
            leaks.append((method, target, headers, answer[:200]))
    assert sent > 1000 and not leaks, leaks[:5]
    lines = request_lines(keyed)
    admitted = {line["route"] for line in lines if line["status"] < 400 and line["key"] is None}
    assert admitted <= PUBLIC
    assert {line["key"] for line in lines} <= {None, "revoked"}
    promise.all_of("requests without a valid key refused", sent - len(leaks), sent)


def _requests(keyed: Server, ring: Keyring, routes: list[tuple[str, str]]) -> Iterator[tuple[str, str, str, list[str]]]:
    """(path, method, target, headers)"""
    plain, *forged = _hosts(keyed.url)
    for method, path in routes:
        for values in _credentials(ring).values():
            lines = [[f"Authorization: {value}"] for value in values] or [[]]
            for line in lines:
                yield path, method, _filled(path), [*plain, *line]
            for target in _spellings(_filled(path)):
                yield path, method, target, [*plain, *lines[0]]
            for host in forged:
                yield path, method, _filled(path), [*host, *lines[0]]


def _is_refused(answer: bytes, path: str) -> bool:
    status = status_of(answer)
    if path in PUBLIC and status in (200, 404):
        return True  # open to all clients
    # A spelling may also denote a public resource, which the service then serves.
    shows = b"text/html" in answer or b"text/javascript" in answer or b'{"status":' in answer
    return status in (0, 400, 401, 421) or (status == 200 and shows)


def test_valid_key_opens_every_route(keyed: Server, ring: Keyring, tmp_path: Path) -> None:
    """Control: the service does not refuse everything."""
    good = ring.headers("alice")
    for method, path in _routes(_app(ring, tmp_path)):
        body = {"prompt": "x", "max_tokens": 1, "tokens": [5]} if method == "POST" else None
        answer = httpx.request(method, f"{keyed.url}{_filled(path)}", headers=good, json=body, timeout=30)
        assert answer.status_code not in (401, 403, 421), (method, path, answer.text)
    for scheme in ("bearer", "BEARER", "Bearer  "):
        headers = {"Authorization": f"{scheme} {ring.keys['alice']}"}
        assert httpx.get(f"{keyed.url}/v1/models", headers=headers).status_code == 200
    whole = {"prompt": "x", "max_tokens": 1, "stream": False}
    assert httpx.post(f"{keyed.url}/complete", headers=good, json=whole, timeout=30).status_code == 200


def test_new_routes_of_any_kind_require_a_key(ring: Keyring, tmp_path: Path) -> None:
    async def answer(_request: Any = None) -> PlainTextResponse:
        return PlainTextResponse(SECRET)

    app = _app(ring, tmp_path)
    router = APIRouter()
    router.add_api_route("/included", answer)
    app.include_router(router)
    app.add_api_route("/api", answer, methods=["GET", "POST"])
    app.router.routes.append(Route("/plain", answer, methods=["GET"]))
    app.router.routes.append(Mount("/mounted", routes=[Route("/inside", answer)]))
    app.router.routes.append(APIRoute("/health/secret", answer))

    async def ask(path: str, headers: dict[str, str], method: str = "GET") -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers)

    for path in ("/included", "/api", "/plain", "/mounted/inside", "/health/secret"):
        for method in METHODS:
            refused = asyncio.run(ask(path, {}, method))
            assert refused.status_code == 401 and SECRET not in refused.text, (method, path)
        assert asyncio.run(ask(path, ring.headers("alice"))).text == SECRET, path


def test_key_is_checked_before_the_body_is_read(keyed: Server) -> None:
    """An anonymous client gets 401 without sending its body, long before the body timeout (30 s)."""
    announced = raw_request(
        "POST", "/complete", "Host: localhost", "Content-Type: application/json", "Content-Length: 1000000"
    )
    began = time.monotonic()
    with connect(keyed) as connection:
        connection.sendall(announced.replace(b"Connection: close\r\n", b""))
        assert status_of(read_response(connection)) == 401
    assert time.monotonic() - began < 20
