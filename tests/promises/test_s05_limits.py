"""S5: Headers, URL, body, prompt and every list have a limit: a request at the limit is served, one above it refused.

Tests each limit, one above it, and a thousand times the limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from select import select
from typing import Any

import pytest

from tests.support.http.raw_client import (
    connect,
    error_of,
    get_request,
    post_request,
    read_all,
    read_response,
    status_of,
)
from tests.support.promise_figures import Promise
from tests.support.servers import Server

HEADERS, URL, BODY, COUNT = 16384, 8192, 1 << 20, 100


def _send(server: Server, data: bytes) -> bytes:
    with connect(server) as connection:
        try:
            connection.sendall(data)
            return read_response(connection)
        except (BrokenPipeError, ConnectionResetError):
            # The service closed the connection while the client was still sending.
            return read_all(connection)  # a response sent before that is still readable


def _headers(size: int) -> bytes:
    """A GET whose headers have `size` bytes as the service counts them: name, value, and four more each."""
    lines = ["Connection: close"]
    left = size - len("Host: x\r\n") - len("Connection: close\r\n") - len("X-A: \r\n")
    return get_request("/health/live", *lines, f"X-A: {'x' * left}")


def _url(size: int) -> bytes:
    return get_request("/health/live?" + "x" * (size - len("/health/live?")), "Connection: close")


def _count(size: int) -> bytes:
    return get_request("/health/live", "Connection: close", *[f"X-{i}: 1" for i in range(size - 2)])


def _body(size: int) -> bytes:
    empty = json.dumps({"prompt": "a", "max_tokens": 1, "stream": False, "truncate_prompt_tokens": 5})
    body = {**json.loads(empty), "prompt": "a" * (size - len(empty) + 1)}
    return post_request(body, "/complete", "Connection: close")


@pytest.mark.parametrize(
    ("make", "limit", "refused"),
    [(_headers, HEADERS, 431), (_url, URL, 414), (_count, COUNT, 431), (_body, BODY, 413)],
)
def test_bytes_at_the_limit_are_served_and_above_it_refused(
    fake_server: Server, promise: Promise, make: Callable[[int], bytes], limit: int, refused: int
) -> None:
    at_limit = status_of(_send(fake_server, make(limit)))
    above = _send(fake_server, make(limit + 1))
    far_above = [_send(fake_server, make(times * limit)) for times in (10, 1000 if limit < BODY else 50)]
    assert at_limit == 200
    assert status_of(above) == refused and error_of(above)["type"] == "invalid_request_error"
    assert status_of(far_above[0]) == refused
    assert status_of(far_above[1]) in (refused, 0), "the service may also close the connection"
    good = (at_limit == 200) + (status_of(above) == refused) + all(status_of(a) in (refused, 0) for a in far_above)
    promise.all_of(f"limit of {make.__name__[1:]} at, above, far above", good, 3)


LISTS: list[tuple[str, Any, Any]] = [
    ("stop", ["a"] * 64, ["a"] * 65),
    ("stop", ["a" * 256], ["a" * 257]),
    ("stop_token_ids", [70] * 64, [70] * 65),
    ("logit_bias", {str(i): 1 for i in range(300)}, {str(i): 1 for i in range(301)}),
    ("n", 64, 65),
    ("logprobs", 20, 21),
    ("request_id", "u" * 64, "u" * 65),
]


def _status(server: Server, **fields: Any) -> int:
    body = {"prompt": "a", "max_tokens": 1, "stream": False, **fields}
    answer = _send(server, post_request(body, "/complete", "Connection: close"))
    if status_of(answer) >= 400:
        assert error_of(answer)["param"]
    return status_of(answer)


@pytest.mark.parametrize(("name", "most", "more"), LISTS, ids=[f"{row[0]}-{i}" for i, row in enumerate(LISTS)])
def test_lists_and_numbers_at_the_limit_are_served_and_above_it_refused(
    fake_server: Server, promise: Promise, name: str, most: Any, more: Any
) -> None:
    far = most * 1000 if isinstance(most, int | str | list) else {str(i): 1 for i in range(300_000 // 10)}
    statuses = [_status(fake_server, **{name: value}) for value in (most, more, far)]
    assert statuses[0] == 200 and set(statuses[1:]) == {400}, statuses
    promise.all_of(f"limit of {name} at, above, far above", 3, 3)


def test_endless_headers_trailers_and_chunk_extensions_are_refused(fake_server: Server) -> None:
    chunked = (
        b"POST /complete HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    for endless in (
        b"GET / HTTP/1.1\r\nX: ",
        b"GET /",
        b"GET / HTTP/1.1\r\n",
        b"\r\n",
        chunked + b"2\r\n{}\r\n0\r\nX: ",
        chunked + b"2;",
    ):
        with connect(fake_server) as connection:
            try:
                connection.sendall(endless)
                # Bytes that arrive together with a body may count as body; later ones are refused.
                time.sleep(0.05)
                for number in range(1500):
                    if number > 100 and select([connection], [], [], 0.02)[0]:
                        break
                    connection.sendall(b"\r\n" * 500 if endless == b"\r\n" else b"x" * 1000)
            except (BrokenPipeError, ConnectionResetError):
                continue
            response = read_all(connection)
            assert 400 <= status_of(response) < 500, (endless, response)
