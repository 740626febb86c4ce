"""S25: One request, one response: the framing of requests agrees with an independent HTTP/1.1 parser, or refuses.

The service must not parse a request that h11 does not parse from the same bytes, nor a different one: a proxy in front
may parse as h11 does. It may refuse what h11 accepts. framing._normalized() lists the three remaining leniencies of
llhttp and lifts one limit of h11; none of them moves the end of a request.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any

import httptools
import pytest
import uvloop

from app.http.http_protocol import HttpProtocol
from tests.redteam.messages import METHODS, MessageGenerator, mutated, split
from tests.support.http.framing_harness import Harness, Served, compare
from tests.support.keyed_server import Keyring, send_raw
from tests.support.promise_figures import Promise
from tests.support.servers import Server

SEED = os.environ.get("FRAMING_SEED", "S25")
"""Other seeds test other messages; a failure reports the seed and the message's index."""
LAST = b"GET /next HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class _Tally:
    """Counts of outcomes by kind of message."""

    def __init__(self) -> None:
        self.kinds = list(MessageGenerator(Random(), None).kinds)
        self.accepted: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.leniencies: Counter[str] = Counter()
        self.bodies_that_are_requests = 0

    def add(self, kind: str, served: Served, leniencies: Counter[str]) -> None:
        complete = [request for request in served.requests if request and request.is_complete]
        self.accepted[kind] += bool(complete)
        self.refused[kind] += served.is_closed
        self.leniencies += leniencies
        self.bodies_that_are_requests += any(b"/v1/models HTTP" in request.body for request in complete)


def _message(index: int) -> tuple[str, tuple[bytes, ...]]:
    """Kind and packets of one connection: a message of each kind in turn, others around it, sometimes mutated."""
    rng = Random(f"{SEED} {index}")
    kinds = MessageGenerator(rng, None, methods=(*METHODS, "HEAD")).kinds
    kind = list(kinds)[index % len(kinds)]
    data = kinds[kind]().data
    for _ in range(rng.choice([0, 0, 0, 1, 2])):
        other = kinds[rng.choice(["valid", "valid", "valid", *kinds])]().data
        data = data + other if rng.random() < 0.6 else other + data
    return kind, split(rng, mutated(rng, data) if rng.random() < 0.25 else data)


async def _first_difference(harness: Harness, n: int, tally: _Tally) -> str | None:
    """The first of n messages on which the service and h11 differ."""
    for index in range(n):
        kind, packets = _message(index)
        found, served, reference = await compare(harness, packets)
        tally.add(kind, served, reference.leniencies)
        if found:
            return f"seed {SEED!r}, message {index} ({kind}): {packets}\n{found}"
    return None


def test_framing_agrees_with_h11_or_refuses(promise: Promise) -> None:
    n = promise.size(2_000, 1_000_000)
    tally = _Tally()
    with Harness() as harness:
        found = uvloop.run(_first_difference(harness, n, tally))
    assert found is None, found
    print(f"seed {SEED!r}: {n} messages, accepted {dict(tally.accepted)}, refused {dict(tally.refused)}")
    print(f"leniencies {dict(tally.leniencies)}, bodies that are requests {tally.bodies_that_are_requests}")
    assert all(tally.accepted[kind] and tally.refused[kind] for kind in tally.kinds), (
        "some kind of message is never accepted or never refused"
    )
    assert tally.bodies_that_are_requests > n / 20
    promise.all_of("random messages framed as h11 does, or refused", n, n)


class _Smuggling(HttpProtocol):
    """The fault of issue 19: bytes after the headers of a request with an upgrade offer are parsed as a new request."""

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = data[max(1, offer.args[0]) :]

    def on_message_complete(self) -> None:
        parser, self.parser = self.parser, SimpleNamespace(should_upgrade=lambda: False)  # type: ignore[assignment]
        super().on_message_complete()
        self.parser = parser


def _lenient(**leniencies: bool) -> type[HttpProtocol]:
    class Lenient(HttpProtocol):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.parser.set_dangerous_leniencies(**leniencies)

    return Lenient


@pytest.mark.parametrize(
    "protocol",
    [
        _Smuggling,
        _lenient(lenient_chunked_length=True),
        _lenient(lenient_headers=True),
        _lenient(lenient_optional_crlf_after_chunk=True),
        _lenient(lenient_optional_lf_after_cr=True),
    ],
    ids=["smuggling", "both framings", "fields", "chunk ends", "line ends"],
)
def test_planted_framing_faults_are_detected(protocol: type[HttpProtocol]) -> None:
    with Harness(protocol) as harness:
        found = uvloop.run(_first_difference(harness, 4_000, _Tally()))
    assert found is not None


def _completion(ring: Keyring, key: str, *headers: str, prompt: str = "a") -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": 2, "stream": False})
    lines = ["POST /complete HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, f"Authorization: Bearer {ring.keys[key]}", *headers, "", body]).encode()


def test_request_hidden_in_a_body_is_never_answered(promise: Promise, keyed_server: tuple[Server, Keyring]) -> None:
    server, ring = keyed_server
    hidden = _completion(ring, "bob", "Connection: close")
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden)
    attacks = []
    for method in ("GET", "POST", "PUT", "CONNECT"):
        for protocol in ("h2c", "websocket", "x"):
            for key in (f"Authorization: Bearer {ring.keys['alice']}\r\n", ""):
                head = f"{method} /complete HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{key}"
                head += f"Connection: Upgrade\r\nUpgrade: {protocol}\r\n"
                for framed in (b"Content-Length: %d\r\n\r\n%b" % (len(hidden), hidden), chunked):
                    attacks.append(head.encode() + framed)
    good = []
    for attack in attacks:
        response = send_raw(server.url, attack + LAST)
        statuses = [int(part[:3]) for part in response.split(b"HTTP/1.1 ")[1:]]
        expected = 1 if attack.startswith(b"CONNECT") else 2  # the attack, and the request after it, which has no key
        good += [attack] if len(statuses) == expected and all(400 <= status < 500 for status in statuses) else []
    promise.all_of("upgrade requests with another key's request as body that get one response", len(good), len(attacks))


def test_http2_upgrade_offer_with_a_body_is_answered_as_http1(keyed_server: tuple[Server, Keyring]) -> None:
    server, ring = keyed_server
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
    response = send_raw(server.url, _completion(ring, "alice", *offer) + LAST)
    assert [part[:3] for part in response.split(b"HTTP/1.1 ")[1:]] == [b"200", b"401"]
    assert '"level": "error"' not in server.log_text()
