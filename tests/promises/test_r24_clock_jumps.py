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
    "app/api/openai/responder.py": "tells a client the time",
    "app/chat/template_worker.py": "tells a template the time",
    "app/common/logs.py": "tells the time",
    "app/serving/model_instance.py": "tells the time",
    "app/access/api_keys.py": "keys expire at a date",
    "app/cli/keys.py": "keys expire at a date",
    "app/engine/cpu/toolchain/library_cache.py": "compares with the dates of files",
    "app/engine/cpu/toolchain/builder.py": "compares with the dates of files",
}
"""No time-out depends on what they read."""


def _shift(server: Server) -> float:
    """Seconds that the service's wall clock is ahead of the test's."""
    date = parsedate_to_datetime(httpx.get(f"{server.url}/health/live").headers["date"])
    return date.timestamp() - time.time()


@pytest.mark.skipif(FAKETIME is None, reason="needs libfaketime (Debian: faketime)")
def test_no_time_out_misfires(serve: Services, tmp_path: Path, promise: Promise) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+0")
    environment = {"LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(clock)}
    environment |= {"FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    flags = ["--head-timeout", str(HEAD), "--engine-silence", "10", "--queue-timeout", "60", "--max-running", "16"]
    flags += ["--threads", "1"]
    # No fake engine: libfaketime breaks time.sleep(), on which its steps are built.
    long_weights = tiny_weights(tmp_path / "long", context=2048)
    server = serve(*flags, weights=long_weights, environment=environment)
    right = n = 0
    for before, jump in ((0, DAY), (DAY, -DAY)):
        results = promise.measured(lambda: _across(server, clock, before, jump), all)  # noqa: B023
        assert all(results), (jump, results)
        right, n = right + sum(results), n + len(results)
    promise.all_of("timeouts on time after clock jumps of a day", right, n)


def _across(server: Server, clock: Path, before: int, jump: int) -> list[bool]:
    """What is right of five things that a jump meets half-way; the first is measured with the clock on the wall."""
    clock.write_text(f"{before:+d}")
    request = {"prompt": "a", "max_tokens": 600, "ignore_eos": True}
    with connect(server) as idle, concurrent_requests(server, seeded(request, 8)) as streams:
        idle.sendall(get_request())
        read_response(idle)
        are_under_way = server.wait_for(lambda: server.metric("requests_running") == 8)
        with connect(server) as slow:
            slow.sendall(get_request()[:10])
            clock.write_text(f"{jump:+d}")
            seconds, said = seconds_until_close(slow)
        assert server.wait_for(lambda: abs(_shift(server) - jump) < 60), "the clock was meant to jump"
        idle.sendall(post_request({"prompt": "b", "max_tokens": 2, "stream": False}))
        is_answered = status_of(read_response(idle)) == 200
    return [
        HEAD - 0.2 < seconds < HEAD + 1 and error_of(said)["code"] == "head_timeout",
        is_answered,
        are_under_way and all(stream.is_complete and stream.n_tokens for stream in streams),
        server.metric("engine_restarts_total") == 0,
        httpx.get(f"{server.url}/health/ready").status_code == 200,
    ]


def test_only_what_tells_people_the_time_asks_for_it() -> None:
    clocks = re.compile(r"\b(time\.(time|localtime)|datetime\.(now|utcnow|today))\b")
    asking = {str(path.relative_to(ROOT)) for path in (ROOT / "app").rglob("*.py") if clocks.search(path.read_text())}
    assert asking <= READS_WALL_CLOCK.keys()
    assert "app/serving/model_instance.py" in asking, "the check was meant to find something"
