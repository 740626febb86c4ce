"""Invalid input in every field: a 4xx in the common error shape, never a 5xx, and the service keeps running."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.servers import Server

KEYS = {"message", "type", "param", "code", "request_id"}


def _post(server: Server, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        f"{server.url}/complete", content=content, headers={"content-type": "application/json", **headers}, timeout=60
    )


def _error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) >= KEYS
    assert error["request_id"] == response.headers["x-request-id"]
    assert 0 < len(error["message"]) < 400
    return error


WRONG = [
    (
        "prompt",
        [None, 5, True, {"a": 1}, [1.5], ["a", 1], [-1], [2**31], [[1], "a"], [[1], [-1]], [True], ["a"] * 1025],
    ),
    ("max_tokens", [-1, 1.5, "5", True, 2**31, [1]]),
    ("temperature", [-0.1, 10.1, "hot", True, [1]]),
    ("top_k", [-2, 1.5, "5", 2**31, False]),
    ("top_p", [-0.1, 1.1, "1", {}]),
    ("min_p", [-0.1, 1.1, "1", []]),
    ("seed", [1.5, "1", 2**63, -(2**63) - 1, True]),
    ("stop", [5, ["a", 5], ["a"] * 65, "x" * 257, {}]),
    ("ignore_eos", ["yes", 1, 0]),
    ("logprobs", [-1, 21, True, "5", 1.5]),
    ("stream", ["no", 1, 0]),
    ("min_tokens", [-1, "5", 1.5, 2]),
    ("typical_p", [0, -0.1, 1.1, "1"]),
    ("repetition_penalty", [0, -1, "1", True]),
    ("presence_penalty", [-2.1, 2.1, "0"]),
    ("frequency_penalty", [-2.1, 2.1, []]),
    (
        "logit_bias",
        [
            [],
            {"a": 1},
            {"-1": 1},
            {"5": 101},
            {"5": "1"},
            {"1": 1, "01": 2},
            {str(i): 1 for i in range(301)},
            {"320": 1},
        ],
    ),
    ("n", [0, 65, 1.5, "2"]),
    ("stop_token_ids", [5, [-1], ["5"], [320], [1] * 65]),
    ("include_stop", [1, "yes"]),
    ("echo", [1, "yes"]),
    ("suffix", [5, "there are no tokens for this"]),
    ("deadline_ms", [0, -1, 1.5, 2**31, 600_001]),
    ("truncate_prompt_tokens", [0, -1, 1.5]),
    ("user", [5, ["a"]]),
    ("request_id", ["a/b", "x" * 65]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG for value in values])
def test_invalid_value_names_its_field(server: Server, field: str, value: Any) -> None:
    error = _error(_post(server, {"prompt": "a", "max_tokens": 1, field: value}), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(("field", "hint"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("x", "docs")])
def test_unknown_field_suggests_the_closest_one(server: Server, field: str, hint: str) -> None:
    error = _error(_post(server, {"prompt": "a", field: 2}), 400)
    assert (error["param"], error["code"]) == (field, "unknown_field")
    assert hint in error["message"]


def test_missing_prompt_is_named(server: Server) -> None:
    assert _error(_post(server, {"max_tokens": 1}), 400)["param"] == "prompt"


BODIES = {
    "not json": b"hello",
    "half": b'{"prompt": "a"',
    "deep": b'{"prompt": ' + b"[" * 100_000,
    "twice": b'{"prompt": 5, "prompt": 6}',
    "null byte": b'{"prompt": "a"}\x00',
    "long key": b'{"prompt": "a", "' + b"k" * 5000 + b'": 1}',
}
"""Those that tests/promises/test_s24_advisories.py does not try, and one that breaks a limit."""


@pytest.mark.parametrize("name", BODIES)
def test_malformed_body_is_refused(server: Server, name: str) -> None:
    assert _error(_post(server, BODIES[name]), 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_content_types_are_refused(server: Server, content_type: str) -> None:
    error = _error(_post(server, {"prompt": "a"}, **{"content-type": content_type}), 415)
    assert "application/json" in error["message"]


def test_unknown_routes_and_wrong_methods_have_the_error_shape(server: Server) -> None:
    assert _error(httpx.get(f"{server.url}/nothing"), 404)["type"] == "not_found_error"
    response = httpx.get(f"{server.url}/complete")
    assert "POST" in _error(response, 405)["message"]
    assert response.headers["allow"] == "POST"
    assert _error(httpx.delete(f"{server.url}/complete/unknown"), 404)["code"] == "unknown_request"


@pytest.mark.parametrize("path", ["/", "/docs", "/health", "/metrics", "/web/page.js"])
def test_wrong_method_lists_the_allowed_ones(server: Server, path: str) -> None:
    response = httpx.patch(f"{server.url}{path}")
    assert "use GET, HEAD" in _error(response, 405)["message"]
    assert response.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("body", [[], "text", None, 5])
def test_body_other_than_an_object_is_refused_without_a_field(server: Server, body: Any) -> None:
    error = _error(_post(server, body), 400)
    assert "a JSON object" in error["message"]
    assert error["param"] is None
