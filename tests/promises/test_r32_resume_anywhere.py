"""R32: Kill any service behind nginx: its streams go on at another one, on both APIs, without a gap or a repetition.

With deploy/nginx/two-servers.conf one of two services is killed (kill -9) under 64 streams. Their clients go on with
`resume`: half of them have the ids of the tokens, the others the text alone.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.http.nginx import needs_nginx, running_nginx, two_servers
from tests.support.promise_figures import Promise
from tests.support.resuming_client import Received
from tests.support.servers import Server
from tests.support.services import Services
from tests.support.trials import Trials

pytestmark = needs_nginx
_STREAMS = 64
_BODY: dict[str, Any] = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "temperature": 1.0, "stream": True}
_LIMITS = httpx.Limits(max_connections=None)
_SECONDS = 120.0
"""How long a client tries to go on."""


class _Client:
    """One stream over any number of connections."""

    def __init__(self, url: str, path: str, number: int) -> None:
        self._url, self._path, self._with_ids = url, path, number % 2 == 0
        self.seed = number
        self._body = {**_BODY, "n": 1 + number % 4 // 3, "stop": ["zqzq"], "return_token_ids": self._with_ids}
        if number % 2:
            self._body["seed"] = number  # the others go on with the seed that the service drew
        self.received = Received(int(self._body["n"]))
        self.has_begun = asyncio.Event()
        """Whether some of the text has arrived."""
        self.n_connections = 0

    async def run(self, client: httpx.AsyncClient, *, resumes: bool = True) -> None:
        """Reads the stream to its end, or to where it breaks."""
        async with asyncio.timeout(_SECONDS):
            await self._read(client, "POST", self._path, json=self._body)
            while resumes and not self.received.is_done:
                await self._go_on(client)

    async def _go_on(self, client: httpx.AsyncClient) -> None:
        last_id = self.received.last_id
        if last_id:
            path = f"/complete/{last_id.rpartition(':')[0]}/events"
            if await self._read(client, "GET", path, headers={"Last-Event-ID": last_id}):
                return
        body = self.received.body(self._body, with_ids=self._with_ids)
        if not await self._read(client, "POST", self._path, json=body):
            await asyncio.sleep(0.1)

    async def _read(self, client: httpx.AsyncClient, method: str, path: str, **options: Any) -> bool:
        """Takes the whole events of one connection; False if the request was refused."""
        try:
            async with client.stream(method, f"{self._url}{path}", **options) as response:
                if response.status_code != 200:
                    assert response.status_code in (404, 502, 503), await response.aread()
                    return False
                self.n_connections += 1
                await self._take(response)
        except httpx.TransportError:
            pass
        return True

    async def _take(self, response: httpx.Response) -> None:
        pending = b""
        async for piece in response.aiter_raw():
            *blocks, pending = (pending + piece).split(b"\n\n")
            for block in blocks:
                self.received.take(block)
            if any(choice.text for choice in self.received.choices):
                self.has_begun.set()

    @property
    def whole_body(self) -> dict[str, Any]:
        """The first body, with the seed of what arrived."""
        return {**self._body, "seed": self.received.start["seed"]}


async def _run_and_kill(url: str, path: str, victim: Server, *, resumes: bool = True) -> list[_Client]:
    """64 streams through nginx, under which one service is killed."""
    clients = [_Client(url, path, number) for number in range(_STREAMS)]
    async with httpx.AsyncClient(timeout=60, limits=_LIMITS) as client, asyncio.TaskGroup() as group:
        for one in clients:
            group.create_task(one.run(client, resumes=resumes))
        async with asyncio.timeout(_SECONDS):
            await asyncio.gather(*(one.has_begun.wait() for one in clients))
        assert not any(one.received.is_done for one in clients), "the kill must come while all streams run"
        victim.process.kill()
    return clients


async def _compare(url: str, path: str, clients: list[_Client]) -> Trials:
    """The streams against the same ones without a kill."""
    trials = Trials()
    async with httpx.AsyncClient(timeout=60, limits=_LIMITS) as client:
        requests = [client.post(f"{url}{path}", json=one.whole_body) for one in clients]
        for one, response in zip(clients, await asyncio.gather(*requests), strict=True):
            whole = Received(one.received.n_choices)
            for block in response.content.split(b"\n\n")[:-1]:
                whole.take(block)
            name = one.received.last_id.rpartition(":")[0]
            trials.compare(whole.outcome, one.received.outcome, seed=one.seed, request_id=name)
    return trials


@pytest.mark.parametrize("path", ["/complete", "/v1/completions"])
def test_streams_go_on_at_another_service_after_a_kill(
    serve: Services, tmp_path: Path, promise: Promise, path: str
) -> None:
    trials, n_resumed = Trials(), 0
    for round_number in range(promise.size(1, 6)):
        servers = [serve("--max-running", "64", fake_ms=10, is_killed=True) for _ in range(2)]
        (folder := tmp_path / str(round_number)).mkdir()
        with running_nginx(folder, two_servers(servers)) as url:
            clients = asyncio.run(_run_and_kill(url, path, servers[round_number % 2]))
        survivor = servers[1 - round_number % 2]
        trials += asyncio.run(_compare(survivor.url, path, clients))
        n_resumed += sum(one.n_connections > 1 for one in clients)
    promise.all_of(f"streams of {path} whole after a service behind nginx was killed", trials)
    assert n_resumed >= trials.n // 4, "the killed service must have had its share of the streams"


def test_streams_break_without_resuming(serve: Services, tmp_path: Path) -> None:
    """Positive control."""
    servers = [serve("--max-running", "64", fake_ms=10, is_killed=True) for _ in range(2)]
    with running_nginx(tmp_path, two_servers(servers)) as url:
        clients = asyncio.run(_run_and_kill(url, "/complete", servers[0], resumes=False))
    whole = asyncio.run(_compare(servers[1].url, "/complete", clients))
    assert whole.good < whole.n and sum(one.received.is_done for one in clients) == whole.good
