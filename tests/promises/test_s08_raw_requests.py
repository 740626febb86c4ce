"""S8: Whatever bytes arrive, the service responds with a 4xx or closes the connection, and keeps running: no 5xx, no
traceback.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from tests.redteam.messages import mutated
from tests.support.http.raw_client import connect, get_request, post_request, read_all
from tests.support.keyed_server import wait_for_log_line
from tests.support.promise_figures import Promise
from tests.support.servers import Server, is_clean
from tests.support.services import Services

SEEDS = [
    get_request(),
    get_request("/complete/req-1/events?after=-1", "Last-Event-ID: req-1:0"),
    get_request("/web/main.js", "Accept: */*", "Connection: keep-alive, Upgrade", "Upgrade: h2c", "HTTP2-Settings: AA"),
    post_request({"prompt": "a", "max_tokens": 2, "ignore_eos": True}),
    post_request({"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 3, "stop": ["x"], "stream": False}),
    post_request({"prompt": "a", "max_tokens": 1, "stream": True}, "/v1/completions", "Authorization: Bearer x"),
    post_request({"prompt": "a"}, "/tokenize", "Expect: 100-continue"),
    b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'10\r\n{"prompt":"abcd"\r\n1\r\n}\r\n0\r\nX-Trailer: 1\r\n\r\n',
    b"DELETE /complete/req-1 HTTP/1.0\r\nHost: x\r\n\r\n",
    get_request() + post_request({"prompt": "a", "max_tokens": 1}) + get_request("/metrics"),
]
FRAGMENTS = [
    b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"\t", b"%00", b"%2e%2e/", b"\xff\xfe", b"/", b"?", b"#", b"\r\n\r\n",
    b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: \r\n", b"HTTP/0.9",
    b"HTTP/9.9", b"HTTP/1.0", b"OPTIONS * ", b"CONNECT a:1 ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"99999999999999999999", b"{", b"[" * 300, b'"\\ud800"', b"NaN", b"1e999", b"x" * 9000, b"X: y\r\n" * 120,
]  # fmt: skip


@pytest.fixture(scope="module")
def server(serve_module: Services) -> Server:
    timeouts = ("--head-timeout", "0.15", "--body-timeout", "0.15", "--keep-alive-timeout", "0.15")
    return serve_module(*timeouts, "--max-running", "64", fake_ms=1)


def _message(rng: random.Random) -> bytes:
    """One of the seeds with a few mutations; some are cut off."""
    data = rng.choice(SEEDS)
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = mutated(rng, data, FRAGMENTS)
    return data if rng.random() < 0.85 else data[: rng.randrange(1, len(data) + 1)]


@pytest.mark.parametrize("how", ["at once", "in two pieces"])
def test_mutated_requests_get_4xx_or_a_close(server: Server, promise: Promise, how: str) -> None:
    n = promise.size(400, 10_000)

    def fails(number: int) -> bytes:
        """The message if the service fails with it; complete requests before a malformed one may succeed."""
        rng = random.Random(f"{how} {number}")
        data = _message(rng)
        with connect(server) as connection:
            with suppress(ConnectionError):
                cut = rng.randrange(len(data) + 1) if how == "in two pieces" else len(data)
                connection.sendall(data[:cut])
                connection.sendall(data[cut:])
            response = read_all(connection)
        return data if any(int(part[:3]) >= 500 for part in response.split(b"HTTP/1.1 ")[1:]) else b""

    with ThreadPoolExecutor(24) as pool:
        failures = list(filter(None, pool.map(fails, range(n))))
    assert not failures[:3]
    assert is_clean(server, 30)
    assert httpx.get(f"{server.url}/health/ready").status_code == 200
    wait_for_log_line(server, httpx.get(f"{server.url}/v1/models"))  # earlier lines are written, too
    assert '"level": "error"' not in server.log_text()
    promise.all_of(
        f"mutated raw requests, sent {how}, end in a 4xx, a closed connection or a response", n - len(failures), n
    )
