"""POST /v1/completions: OpenAI's shapes, strict where clients are, and the same text as the native endpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.api.openai import responder, routes
from app.generation import completion
from tests.support.async_test import async_test
from tests.support.fake_app import running_app
from tests.support.servers import Server

pytestmark = pytest.mark.slow

SOME: dict[str, Any] = {"prompt": "Once upon", "max_tokens": 12, "temperature": 1.1, "seed": 7, "ignore_eos": True}


def _post(server: Server, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def _whole(server: Server, **body: Any) -> dict[str, Any]:
    response = _post(server, **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_best_of_returns_the_most_likely_of_its_samples(server: Server) -> None:
    body = {**SOME, "logprobs": 0}
    drawn = _whole(server, **body, n=6)["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / 12 for c in drawn]
    ranked = [drawn[i]["text"] for i in sorted(range(6), key=lambda i: -means[i])]
    best = _whole(server, **SOME, n=2, best_of=6)
    assert [c["text"] for c in best["choices"]] == ranked[:2]
    assert [c["index"] for c in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == 6 * 12


def test_fields_that_no_server_has_are_accepted_and_named(server: Server) -> None:
    assert "warnings" not in _whole(server, **SOME)
    options = {"include_usage": True, "colour": 1}
    warnings = _whole(server, **SOME, my_label=0.1, stream_options=options)["warnings"]
    assert len(warnings) == 3
    for warning, words in zip(warnings, ("my_label", "stream_options.colour", "without stream"), strict=True):
        assert words in warning


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [({"model": "other"}, "model", 404), ({"temperature": -1}, "temperature", 400), ({"n": 0}, "n", 400),
     ({"stop": ["a"] * 65}, "stop", 400), ({"best_of": 65}, "best_of", 400),
     ({"stream_options": 5}, "stream_options", 400),
     ({"logprobs": True}, "logprobs", 400), ({"response_format": 5}, "response_format", 400),
     ({"best_of": 1, "n": 2}, "best_of", 400), ({"best_of": 2, "stream": True}, "best_of", 400),
     ({"regex": "a", "grammar": "b"}, "regex", 400), ({"prompt": ["a", [1]]}, "prompt", 400)],
)  # fmt: skip
def test_error_names_one_field_in_the_common_shape(
    server: Server, body: dict[str, Any], param: str, status: int
) -> None:
    response = _post(server, **{**SOME, **body})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["param"], error["request_id"]) == (param, response.headers["x-request-id"])


@async_test
async def test_idle_streams_send_comments_that_clients_skip(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((routes, "PING_SECONDS"), (responder, "PING_SECONDS"), (completion, "_QUEUE_EVENT_SECONDS")):
        monkeypatch.setattr(module, name, 0.05)
    async with running_app(weights, max_running=1) as app:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            bodies = [{"prompt": "a", "max_tokens": n, "ignore_eos": True, "stream": True} for n in (250, 2)]
            requests = [client.post("/v1/completions", json=body) for body in bodies]
            _, waited = await asyncio.gather(*requests)
    pings, _, rest = waited.text.partition("data: ")
    assert pings == ": ping\n" * pings.count("\n") and len(pings) > len(": ping\n")
    assert "ping" not in rest and rest.endswith("data: [DONE]\n\n")
