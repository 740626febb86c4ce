"""R22: Streams pass through nginx with its default settings: immediately, and through silences longer than its read
timeout.

With deploy/nginx/two-servers.conf two services restart in turn, and no request fails.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.async_test import async_test
from tests.support.completion_client import joined_text, parse_events
from tests.support.http.nginx import needs_nginx, running_nginx, two_servers
from tests.support.promise_figures import Promise
from tests.support.servers import Server, stop_server
from tests.support.services import Services

pytestmark = needs_nginx
SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "seed": 1}


@contextmanager
def _nginx(folder: Path, server: Server, extra: str = "") -> Iterator[str]:
    """nginx with its default settings but for its port and upstream."""
    location = f"location / {{ proxy_pass {server.url}; }}"
    with running_nginx(folder, f"server {{ listen 127.0.0.1:PORT; {extra} {location} }}") as url:
        yield url


def _timed_response(url: str) -> tuple[float, str]:
    """Seconds until the stream arrived, and its bytes as received."""
    began = time.monotonic()
    answer = httpx.post(f"{url}/complete", json={**SHORT, "max_tokens": 1}, timeout=60)
    return time.monotonic() - began, answer.text


@pytest.fixture(scope="module", autouse=True)
def silence(serve_module: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[tuple[float, str]]]:
    """A response silent for longer than nginx's read timeout; it runs while the other tests run."""
    server = serve_module("--engine-silence", "60", fake_ms=16_500, is_killed=True)
    folder = tmp_path_factory.mktemp("silence")
    with _nginx(folder, server, "proxy_read_timeout 15s;") as url, ThreadPoolExecutor(1) as thread:
        yield thread.submit(_timed_response, url)


def _first_token(url: str) -> tuple[float, list[float]]:
    """Seconds to the first token, and the arrival times of all tokens."""
    began, at = time.monotonic(), []
    with httpx.stream("POST", f"{url}/complete", json=SHORT, timeout=30) as response:
        for line in response.iter_lines():
            if line == "event: token":
                at.append(time.monotonic() - began)
    return at[0], at


@pytest.mark.timed
def test_nginx_passes_tokens_immediately_and_one_by_one(serve: Services, tmp_path: Path, promise: Promise) -> None:
    server = serve(fake_ms=30)
    with _nginx(tmp_path, server) as url:

        def latest() -> tuple[float, float]:
            later, spread = [], []
            for _ in range(5):
                direct, _ = _first_token(server.url)
                proxied, at = _first_token(url)
                later.append(proxied - direct)
                spread.append(at[-1] - at[0])
            return max(later), min(spread)

        later, spread = promise.measured(latest, lambda found: found[0] <= 0.2 and found[1] > 0.4)
        assert spread > 0.4, "20 tokens of 30 ms must not arrive in one piece"
        promise.at_most("delay of the first token through nginx", later, target=0.2, unit="s", n=5)
        for path in ("/", "/docs", "/v1/models"):
            assert httpx.get(f"{url}{path}").status_code == 200


def test_stream_survives_a_silence_longer_than_the_read_timeout(
    silence: Future[tuple[float, str]], promise: Promise
) -> None:
    seconds, answer = silence.result()
    assert seconds > 16
    events = parse_events(answer)
    assert (events[-1].name, bool(joined_text(events))) == ("done", True)
    assert ": ping" in answer
    promise.all_of("streams that survive 16 s of silence and nginx's read timeout of 15 s", 1, 1)


async def _send_until(is_over: asyncio.Event, url: str, outcomes: Counter[str], ended: list[int], index: int) -> None:
    """Sends streams and whole requests in turn; counts how they end, and in `ended[index]` how many did."""
    async with httpx.AsyncClient(timeout=60) as client:
        for stream in itertools.cycle((True, False)):
            try:
                response = await client.post(f"{url}/complete", json={**SHORT, "stream": stream})
                is_complete = "event: done" in response.text if stream else response.status_code == 200
                outcomes["complete" if is_complete else f"{response.status_code} {response.text[-300:]}"] += 1
            except httpx.TransportError as error:
                outcomes[type(error).__name__] += 1
            ended[index] += 1
            if is_over.is_set():
                return


async def _restart_under_load(
    servers: list[Server], serve: Services, folder: Path, conf: str, restarts: int
) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    is_over = asyncio.Event()
    with running_nginx(folder, conf) as url:
        ended = [0] * 12
        clients = [asyncio.create_task(_send_until(is_over, url, outcomes, ended, index)) for index in range(12)]
        for number in range(restarts):
            index, port = number % 2, str(servers[number % 2].service.address.port)
            assert await asyncio.to_thread(stop_server, servers[index]) == 0
            servers[index] = await asyncio.to_thread(serve, "--port", port, fake_ms=3)
            # A request that it refused while it was starting is still on its way, and must not meet the next stop.
            before = tuple(ended)
            assert await asyncio.to_thread(
                servers[index].wait_for, lambda before=before: all(map(int.__lt__, before, ended))
            )
        is_over.set()
        await asyncio.gather(*clients)
    print(outcomes)
    return outcomes


@async_test
async def test_two_services_restart_in_turn_without_failed_requests(
    serve: Services, tmp_path: Path, promise: Promise
) -> None:
    servers = [serve(fake_ms=3), serve(fake_ms=3)]
    conf = two_servers(servers)
    outcomes = await _restart_under_load(servers, serve, tmp_path, conf, 2 * promise.size(1, 10))
    promise.all_of("requests complete while two services restart in turn", outcomes["complete"], outcomes.total())
    assert outcomes.total() > 50, outcomes
    without_retry = re.sub(r"proxy_next_upstream .*;", "proxy_next_upstream off;", conf)
    (tmp_path / "control").mkdir()
    control = await _restart_under_load(servers, serve, tmp_path / "control", without_retry, 1)
    assert control["complete"] < control.total(), "requests must fail without retries"


def test_stream_resumes_at_the_service_that_started_it(serve: Services, tmp_path: Path) -> None:
    with running_nginx(tmp_path, two_servers([serve(fake_ms=10), serve(fake_ms=10)])) as url:
        whole = parse_events(httpx.post(f"{url}/complete", json=SHORT, timeout=60).text)
        for _ in range(4):
            with httpx.stream("POST", f"{url}/complete", json=SHORT, timeout=60) as response:
                start = next(line for line in response.iter_lines() if line.startswith("id: ")).removeprefix("id: ")
            path, last = f"/complete/{start.partition(':')[0]}/events", {"Last-Event-ID": start}
            rest = httpx.get(f"{url}{path}", headers=last, timeout=60)
            assert (rest.status_code, joined_text(parse_events(rest.text))) == (200, joined_text(whole))
        assert httpx.delete(f"{url}/complete/req-unknown", timeout=60).status_code == 404
