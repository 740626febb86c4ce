"""Requests with a host name that an attacker may own are refused, so that no page can rebind its name to the service.

Advisories: Ollama CVE-2024-28224 (a web page accessed the local service through DNS rebinding).
"""

from __future__ import annotations

import pytest

from tests.support.keyed_server import raw_request, send_raw, status_of
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

ACCEPTED = [
    "localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000", "192.168.1.7", "a.localhost",
    "inkstream", "inkstream:8000", "ink_stream", "localhost.", "ink.example", "INK.example:443", "ink.example.",
    "other.example",
]  # fmt: skip
FOREIGN = [
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example",
    "ink.example.evil.example", "evilink.example", "www.ink.example", "127.1", "0x7f.1", "evil.localhost.example",
    "xn--nk-zja.example", "e.v.i.l",
]  # fmt: skip
MALFORMED = [
    "", " ", "a b", "local\thost", "\xe9.example", "a" * 300, "localhost/health", "localhost@evil.example",
    "evil.example@localhost", "[::1", "::1", "[evil.example]", "localhost:port", "localhost:80:80",
    "localhost,evil.example", "evil.example#",
]  # fmt: skip


@pytest.fixture(scope="module")
def named(serve_module: Services) -> Server:
    flags = ("--allowed-hosts", "ink.example, Other.Example")
    return serve_module(*flags, fake_ms=1)


def test_only_trusted_host_names_are_served(named: Server, promise: Promise) -> None:
    cases = [(host, 200) for host in ACCEPTED] + [(host, 421) for host in FOREIGN] + [(host, 400) for host in MALFORMED]
    good = 0
    for host, expected in cases:
        answer = send_raw(named.url, raw_request("GET", "/v1/models", f"Host: {host}"))
        assert status_of(answer) == expected, (host, answer)
        good += 1
    promise.all_of("Host headers accepted or refused correctly", good, len(cases))


LOCAL, EVIL = "Host: localhost", "Host: evil.example"


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (400, raw_request("GET", "/health")),
        *((400, raw_request("GET", "/health", LOCAL, second)) for second in (LOCAL, EVIL)),
        (200, b"GET /health HTTP/1.0\r\n\r\n"),  # HTTP/1.0 needs no Host
        # Forwarded names are ignored: a trusted proxy passes the name on as Host.
        *(
            (421, raw_request("GET", "/health", EVIL, f"X-{name}Host: localhost"))
            for name in ("Forwarded-", "", "Original-")
        ),
        (421, raw_request("GET", "/health", EVIL, "Forwarded: host=localhost")),
        (421, raw_request("GET", "http://localhost/health", EVIL)),
        (200, raw_request("GET", "http://localhost/health", LOCAL)),
        (200, raw_request("GET", "http://127.0.0.1:80/health", LOCAL)),
        (200, raw_request("GET", "http://[::1]:80/health", LOCAL)),
    ],
)
def test_only_one_host_header_counts(named: Server, status: int, request_: bytes) -> None:
    assert f" {status} ".encode() in send_raw(named.url, request_).partition(b"\r\n")[0]


@pytest.mark.parametrize("target", ["evil.example", "evil.example:80", "localhost@evil.example", "EVIL.example."])
def test_host_in_the_url_must_be_trusted_too(named: Server, target: str) -> None:
    for host in (LOCAL, f"Host: {target.rpartition('@')[2]}"):
        assert status_of(send_raw(named.url, raw_request("GET", f"http://{target}/health", host))) == 421
    old = send_raw(named.url, f"GET http://{target}/health HTTP/1.0\r\n\r\n".encode())
    assert b" 421 " in old.partition(b"\r\n")[0]
