"""No request costs the service more than a hundred times its bytes in memory, or a tenth of a second of its CPU.

Exceptions: /tokenize and /detokenize report every token, so a megabyte gives a response twenty times as long. They run
in a thread, one at a time and in chunks; their figures have separate floors.
"""

from __future__ import annotations

import functools
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import memory
from tests.support.promise_figures import Promise
from tests.support.servers import Server

_MEGABYTE = (1 << 20) - 200
_SLACK = 6 << 20
"""Bytes by which a process grows with any request: arenas, connection buffers, a metrics scrape."""


def _body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 1, "stream": False, **fields}).encode()


def _nested(depth: int) -> bytes:
    return b'{"prompt": "a", "json_schema": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"


_COSTLY: dict[str, tuple[str, bytes]] = {
    "nothing special": ("/complete", _body()),
    "a megabyte of one letter": ("/complete", _body(prompt="a" * _MEGABYTE)),
    "a megabyte of spaces": ("/complete", _body(prompt=" " * _MEGABYTE)),
    "a megabyte of words": ("/complete", _body(prompt="once upon a time " * (_MEGABYTE // 17))),
    "half a megabyte of two-byte letters": ("/complete", _body(prompt="\u00e9" * (_MEGABYTE // 6))),
    "a megabyte cut to ten tokens": ("/complete", _body(prompt="a b " * (_MEGABYTE // 4), truncate_prompt_tokens=10)),
    "a megabyte of one letter cut to ten": ("/complete", _body(prompt="a" * _MEGABYTE, truncate_prompt_tokens=10)),
    "a megabyte of ids": ("/complete", _body(prompt=[7] * (_MEGABYTE // 3))),
    "too many prompts": ("/complete", _body(prompt=["a"] * (_MEGABYTE // 5))),
    "too many prompts of ids": ("/v1/completions", _body(prompt=[[1]] * (_MEGABYTE // 5))),
    "a thousand prompts": ("/complete", _body(prompt=["a"] * 1000)),
    "a text of brackets": ("/complete", _body(prompt="[1],[2],{" * (_MEGABYTE // 10))),
    "nothing but brackets": ("/complete", b"[" * _MEGABYTE),
    "deep schema": ("/complete", _nested(150_000)),
    "schema within limits": ("/complete", _nested(100)),
    "many unknown fields": ("/complete", json.dumps({f"f{i}": i for i in range(60_000)}).encode()),
    "the same field again": ("/complete", b"{" + b'"prompt":"a",' * 70_000 + b'"max_tokens":1}'),
    "many stops": ("/complete", _body(stop=["x" * 256] * 16, max_tokens=50)),
    "too many stops": ("/complete", _body(stop=["x"] * (_MEGABYTE // 5))),
    "much bias": ("/complete", _body(logit_bias={str(i): 1.0 for i in range(300)})),
    "too much bias": ("/complete", _body(logit_bias={str(i): 1 for i in range(70_000)})),
    "a long number": ("/complete", b'{"prompt": "a", "seed": ' + b"9" * (_MEGABYTE - 100) + b"}"),
    "escapes": ("/complete", b'{"prompt": "' + b"\\u0061" * (_MEGABYTE // 7) + b'"}'),
    "sixteen with log-probabilities": ("/complete", _body(n=16, max_tokens=20, seed=1, stop=["x" * 9])),
    "a long regex": ("/complete", _body(regex="(a|b)*" * 10_000)),
    "megabyte of chat": ("/v1/chat/completions", _body(messages=[{"role": "user", "content": "a"}] * 20_000)),
}
_LONG_RESPONSES: dict[str, tuple[str, bytes]] = {
    "ids to text": ("/detokenize", json.dumps({"tokens": [7] * (_MEGABYTE // 3)}).encode()),
    "text to ids": ("/tokenize", json.dumps({"prompt": "fox " * (_MEGABYTE // 4)}).encode()),
}
"""Requests with responses about twenty times as long: their CPU time is the time to write them."""


def _cpu(server: Server) -> float:
    """CPU seconds of all threads of the process, user and kernel."""
    nanoseconds = 0
    for thread in Path(f"/proc/{server.process.pid}/task").iterdir():
        with suppress(FileNotFoundError):  # the thread has ended; its work was small
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    assert nanoseconds
    return nanoseconds / 1e9


def _cost(server: Server, client: httpx.Client, path: str, body: bytes) -> tuple[int, float, int]:
    """Status, median CPU seconds of three requests, and peak memory growth in bytes."""
    cpu, peak, status = [], 0, 0
    for _ in range(3):
        Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")  # resets the peak
        before, used = memory(server.process.pid), _cpu(server)
        response = client.post(path, content=body, headers={"Content-Type": "application/json"})
        status = response.status_code
        cpu.append(_cpu(server) - used)
        peak = max(peak, memory(server.process.pid, "VmHWM") - before)
    return status, sorted(cpu)[1], peak


@pytest.mark.timed
def test_cost_of_a_request_is_bounded(fake_server: Server, promise: Promise) -> None:
    server = fake_server
    if not os.access(f"/proc/{server.process.pid}/clear_refs", os.W_OK):
        pytest.skip("cannot reset the peak memory counter on this machine")
    slowest = largest = longest = largest_long = 0.0
    costs: dict[str, str] = {}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        _cost(server, client, "/complete", _body())
        for name, (path, body) in (_COSTLY | _LONG_RESPONSES).items():
            most = 2 if name in _LONG_RESPONSES else 0.1
            cost = functools.partial(_cost, server, client, path, body)
            status, cpu, used = promise.measured(cost, lambda found, most=most: found[1] <= most)
            assert status in (200, 400, 404, 413, 503), (name, status)
            times = max(0.0, (used - _SLACK) / len(body))
            costs[name] = f"{status} {cpu * 1e3:.0f} ms {used / 2**20:.1f} MiB {times:.0f}x"
            if name in _LONG_RESPONSES:
                longest, largest_long = max(longest, cpu), max(largest_long, times)
            else:
                slowest, largest = max(slowest, cpu), max(largest, times)
            time.sleep(0.01)
    print("\n".join(f"{name:40} {cost}" for name, cost in costs.items()))
    promise.at_most("memory of a request, relative to its size", largest, target=100, n=len(_COSTLY))
    promise.at_most("CPU time of a request in the API process", slowest, target=0.1, unit="s", n=len(_COSTLY))
    promise.at_most("CPU time of a megabyte to /tokenize, /detokenize", longest, target=0.1, floor=2, unit="s", n=2)
    promise.at_most(
        "memory of /tokenize, /detokenize, relative to the body's size", largest_long, target=100, floor=300, n=2
    )
