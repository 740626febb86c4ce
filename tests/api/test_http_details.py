"""HEAD on every GET route, a slash too many, and bodies in other encodings than plain UTF-8."""

from __future__ import annotations

import codecs
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Match

from app.common.settings import Settings
from app.http.errors import ApiError
from app.http.request_body import utf8_json
from app.main import create_app
from tests.support.keyed_server import Keyring, bearer
from tests.support.servers import Server
from tests.support.services import Services

pytestmark = pytest.mark.slow

BODY = {"prompt": "\u00e9t\u00e9", "max_tokens": 2, "seed": 1, "stream": False}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    return Keyring.of(tmp_path_factory.mktemp("keys") / "keys.json", "alice")


@pytest.fixture(scope="module")
def keyed(serve_module: Services, ring: Keyring) -> Server:
    """The service with the fake engine and a key."""
    return serve_module(ring=ring, fake_ms=1)


def _head(server: Server, path: str, key: str | None) -> httpx.Response:
    return httpx.head(f"{server.url}{path}", headers=bearer(key) if key else {}, timeout=60)


def _has(app: FastAPI, method: str, path: str) -> bool:
    scope = {"type": "http", "method": method, "path": path, "headers": [], "root_path": ""}
    return any(route.matches(scope)[0] is Match.FULL for route in app.routes)


def test_every_route_with_get_has_head(tmp_path: Path) -> None:
    app = create_app(Settings(weights=tmp_path))
    described = [path for path, methods in app.openapi()["paths"].items() if "get" in methods]
    paths = [re.sub(r"{\w+}", "x", path) for path in (*described, "/", "/docs", "/openapi.json", "/web/main.js")]
    assert len(paths) > 10
    assert [path for path in paths if not _has(app, "GET", path) or not _has(app, "HEAD", path)] == []
    assert not _has(app, "HEAD", "/complete")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/tokenizer_info", "/metrics", "/openapi.json"])
def test_head_needs_the_key_of_get_and_has_its_headers_without_a_body(keyed: Server, ring: Keyring, path: str) -> None:
    assert _head(keyed, path, None).status_code == 401
    response = _head(keyed, path, ring.keys["alice"])
    got = httpx.get(f"{keyed.url}{path}", headers=bearer(ring.keys["alice"]), timeout=60)
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"] == got.headers["content-type"]


def test_head_of_a_stream_takes_it_from_no_connection(keyed: Server, ring: Keyring) -> None:
    key = ring.keys["alice"]
    body = {"prompt": "a", "max_tokens": 300}
    with httpx.stream("POST", f"{keyed.url}/complete", json=body, headers=bearer(key), timeout=60) as stream:
        lines = stream.iter_lines()
        name = next(lines).removeprefix("id: ").partition(":")[0]
        response = _head(keyed, f"/complete/{name}/events?after=0", key)
        assert (response.status_code, response.content) == (200, b"")
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "event: done" in [*lines]
    assert _head(keyed, "/complete/req-unknown/events", key).status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions/"),
        ("POST", "/complete/"),
        ("GET", "/health/"),
        ("GET", "/metrics//"),
        ("GET", "/docs/"),
    ],
)
def test_slash_too_many_is_a_404_that_says_so_and_no_redirect(
    keyed: Server, ring: Keyring, method: str, path: str
) -> None:
    url = f"{keyed.url}{path}"
    assert httpx.request(method, url, json=BODY).status_code == 401
    response = httpx.request(method, url, json=BODY, headers=bearer(ring.keys["alice"]))
    assert response.status_code == 404 and "location" not in response.headers
    assert f"leave out the / at the end of {path}" in response.json()["error"]["message"]


def test_model_without_a_name_is_a_404_that_says_so(keyed: Server, ring: Keyring) -> None:
    response = httpx.get(f"{keyed.url}/v1/models/", headers=bearer(ring.keys["alice"]))
    assert response.status_code == 404 and "GET /v1/models returns it" in response.json()["error"]["message"]
    other = httpx.get(f"{keyed.url}/nothing/", headers=bearer(ring.keys["alice"]))
    assert "GET /docs lists the routes" in other.json()["error"]["message"]


def _post(server: Server, ring: Keyring, path: str, content: bytes) -> httpx.Response:
    headers = {**JSON, **bearer(ring.keys["alice"])}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=60)


@pytest.mark.parametrize("path", ["/complete", "/v1/completions", "/score", "/tokenize"])
def test_body_with_a_byte_order_mark_is_the_body_without_it(keyed: Server, ring: Keyring, path: str) -> None:
    fields = BODY if path in ("/complete", "/v1/completions") else {"prompt": BODY["prompt"]}
    content = json.dumps(fields, ensure_ascii=False).encode()
    plain, marked = (_post(keyed, ring, path, data) for data in (content, codecs.BOM_UTF8 + content))
    assert marked.status_code == plain.status_code == 200
    kept = "choices" if "choices" in plain.json() else "scores" if "scores" in plain.json() else "tokens"
    assert marked.json()[kept] == plain.json()[kept]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_other_encodings_are_named(keyed: Server, ring: Keyring, encoding: str) -> None:
    error = _post(keyed, ring, "/complete", json.dumps(BODY).encode(encoding)).json()["error"]
    name = encoding[:6].upper()
    assert error["code"] == "invalid_json"
    assert f"the body is {name}" in error["message"] and f"iconv -f {name}" in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"{}", b"1", b"[1]", b'""', b"null", '{"a": "\u00e9"}'.encode()])
def test_short_bodies_in_utf8_stay_as_they_are(body: bytes) -> None:
    assert utf8_json(bytearray(body)) == body
    assert utf8_json(bytearray(codecs.BOM_UTF8 + body)) == body


@pytest.mark.parametrize("body", [b"\x00\x00\x00\x00", codecs.BOM_UTF16_LE, codecs.BOM_UTF32_BE, b"1\x00"])
def test_short_bodies_in_other_encodings_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="JSON is UTF-8"):
        utf8_json(bytearray(body))


def _lm_eval(server: Server, prompt: list[int], **fields: Any) -> httpx.Response:
    body = {"prompt": [prompt], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("shorter_by", [0, 1, 2])
def test_scored_prompt_up_to_the_whole_context_has_an_entry_for_the_next_token(server: Server, shorter_by: int) -> None:
    """lm-eval takes the last entry for the generated token; without it, the score of the last word would be lost."""
    context = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    prompt = [5 + i % 60 for i in range(context - shorter_by)]
    answer = _lm_eval(server, prompt).json()
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == len(prompt) + 1
    assert choice["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 1
    score = httpx.post(f"{server.url}/score", json={"prompt": [prompt]}, timeout=60).json()["scores"][0]
    assert logprobs["token_logprobs"][1:-1] == [token["logprob"] for token in score["tokens"]][1:]


def test_prompt_longer_than_the_context_is_refused_with_both_numbers(server: Server) -> None:
    context = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    error = _lm_eval(server, [5] * (context + 1)).json()["error"]
    assert (error["prompt_tokens"], error["max_model_len"]) == (context + 1, context)


def test_prompt_that_fills_the_context_is_clamped_where_nothing_is_scored(server: Server) -> None:
    context = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    for fields in ({"echo": False}, {"logprobs": None}, {"max_tokens": 0}):
        answer = _lm_eval(server, [5] * context, **fields).json()
        assert answer["usage"]["completion_tokens"] == 0 and answer["choices"][0]["finish_reason"] == "length"
    assert _lm_eval(server, [5] * context, max_tokens=50).json()["usage"]["completion_tokens"] == 1
