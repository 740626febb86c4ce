"""POST /complete over a real socket: headers, and requests that are sent again with their idempotency key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.completion_client import parse_events
from tests.support.servers import Server, running_server

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 240, "ignore_eos": True, "seed": 7}


def test_headers_prevent_buffering_and_transformation_by_proxies(server: Server) -> None:
    response = httpx.post(f"{server.url}/complete", json={"prompt": "a", "max_tokens": 1})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    events = parse_events(response.text)
    assert response.headers["x-request-id"] == events[0].data["id"]
    assert events[-1].data["timings"]["first_token_ms"] > 0
    assert re.fullmatch(r"[0-9a-f]{64}", events[-1].data["receipt"]["weights_version"])


@pytest.mark.parametrize("body", [{}, {"stream": False}, {"model": "", "stream": True}])
def test_request_repeated_with_its_idempotency_key_gets_the_same_response(server: Server, body: dict[str, Any]) -> None:
    path = "/v1/completions" if "model" in body else "/complete"
    headers = {"Idempotency-Key": f"{path} {body}"}
    body = {"prompt": "The fox", "max_tokens": 5, **body}
    first, second = (httpx.post(f"{server.url}{path}", json=body, headers=headers) for _ in range(2))
    assert (first.status_code, first.headers.get("idempotent-replayed")) == (200, None)
    assert (second.status_code, second.headers["idempotent-replayed"]) == (200, "true")
    assert (second.text, second.headers["content-type"]) == (first.text, first.headers["content-type"])
    assert second.headers["x-request-id"] != first.headers["x-request-id"]


def test_key_of_a_running_stream_is_in_use_and_free_once_its_client_has_gone(tmp_path: Path, weights: Path) -> None:
    headers = {"Idempotency-Key": "a stream that is cut"}
    with (
        running_server(tmp_path, weights, fake_ms=20) as server,  # which the other requests do not outlast
        httpx.Client(base_url=server.url, headers=headers, timeout=60) as client,
    ):
        with client.stream("POST", "/complete", json=LONG) as response:
            lines = response.iter_lines()  # its end would close the connection
            next(lines)
            refused = client.post("/complete", json=LONG)
            other = client.post("/complete", json={**LONG, "seed": 3})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_key_in_use")
        assert refused.headers["retry-after"] == "1"
        assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_reused")
        again = refused
        while again.status_code == 409:  # the service has not noticed yet that the client has gone
            again = client.post("/complete", json=LONG)
        assert (again.status_code, parse_events(again.text)[-1].name) == (200, "done")
        assert "idempotent-replayed" not in again.headers
