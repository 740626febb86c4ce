"""S26: One tenant's long texts, costly grammars and costly chats cost another tenant at most three times of alone."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.keyed_server import Keyring
from tests.support.load.noisy_neighbor import Cost, Load, cost, running
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

_TARGET, _FLOOR = 3, 5
_MEGABYTE = "Once upon a time there was a fox. " * 30_000
_PROMPT = "The quick brown fox jumps over the lazy dog. " * 145  # 6,525 characters
_TEMPLATE = """{% for message in messages %}
{% for i in range(message.content | length) %}{% for j in range(100) %}{% endfor %}{% endfor %}
{{ message.content[:20] }}{% endfor %}"""
_SLOW_CHAT = "x" * 15_000
_LENGTHS = itertools.count(1)
"""Of the victim's grammars, which are all new to the service."""
_BOMBS = [
    {"anyOf": [{"type": "integer", "multipleOf": prime} for prime in (a, b, c)]}
    for a, b, c in ((999983, 999979, 999961), (999979, 999953, 999931), (999961, 999917, 999907))
]
"""JSON schemas for multiples of large primes: their automaton needs as many states as the product of the primes."""


@pytest.fixture(scope="module")
def server(
    serve_module: Services, tmp_path_factory: pytest.TempPathFactory, weights: Path, ring: Keyring, faults: Faults
) -> Server:
    """A service with a chat template whose time grows with the message."""
    folder = tmp_path_factory.mktemp("s26")
    shutil.copytree(weights, folder / "weights")
    (folder / "weights" / "chat_template.jinja").write_text(_TEMPLATE)
    environment = faults.removing("tenant_queue.fifo")
    return serve_module(
        "--guide-seconds",
        "1",
        ring=ring,
        weights=folder / "weights",
        fake_ms=5,
        environment=environment,
        is_killed=True,
    )


@pytest.fixture
def ask(server: Server, ring: Keyring) -> Iterator[Callable[..., float]]:
    """Sends the victim's request and returns its seconds."""
    with httpx.Client(base_url=server.url, headers=ring.headers("victim"), timeout=120) as client:

        def send(path: str, **body: Any) -> float:
            started = time.perf_counter()
            response = client.post(path, json={"max_tokens": 4, "stream": False, **body})
            assert response.status_code == 200, response.text
            return time.perf_counter() - started

        yield send


@pytest.fixture
def attack(server: Server, ring: Keyring) -> Callable[..., Load]:
    """Describes the attacker's load."""

    def load(clients: int, path: str, *bodies: dict[str, Any]) -> Load:
        requests = [(path, body) for body in bodies]
        return Load(url=server.url, key=ring.keys["attacker"], requests=requests, clients=clients)

    return load


@pytest.fixture(params=["texts", "grammars", "chats"])
def scene(
    request: pytest.FixtureRequest, ask: Callable[..., float], attack: Callable[..., Load]
) -> tuple[str, Callable[[], float], Load]:
    """A kind of work, the victim's normal request of it, and the attacker's costly ones."""
    match request.param:
        case "texts":
            load = attack(20, "/tokenize", {"prompt": _MEGABYTE})
            return "6,500-character prompt", lambda: ask("/complete", prompt=_PROMPT), load
        case "grammars":
            bombs = [
                {"prompt": "a", "max_tokens": 4, "stream": False, "json_schema": {**bomb, "title": f"{i}"}}
                for i in range(200)
                for bomb in _BOMBS
            ]
            load = attack(4, "/complete", *bombs)
            return "guided request", lambda: ask("/complete", prompt="a", regex=f"[ab]{{{next(_LENGTHS)}}}c"), load
    chat = {"messages": [{"role": "user", "content": _SLOW_CHAT}], "max_tokens": 1}
    victim = [{"role": "user", "content": "Hello"}]
    load = attack(8, "/v1/chat/completions", chat)
    return "chat", lambda: ask("/v1/chat/completions", messages=victim), load


@pytest.mark.timed
def test_another_tenants_work_costs_little(scene: tuple[str, Callable[[], float], Load], promise: Promise) -> None:
    what, victim, load = scene

    def measure() -> Cost:
        return cost(victim, load, rounds=promise.size(2, 5), each=promise.size(5, 20))

    found = promise.measured(measure, lambda found: found.ratio <= _TARGET)
    print(what, found)
    promise.at_most(
        f"{what} concurrent with another tenant's, against alone", found.ratio,
        target=_TARGET, floor=_FLOOR, n=found.n,
    )  # fmt: skip


def test_one_worker_in_order_of_arrival_is_noticed(
    scene: tuple[str, Callable[[], float], Load], faults: Faults
) -> None:
    """Positive control."""
    _, victim, load = scene
    alone = min(victim() for _ in range(5))
    with faults.armed("tenant_queue.fifo", "remove"), running(load):
        assert victim() > _FLOOR * alone
