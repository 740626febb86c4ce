"""S8: Whatever bytes arrive, the service answers 4xx or closes, and lives on: no 5xx, no traceback."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.http.raw_client import connect, get, post, read_all
from tests.support.promise_figures import Promise
from tests.support.servers import is_clean, stop_server
from tests.support.services import Services

SEEDS = [
    get(),
    get("/complete/req-1/events?after=-1", "Last-Event-ID: req-1:0"),
    get("/web/main.js", "Accept: */*", "Connection: keep-alive, Upgrade", "Upgrade: h2c", "HTTP2-Settings: AA"),
    post({"prompt": "a", "max_tokens": 2, "ignore_eos": True}),
    post({"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 3, "stop": ["x"], "stream": False}),
    post({"prompt": "a", "max_tokens": 1, "stream": True}, "/v1/completions", "Authorization: Bearer x"),
    post({"prompt": "a"}, "/tokenize", "Expect: 100-continue"),
    b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'10\r\n{"prompt":"abcd"\r\n1\r\n}\r\n0\r\nX-Trailer: 1\r\n\r\n',
    b"DELETE /complete/req-1 HTTP/1.0\r\nHost: x\r\n\r\n",
    get() + post({"prompt": "a", "max_tokens": 1}) + get("/metrics"),
]
SPICE = [
    b"\r\n", b"\n", b"\r", b"\0", b":", b" ", b"\t", b"%00", b"%2e%2e/", b"\xff\xfe", b"/", b"?", b"#", b"\r\n\r\n",
    b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: \r\n", b"HTTP/0.9",
    b"HTTP/9.9", b"HTTP/1.0", b"OPTIONS * ", b"CONNECT a:1 ", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"99999999999999999999", b"{", b"[" * 300, b'"\\ud800"', b"NaN", b"1e999", b"x" * 9000, b"X: y\r\n" * 120,
]  # fmt: skip


def _mutated(rng: random.Random) -> bytes:
    """One of the seeds with a few mutations."""
    data = bytearray(rng.choice(SEEDS))
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0:
                data[at:at] = rng.choice(SPICE)
            case 1:
                data[at : at + rng.randrange(1, 20)] = b""
            case 2:
                data[at : at + 1] = rng.randbytes(1)
            case 3:
                data[at:at] = data[rng.randrange(len(data) + 1) :][: rng.randrange(1, 60)]
            case 4:
                data = data[: max(1, at)]
            case _:
                data[at : at + rng.randrange(1, 12)] = rng.choice(SPICE)
    return bytes(data)


@pytest.mark.parametrize("how", ["at once", "in two pieces"])
def test_mutated_requests_get_4xx_or_a_close_and_the_service_lives(serve: Services, promise: Promise, how: str) -> None:
    n = promise.size(400, 10_000)
    flags = ["--head-timeout", "0.15", "--body-timeout", "0.15", "--keep-alive-timeout", "0.15", "--max-running", "64"]
    server = serve(*flags, fake_ms=1)

    def send(number: int) -> tuple[int, bytes]:
        rng = random.Random(f"{how} {number}")
        data = _mutated(rng)
        with connect(server) as connection:
            try:
                cut = rng.randrange(len(data) + 1) if how == "in two pieces" else len(data)
                connection.sendall(data[:cut])
                connection.sendall(data[cut:])
            except ConnectionError:
                pass
            said = read_all(connection)
        statuses = [int(part[:3]) for part in said.split(b"HTTP/1.1 ")[1:]]
        # The service answers a complete request before the malformed one as usual.
        return int(all(status < 500 for status in statuses)), data if any(s >= 500 for s in statuses) else b""

    with ThreadPoolExecutor(24) as pool:
        results = list(pool.map(send, range(n)))
    assert not [data for _, data in results if data][:3]
    assert is_clean(server, 30)
    assert httpx.get(f"{server.url}/health/ready").status_code == 200
    assert stop_server(server) == 0
    log = server.log.read_text()
    assert '"level": "error"' not in log, log[-3000:]
    promise.all_of(f"mutated raw requests, sent {how}, get 4xx, close or service", sum(r[0] for r in results), n)
