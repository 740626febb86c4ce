"""R24: A wall clock that jumps by a day, forward or back, makes no timeout fire too early or too late."""

from __future__ import annotations

import re
import time
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import pytest

from tests.support import ROOT
from tests.support.http.raw_client import (
    connect,
    error_of,
    get_request,
    post_request,
    read_response,
    seconds_until_close,
    status_of,
)
from tests.support.load.concurrent_clients import concurrent_requests, seeded
from tests.support.model.tiny_models import tiny_weights
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

FAKETIME = next((p for p in Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)
DAY = 86400
HEAD = 1.0
READS_WALL_CLOCK = {
    "app/api/openai/responder.py": "timestamps in responses",
    "app/chat/template_worker.py": "the date in chat templates",
    "app/common/logs.py": "timestamps",
    "app/http/response_cycle.py": "the Date field of responses",
    "app/serving/model_instance.py": "timestamps",
    "app/access/api_keys.py": "expiry dates of keys",
    "app/cli/keys.py": "expiry dates of keys",
    "app/engine/cpu/toolchain/library_cache.py": "file modification times",
    "app/engine/cpu/toolchain/builder.py": "file modification times",
}
"""File -> why it reads the wall clock. None of these values affects a timeout."""


def _shift(server: Server) -> float:
    """Seconds that the service's wall clock is ahead of the test's."""
    date = parsedate_to_datetime(httpx.get(f"{server.url}/health/live").headers["date"])
    return date.timestamp() - time.time()


@pytest.mark.skipif(FAKETIME is None, reason="needs libfaketime (Debian: faketime)")
def test_clock_jumps_do_not_affect_timeouts(serve: Services, tmp_path: Path, promise: Promise) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+0")
    environment = {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(clock)}
    environment |= {"FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    flags = ["--head-timeout", str(HEAD), "--engine-silence", "10", "--queue-timeout", "60", "--max-running", "16"]
    flags += ["--threads", "1"]
    # No fake engine: libfaketime breaks time.sleep(), which its steps use.
    long_weights = tiny_weights(tmp_path / "long", context=2048)
    server = serve(*flags, weights=long_weights, environment=environment)
    right = n = 0
    for before, jump in ((0, DAY), (DAY, -DAY)):
        results = promise.measured(lambda: _check_jump(server, clock, before, jump), all)  # noqa: B023
        assert all(results), (jump, results)
        right, n = right + sum(results), n + len(results)
    promise.all_of("timeouts on time after clock jumps of a day", right, n)


def _check_jump(server: Server, clock: Path, before: int, jump: int) -> list[bool]:
    """Results of five checks across a clock jump; the test measures the first with its own clock."""
    clock.write_text(f"{before:+d}")
    request = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True}
    with connect(server) as idle, concurrent_requests(server, seeded(request, 8)) as streams:
        idle.sendall(get_request())
        read_response(idle)
        assert server.wait_for(lambda: all(stream.n_tokens for stream in streams)), "no stream began"
        with connect(server) as slow:
            slow.sendall(get_request()[:10])
            are_under_way = not any(stream.is_complete for stream in streams)
            clock.write_text(f"{jump:+d}")
            seconds, response = seconds_until_close(slow)
        assert server.wait_for(lambda: abs(_shift(server) - jump) < 60), "the clock did not jump"
        idle.sendall(post_request({"prompt": "b", "max_tokens": 2, "stream": False}))
        is_answered = status_of(read_response(idle)) == 200
    return [
        HEAD - 0.2 < seconds < HEAD + 1 and error_of(response)["code"] == "head_timeout",
        is_answered,
        are_under_way and all(stream.is_complete and stream.n_tokens for stream in streams),
        server.metric("engine_restarts_total") == 0,
        httpx.get(f"{server.url}/health/ready").status_code == 200,
    ]


def test_only_listed_files_read_the_wall_clock() -> None:
    clocks = re.compile(r"\b(time\.(time|localtime)|datetime\.(now|utcnow|today))\b")
    readers = {str(path.relative_to(ROOT)) for path in (ROOT / "app").rglob("*.py") if clocks.search(path.read_text())}
    assert readers <= READS_WALL_CLOCK.keys()
    assert "app/serving/model_instance.py" in readers, "the check must find known readers"
