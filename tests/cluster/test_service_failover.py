"""The gateway in front of the real service, losing a replica at each point in turn: the output stays the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.cluster.messages import Call
from app.cluster.replica_pool import ReplicaPool
from app.cluster.replica_server import ReplicaServer
from tests.support.async_test import async_test
from tests.support.completion_client import joined_text, parse_events
from tests.support.fake_app import running_app
from tests.support.scripted_replicas import DyingReplicas, gateway_client, serve_replicas, wait_until

pytestmark = pytest.mark.slow

BODY: dict[str, Any] = {"prompt": "Once upon", "max_tokens": 40, "temperature": 1.0, "ignore_eos": True}


async def _send(app: FastAPI, deaths: Sequence[int], path: str, method: str = "POST", **request: Any) -> httpx.Response:
    async with (
        serve_replicas(app) as (pool, _, _),
        gateway_client(DyingReplicas(pool, deaths), max_retries=9) as client,
    ):
        return await client.request(method, path, **request)


@async_test
async def test_losing_replicas_at_any_point_does_not_change_the_response(weights: Path) -> None:
    """Covers streams with token details and several choices, a seed chosen by the service, and whole responses."""

    async with running_app(weights, resume_seconds=0) as app:
        detailed = {**BODY, "seed": 5, "n": 2, "logprobs": 1}
        expected = (await _send(app, [], "/complete", json={**detailed, "stream": False})).json()["choices"]
        for deaths in ([1], [2], [3], [9], [5, 20], [30, 2, 12]):
            events = parse_events((await _send(app, deaths, "/complete", json=detailed)).text)
            assert [event.name for event in events].count("start") == 1
            tokens = [event.data for event in events if event.name == "token"]
            for choice in expected:
                mine = [data for data in tokens if data["index"] == choice["index"]]
                assert "".join(data["text"] for data in mine) == choice["text"]
                assert [token for data in mine for token in data["tokens"]] == choice["tokens"]
        random = parse_events((await _send(app, [12, 4], "/complete", json=BODY)).text)
        whole = {**BODY, "seed": random[0].data["seed"], "stream": False}
        whole_output = (await _send(app, [0, 1, 2], "/complete", json=whole)).json()
        assert joined_text(random) == whole_output["choices"][0]["text"]
        assert (random[-1].name, random[-1].data["receipt"]["seed"]) == ("done", whole["seed"])


@async_test
async def test_pages_and_errors_are_passed_through(weights: Path) -> None:
    async with running_app(weights, resume_seconds=0) as app:
        for path, status in (("/", 200), ("/docs", 200), ("/v1/models", 200), ("/health", 200), ("/no", 404)):
            assert (await _send(app, [], path, "GET")).status_code == status
        refused = await _send(app, [], "/complete", json={**BODY, "max_token": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_field")
        assert refused.headers["x-request-id"] == refused.json()["error"]["request_id"]
        unknown = await _send(app, [], "/complete/req-1", "DELETE")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_request")
        assert 'inkstream_requests_running{server="a"} 0.0' in (await _send(app, [], "/metrics", "GET")).text


@async_test
async def test_cancelling_a_broadcast_at_any_point_releases_the_replica(weights: Path) -> None:
    """Cancels after every possible number of event loop turns, including the moment of admission."""

    async def cancel_after(pool: ReplicaPool, server: ReplicaServer, app: FastAPI, turns: int) -> None:
        body = json.dumps(BODY).encode()
        headers = ((b"host", b"localhost"), (b"content-type", b"application/json"))
        call = Call(request_id=f"r{turns}", method="POST", path="/complete", query=b"", headers=headers, body=body)
        (asking,) = pool.broadcast(call)
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await wait_until(lambda: not server.n_open)
        assert not app.state.service.engine.engines[0].load, f"after {turns} turns"

    async with running_app(weights, resume_seconds=0) as app, serve_replicas(app) as (pool, _, (server,)):
        await cancel_after(pool, server, app, 1000)
        for turns in range(100):
            await cancel_after(pool, server, app, turns)
