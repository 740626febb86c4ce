"""The prefix cache tells no key what another has sent: cached prompt blocks are found under the same key only."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.keyed_server import Keyring
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

NAMES = ("alice", "bob", "carol")


@pytest.fixture(scope="module")
def shared(serve_module: Services, tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, Keyring]:
    folder = tmp_path_factory.mktemp("shared")
    ring = Keyring.of(folder / "keys.json", *NAMES)
    return serve_module(ring=ring, fake_ms=1), ring


def _cached(server: Server, ring: Keyring, name: str, prompt: str, **fields: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "stream": False, **fields}
    answer = httpx.post(f"{server.url}/complete", headers=ring.headers(name), json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_no_key_finds_what_another_has_sent(shared: tuple[Server, Keyring], promise: Promise) -> None:
    server, ring = shared
    across = same = tried = 0
    for i in range(promise.size(10, 200)):
        prompt = f"{i} is the number of this secret: " + "once upon a time " * 20
        assert _cached(server, ring, "alice", prompt) == 0
        for other in ("bob", "carol"):
            # What a client claims about itself gives no access.
            across += _cached(server, ring, other, prompt, user="alice", request_id=f"alice-{i}")
        same += _cached(server, ring, "alice", prompt) > 0 and _cached(server, ring, "bob", prompt) > 0
        tried += 1
    promise.at_most("S14", "cached tokens found under another key", across, target=0, n=2 * tried)
    promise.all_of("S14", "prompts found again under their own key", same, tried)


def test_a_caller_cannot_choose_its_salt(shared: tuple[Server, Keyring]) -> None:
    server, ring = shared
    for field in ("salt", "cache_salt", "prefix_salt"):
        body = {"prompt": "x", "max_tokens": 1, "stream": False, field: "alice"}
        answer = httpx.post(f"{server.url}/complete", headers=ring.headers("bob"), json=body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "unknown_field"
        answer = httpx.post(f"{server.url}/v1/completions", headers=ring.headers("bob"), json=body)
        assert field in json.dumps(answer.json().get("warnings"))


def test_streams_belong_to_the_key_that_began_them(shared: tuple[Server, Keyring]) -> None:
    server, ring = shared
    body = {"prompt": "x", "max_tokens": 3}
    began = httpx.post(f"{server.url}/complete", headers=ring.headers("alice"), json=body, timeout=60)
    name = began.headers["x-request-id"]
    url = f"{server.url}/complete/{name}"
    for headers, status in ((ring.headers("bob"), 404), ({}, 401)):
        assert httpx.get(f"{url}/events", headers=headers).status_code == status
        assert httpx.delete(url, headers=headers).status_code == status
    unknown = httpx.get(f"{server.url}/complete/req-unknown/events", headers=ring.headers("bob")).json()["error"]
    foreign = httpx.get(f"{url}/events", headers=ring.headers("bob")).json()["error"]
    assert {**unknown, "request_id": 0} == {**foreign, "request_id": 0}, "a foreign stream looks like none"
    mine = httpx.get(f"{url}/events", headers=ring.headers("alice"))
    assert mine.text == began.text
    # A new key of the same name is another tenant.
    old = ring.revoke("carol")
    ring.add("carol")
    assert server.wait_for(
        lambda: httpx.get(f"{server.url}/v1/models", headers=ring.headers("carol")).status_code == 200
    )
    assert old != ring.keys["carol"]
