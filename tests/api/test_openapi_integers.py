"""The OpenAPI document and the service agree about whole numbers: what is one, and how large `deadline_ms` may be."""

from __future__ import annotations

import functools
from typing import Any

import httpx
import pytest

from tests.support.servers import Server

ROUTES = ("/complete", "/v1/completions", "/v1/chat/completions", "/score", "/tokenize", "/detokenize")
REQUIRED: dict[str, Any] = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "tokens": [1]}
NEEDED = {"top_logprobs": {"logprobs": True}, "min_tokens": {"max_tokens": 30}, "best_of": {"n": 1}}
FEW = {"max_tokens": 2, "n": 1, "best_of": 2, "deadline_ms": 5000, "max_completion_tokens": 2, "min_tokens": 1}


@functools.cache
def _document(url: str) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(f"{url}/openapi.json", timeout=60).json()
    return document


def _fields(server: Server, route: str) -> tuple[dict[str, Any], dict[str, Any]]:
    document = _document(server.url)
    operation = document["paths"][route]["post"]
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schema = document["components"]["schemas"][name]
    return schema["properties"], {field: REQUIRED[field] for field in schema.get("required", [])}


def _integers(server: Server) -> list[tuple[str, str, dict[str, Any]]]:
    """(route, field, its schema) of each field that may be an integer, or a list of them."""
    found = []
    for route in ROUTES:
        for field, schema in _fields(server, route)[0].items():
            if field == "source":  # for encoders, which the tiny model has none of; of the prompt's type
                continue
            for kind in schema.get("anyOf", [schema]):
                if kind.get("type") == "integer" or kind.get("items", {}).get("type") == "integer":
                    found.append((route, field, kind))
    return found


def _post(server: Server, route: str, field: str, value: Any) -> httpx.Response:
    body = {**_fields(server, route)[1], **NEEDED.get(field, {}), field: value}
    if route in ("/complete", "/v1/completions", "/v1/chat/completions"):
        body = {"max_tokens": 2, "stream": False, **body}
    return httpx.post(f"{server.url}{route}", json=body, timeout=60)


def test_a_whole_number_may_be_written_with_a_fraction(server: Server) -> None:
    tried = _integers(server)
    assert len(tried) > 25
    for route, field, kind in tried:
        number = FEW.get(field, max(1, kind.get("minimum", 1)))
        value = [float(number)] if kind["type"] == "array" else float(number)
        answer = _post(server, route, field, value)
        # The tiny model has no chat template; the service reports that once the fields of a chat are valid.
        no_template = answer.status_code == 400 and answer.json()["error"]["code"] == "no_chat_template"
        assert answer.status_code == 200 or no_template, (route, field, answer.text)
        wrong = [number + 0.5] if kind["type"] == "array" else number + 0.5
        refused = _post(server, route, field, wrong)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == field, (route, field, refused.text)


def test_a_number_that_a_float_may_not_hold_exactly_is_refused(server: Server) -> None:
    assert _post(server, "/complete", "seed", 2.0**53).status_code == 200
    assert _post(server, "/complete", "seed", 2.0**54).json()["error"]["param"] == "seed"
    assert _post(server, "/complete", "seed", 2**54).status_code == 200


@pytest.mark.parametrize("route", ROUTES[:4])
def test_the_longest_deadline_is_described_and_kept(server: Server, route: str) -> None:
    kinds = [kind for path, field, kind in _integers(server) if (path, field) == (route, "deadline_ms")]
    (longest,) = {kind["maximum"] for kind in kinds}
    assert longest == 600_000
    if route != "/v1/chat/completions":  # which needs a template
        assert _post(server, route, "deadline_ms", longest).status_code == 200
        refused = _post(server, route, "deadline_ms", longest + 1)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "deadline_ms"
        assert str(longest) in refused.json()["error"]["message"]
