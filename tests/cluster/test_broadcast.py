"""Broadcasts to all replicas: one that hangs delays no other replica's answer, and is reported."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from app.cluster import gateway as front_module
from app.cluster.gateway import Gateway
from app.cluster.messages import FullResponse, Head
from app.common.settings import Settings
from tests.support.scripted_replicas import EVENTS, JSON, START, Lost, Played, Silent, event, taken, token

PAGE = b"# HELP a_total What.\n# TYPE a_total counter\na_total 1\n"
UNKNOWN = Head(404, JSON.headers)


def fetch(replicas: Played, method: str, path: str) -> httpx.Response:
    """One request; no call to a replica is still open when it is answered."""

    async def visit() -> httpx.Response:
        app = Gateway(Settings(), replicas, max_retries=0)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://front") as client:
            response = await asyncio.wait_for(client.request(method, path), 30)
        assert all(task.done() for task in replicas.tasks)
        return response

    return asyncio.run(visit())


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that hangs times out at once."""
    monkeypatch.setattr(front_module, "_BROADCAST_SECONDS", 0.05)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that hangs never times out."""
    monkeypatch.setattr(front_module, "_BROADCAST_SECONDS", 3600.0)


@pytest.mark.usefixtures("patient")
def test_a_delete_is_answered_by_the_replica_that_has_the_stream_while_others_hang() -> None:
    has_it = FullResponse("b", JSON, b'{"id": "req-1", "cancelled": true}')
    replicas = Played(all_of=[Silent, FullResponse("a", UNKNOWN, b"{}"), has_it])
    assert fetch(replicas, "DELETE", "/complete/req-1").json() == {"id": "req-1", "cancelled": True}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("others", "status"), [([], 404), ([Lost], 404), ([Silent], 503)], ids=["all answer", "one is lost", "one hangs"]
)
def test_a_stream_is_not_reported_missing_while_a_replica_that_may_have_it_hangs(
    others: list[Any], status: int
) -> None:
    response = fetch(Played(all_of=[FullResponse("a", UNKNOWN, b"{}"), *others]), "DELETE", "/complete/req-1")
    assert response.status_code == status
    assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.usefixtures("impatient")
def test_metrics_of_the_others_are_served_and_tell_who_hangs() -> None:
    replicas = Played()

    async def visits() -> None:
        app = Gateway(Settings(), replicas, max_retries=0)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://front") as client:

            async def reported(*answers: Any) -> set[str]:
                replicas._all = list(answers)
                text = (await client.get("/metrics")).text
                return {line for line in text.splitlines() if line.startswith(("a_total", "inkstream_relay_s", _OF))}

            one, two, three = (FullResponse(name, JSON, PAGE) for name in ("one", "two", "three"))
            both = {'a_total{server="one"} 1.0', _OF + '{server="one"} 1.0'}
            others = {'a_total{server="two"} 1.0', _OF + '{server="two"} 1.0', _SILENT + " 0.0"}
            assert await reported(one, two) == both | others
            assert await reported(one, Silent) == both | {_OF + '{server="two"} 0.0', _SILENT + " 1.0"}
            assert await reported(one, Lost) == both | {_SILENT + " 0.0"}
            replaced = {'a_total{server="three"} 1.0', _OF + '{server="three"} 1.0', _SILENT + " 0.0"}
            assert await reported(one, three) == both | replaced

    asyncio.run(visits())


_OF, _SILENT = "inkstream_relay_replica_answers", "inkstream_relay_silent_replicas"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("all_of", [[], [Silent], [Lost], [Silent, Silent]])
def test_where_no_replica_answers_the_front_says_so(all_of: list[Any]) -> None:
    for method, path in (("GET", "/metrics"), ("DELETE", "/complete/req-1")):
        response = fetch(Played(all_of=all_of), method, path)
        assert response.status_code == 503 and response.headers["retry-after"]


@pytest.mark.usefixtures("impatient")
def test_a_stream_that_the_front_knows_is_stopped_although_its_replica_hangs() -> None:
    """It ends when that replica is replaced, and does not continue on another."""
    late = asyncio.Event()
    started = taken(EVENTS, event("start", **START), token("Once"), late, Lost)
    replicas = Played(started, all_of=[Silent, FullResponse("a", UNKNOWN, b"{}")])

    async def visits() -> None:
        app = Gateway(Settings(), replicas, max_retries=9)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://front") as client:
            reading = asyncio.ensure_future(client.post("/complete", json={"prompt": "Once"}))
            for _ in range(1000):
                if not replicas.calls:
                    await asyncio.sleep(0)
            name = replicas.calls[0].request_id
            assert (await client.delete(f"/complete/{name}")).json() == {"id": name, "cancelled": True}
            late.set()
            assert '"code": "cancelled"' in (await reading).text
            assert (await client.delete(f"/complete/{name}")).status_code == 404, "the stream has ended"
            assert len(replicas.calls) == 1

    asyncio.run(visits())
