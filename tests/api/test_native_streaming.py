"""POST /complete over a real socket: events, parity without streaming and with running alone, early disconnects."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.completion_client import parse_events, stream, whole
from tests.support.servers import Server, is_clean, running_server

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 240, "ignore_eos": True, "seed": 7}


def test_a_stream_has_start_tokens_and_one_done_in_numbered_events(server: Server) -> None:
    events = stream(server.url, prompt="Once upon a time", max_tokens=20, seed=1, ignore_eos=True)
    names = [event.name for event in events]
    assert names[0] == "start" and names[-1] == "done"
    assert set(names[1:-1]) == {"token"}
    request_id = events[0].data["id"]
    assert [event.id for event in events] == [f"{request_id}:{n}" for n in range(len(events))]
    done = events[-1].data
    assert done["usage"]["completion_tokens"] == 20
    assert done["usage"]["total_tokens"] == 20 + events[0].data["prompt_tokens"]
    assert done["choices"] == [{"index": 0, "finish_reason": "length", "stop_reason": None}]
    assert re.fullmatch(r"[0-9a-f]{64}", done["receipt"]["weights_version"])
    assert done["receipt"]["seed"] == events[0].data["seed"] == 1
    assert done["timings"]["first_token_ms"] > 0


def test_headers_tell_proxies_to_keep_their_hands_off(server: Server) -> None:
    response = httpx.post(f"{server.url}/complete", json={"prompt": "a", "max_tokens": 1})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-request-id"] == parse_events(response.text)[0].data["id"]


@pytest.mark.parametrize("body", [{}, {"stream": False}, {"model": "", "stream": True}])
def test_a_request_that_is_sent_again_with_its_key_gets_the_same_response(server: Server, body: dict[str, Any]) -> None:
    path = "/v1/completions" if "model" in body else "/complete"
    headers = {"Idempotency-Key": f"{path} {body}"}
    body = {"prompt": "The fox", "max_tokens": 5, **body}
    first, second = (httpx.post(f"{server.url}{path}", json=body, headers=headers) for _ in range(2))
    assert (first.status_code, first.headers.get("idempotent-replayed")) == (200, None)
    assert (second.status_code, second.headers["idempotent-replayed"]) == (200, "true")
    assert (second.text, second.headers["content-type"]) == (first.text, first.headers["content-type"])
    assert second.headers["x-request-id"] != first.headers["x-request-id"]


def test_a_stream_that_was_cut_is_sent_again_by_its_key(server: Server) -> None:
    """The same completion from its start: a seed that the service chooses would give another text."""
    headers = {"Idempotency-Key": "a stream that is cut"}
    with httpx.stream("POST", f"{server.url}/complete", json={**LONG, "seed": None}, headers=headers) as response:
        start = next(line for line in response.iter_lines() if line.startswith("data: "))
    again = httpx.post(f"{server.url}/complete", json={**LONG, "seed": None}, headers=headers, timeout=60)
    events = parse_events(again.text)
    assert again.headers["idempotent-replayed"] == "true"
    assert (events[0].data, events[-1].name) == (json.loads(start.removeprefix("data: ")), "done")
    other = httpx.post(f"{server.url}/complete", json={**LONG, "seed": 3}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_reused")
    third = httpx.post(f"{server.url}/complete", json={**LONG, "seed": None}, headers=headers)
    assert third.text == again.text


def test_token_details_carry_bytes_and_ordered_alternatives(server: Server) -> None:
    answer = whole(server.url, prompt="The fox", max_tokens=30, seed=3, logprobs=5, ignore_eos=True)
    tokens = answer["choices"][0]["tokens"]
    assert len(tokens) == 30
    for token in tokens:
        assert len(token["top"]) == 5
        values = [candidate["logprob"] for candidate in token["top"]]
        assert values == sorted(values, reverse=True)
        assert token["logprob"] <= values[0]
    data = b"".join(bytes(token["bytes"]) for token in tokens)
    assert answer["choices"][0]["text"] == data.decode("utf-8", errors="replace")


def test_a_cancelled_stream_ends_with_cancelled(tmp_path: Path, weights: Path) -> None:
    """Around the fake engine, with which it lasts for minutes: it still runs when the DELETE comes."""
    with running_server(tmp_path, weights, fake_ms=20) as server:
        body = {**LONG, "max_tokens": 8000}
        with httpx.stream("POST", f"{server.url}/complete", json=body, timeout=60) as response:
            request_id = response.headers["x-request-id"]
            lines = response.iter_lines()
            while next(lines) != "event: token":
                pass
            answer = httpx.delete(f"{server.url}/complete/{request_id}")
            rest = list(lines)
        assert answer.json() == {"id": request_id, "cancelled": True}
        done = json.loads(rest[-2].removeprefix("data: "))
        assert done["choices"][0]["finish_reason"] == "cancelled"
        assert done["usage"]["completion_tokens"] < 8000
        assert is_clean(server, 30.0)
        assert httpx.delete(f"{server.url}/complete/{request_id}").status_code == 404
