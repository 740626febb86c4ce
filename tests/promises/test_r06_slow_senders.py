"""R6: Clients that send or read very slowly are disconnected at their deadline, and other clients are not delayed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.http.raw_client import get, post
from tests.support.promise_figures import Promise
from tests.support.servers import Server, start_server, stop_server

DEADLINE, LATE = 1.5, 1.0
FLAGS = [f"--{name}-timeout={DEADLINE}" for name in ("head", "body", "write")]
KINDS = {
    # slowhttptest -H, -B and -X: a header at a time, a piece of the body at a time, a few bytes read at a time.
    "headers": get()[:-2],
    "body": post({"prompt": "x" * 500})[:-400],
    "read": post({"prompt": "a", "max_tokens": 600, "ignore_eos": True}),
}


async def _attack(server: Server, kind: str, rng: random.Random) -> float:
    """How long one slow client keeps its connection."""
    parts = urlsplit(server.url)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, (parts.hostname, parts.port))
    began = time.monotonic()
    with raw, contextlib.suppress(ConnectionError):
        await loop.sock_sendall(raw, KINDS[kind])
        while time.monotonic() - began < 6:
            if kind == "read":
                await asyncio.sleep(0.2)
                if not await loop.sock_recv(raw, 5):
                    break
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2 * rng.random()):
                    await loop.sock_recv(raw, 1)
                    break
            await loop.sock_sendall(raw, b"X-a: b\r\n" if kind == "headers" else b"x")
    return time.monotonic() - began


async def _attack_all(server: Server, n: int) -> dict[str, list[float]]:
    rng = random.Random(6)
    kinds = list(KINDS)
    kept = await asyncio.gather(*(_attack(server, kinds[i % 3], rng) for i in range(n)))
    return {kind: kept[i::3] for i, kind in enumerate(kinds)}


def _ask(server: Server) -> bool:
    answer = httpx.post(f"{server.url}/complete", json={"prompt": "a", "max_tokens": 5, "stream": False}, timeout=60)
    return answer.status_code == 200


@dataclass(frozen=True, slots=True)
class _Seen:
    """Measurements of slow clients, and of concurrent normal ones."""

    late: dict[str, float]
    """Seconds after the deadline until the service cut the last one of a kind."""
    answered: list[bool]

    @property
    def worst(self) -> float:
        return max(self.late["headers"], self.late["body"], self.late["read"] - LATE)


def _measure_under_attack(server: Server, n: int) -> _Seen:
    cut = 'connections_cut_total{reason="write_stalled"}'
    began, before, answered = time.monotonic(), server.metric(cut), []
    with ThreadPoolExecutor(1) as pool:
        attack = pool.submit(asyncio.run, _attack_all(server, n))
        while time.monotonic() - began < 15:
            answered.append(_ask(server))
            time.sleep(0.02)
            # What a slow reader has in its own kernel it can read at leisure: when it was cut, only we know.
            if server.metric(cut) == before + n // 3:
                break
        slow_read = time.monotonic() - began
    late = {kind: max(attack.result()[kind]) - DEADLINE for kind in ("headers", "body")}
    return _Seen({**late, "read": slow_read - 2 * DEADLINE}, answered)


def test_slow_clients_are_cut_at_the_deadline_and_others_are_served(
    tmp_path: Path, weights: Path, promise: Promise
) -> None:
    n = promise.size(90, 501)
    server = start_server(tmp_path, weights, *FLAGS, "--max-running", "200", fake_ms=1)
    try:
        seen: list[_Seen] = []

        def measure() -> _Seen:
            seen.append(_measure_under_attack(server, n))
            return seen[-1]

        found = promise.measured(measure, lambda found: found.worst <= LATE)
        for kind in ("headers", "body"):
            what = f"slow {kind}: cut after the deadline"
            promise.at_most(what, found.late[kind], target=0.3, floor=LATE, unit="s", n=n // 3)
        # The clock starts once the kernels' buffers are full, and a moment with a KiB read is a good one.
        what = "slow read: cut after the deadline"
        promise.at_most(what, found.late["read"], target=0.3, floor=2 * LATE, unit="s", n=n // 3)
        answered = [answer for each in seen for answer in each.answered]
        promise.all_of("normal requests served beside slow ones", sum(answered), len(answered))
        assert server.wait_for(lambda: server.metric("connections") <= 1)
    finally:
        assert stop_server(server) == 0
    assert "Traceback" not in server.log.read_text()


def test_without_a_deadline_they_would_stay(tmp_path: Path, weights: Path) -> None:
    """The control."""
    server = start_server(tmp_path, weights, "--head-timeout=60", "--body-timeout=60", fake_ms=1)

    async def attack() -> float:
        async with asyncio.timeout(DEADLINE + LATE + 0.5):
            rng = random.Random(1)
            done, _ = await asyncio.wait(
                [asyncio.ensure_future(_attack(server, kind, rng)) for kind in ("headers", "body")],
                return_when=asyncio.FIRST_COMPLETED,
            )
            return done.pop().result()

    try:
        with pytest.raises(TimeoutError):
            asyncio.run(attack())
    finally:
        assert stop_server(server) == 0
