"""The prefix cache reveals nothing to another key: cached prompt blocks are found under the same key only."""

from __future__ import annotations

from typing import Any

import httpx

from tests.support.keyed_server import Keyring
from tests.support.promise_figures import Promise
from tests.support.servers import Server


def _cached(server: Server, ring: Keyring, name: str, prompt: str, **fields: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "stream": False, **fields}
    answer = httpx.post(f"{server.url}/complete", headers=ring.headers(name), json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_keys_do_not_share_cached_prompts(keyed_server: tuple[Server, Keyring], promise: Promise) -> None:
    server, ring = keyed_server
    cross_key_tokens = same = tried = 0
    for i in range(promise.size(10, 200)):
        prompt = f"{i} is the number of this secret: " + "once upon a time " * 20
        assert _cached(server, ring, "alice", prompt) == 0
        for other in ("bob", "carol"):
            # Fields set by the client give no access.
            cross_key_tokens += _cached(server, ring, other, prompt, user="alice", request_id=f"alice-{i}")
        same += _cached(server, ring, "alice", prompt) > 0 and _cached(server, ring, "bob", prompt) > 0
        tried += 1
    promise.at_most("tokens of the cache reused by another key", cross_key_tokens, target=0, n=2 * tried)
    promise.all_of("prompts reused by their own key", same, tried)
