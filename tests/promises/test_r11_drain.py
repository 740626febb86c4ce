"""R11: On SIGTERM the service refuses new requests, lets every open stream end, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.http.raw_client import connect, get_request, post_request, read_all, read_response, status_of
from tests.support.load.concurrent_clients import concurrent_requests, seeded
from tests.support.processes import family, living
from tests.support.promise_figures import Promise
from tests.support.servers import Server, stop_server
from tests.support.services import Services

STEP_MS = 5


def _request(seconds: float) -> dict[str, Any]:
    return {"prompt": "a", "max_tokens": int(seconds / STEP_MS * 1e3), "ignore_eos": True}


def _are_running(server: Server, n: int) -> bool:
    return server.wait_for(lambda: server.metric("requests_running") + server.metric("requests_waiting") >= n, 60)


@dataclass(frozen=True, slots=True)
class _Shutdown:
    """Outcome of one shutdown."""

    not_ready_after: float
    complete: int
    pids: int
    """Number of processes before the shutdown."""
    left: int


def _drain(serve: Services, faults: Faults, number: signal.Signals, n: int) -> _Shutdown:
    # A quarter of the streams waits when the signal arrives, and steps are slow: streams stay open during all checks.
    faults.arm("engine.step", "sleep", seconds=0.25)
    flags = ("--max-running", str(n * 3 // 4), "--drain-timeout", "60")
    server = serve(*flags, fake_ms=STEP_MS, environment=faults.environment)
    pids = family(server.process.pid)
    with connect(server) as kept_alive, concurrent_requests(server, seeded(_request(1), n)) as streams:
        kept_alive.sendall(get_request())
        assert status_of(read_response(kept_alive)) == 200
        assert _are_running(server, n)
        server.process.send_signal(number)
        began = time.monotonic()
        assert server.has_logged("ending")
        ready = httpx.get(f"{server.url}/health/ready", timeout=60)
        not_ready_after = time.monotonic() - began
        refused = httpx.post(f"{server.url}/complete", json={"prompt": "a"}, timeout=60)
        live = httpx.get(f"{server.url}/health/live", timeout=60)
        assert read_all(kept_alive) == b"", "an idle connection must be closed"
        assert living(pids) == pids, "the checks must run while streams are open"
        faults.disarm("engine.step")
    assert (ready.status_code, refused.status_code, live.status_code) == (503, 503, 200)
    assert int(ready.headers["retry-after"]) >= 1 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "unavailable_error"
    assert refused.headers["connection"] == "close"
    complete = [stream.is_complete and stream.n_tokens > 0 for stream in streams]
    assert server.process.wait(60) == 0
    server.wait_for(lambda: not living(pids))
    return _Shutdown(not_ready_after, sum(complete), len(pids), len(living(pids)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_streams_finish_while_new_requests_are_refused(
    serve: Services, faults: Faults, promise: Promise, number: signal.Signals
) -> None:
    n = promise.size(40, 200)
    shutdowns: list[_Shutdown] = []

    def measure() -> float:
        shutdowns.append(_drain(serve, faults, number, n))
        return shutdowns[-1].not_ready_after

    seconds = promise.measured(measure, lambda seconds: seconds <= 1)
    promise.at_most("time from the signal to not ready", seconds, target=0.2, floor=1.0, unit="s", n=1)
    promise.all_of(f"streams complete after {number.name}", min(each.complete for each in shutdowns), n)
    worst = max(shutdowns, key=lambda each: each.left)
    promise.all_of(f"processes ended after {number.name}", worst.pids - worst.left, worst.pids)


def test_streams_beyond_the_drain_timeout_get_an_error(serve: Services, promise: Promise) -> None:
    n = promise.size(20, 200)
    flags = ("--max-running", "200", "--drain-timeout", "0.5")
    server = serve(*flags, fake_ms=STEP_MS)
    pids = family(server.process.pid)
    with concurrent_requests(server, seeded(_request(20), n)) as streams:
        assert _are_running(server, n)
        server.process.send_signal(signal.SIGTERM)
    reported = [s.body.count(b"event: error") == 1 and b"shutting down" in s.body for s in streams]
    assert server.process.wait(60) == 0
    assert server.wait_for(lambda: not living(pids))
    promise.all_of("streams that get an error at the drain timeout", sum(reported), n)


def _shutdown_seconds(serve: Services) -> float:
    """Seconds until a service with stuck readers and senders exits."""
    server = serve("--drain-timeout", "1", fake_ms=1)
    with connect(server, receive_buffer=4096) as stuck, connect(server) as incomplete, connect(server) as slow:
        incomplete.sendall(get_request()[:20])
        slow.sendall(post_request(_request(1))[:-3])
        stuck.sendall(post_request(_request(40)))
        assert _are_running(server, 1)
        time.sleep(1)
        began = time.monotonic()
        assert stop_server(server) == 0
        seconds = time.monotonic() - began
    assert '"level": "error"' not in server.log.read_text()
    return seconds


def test_stuck_clients_do_not_delay_shutdown(serve: Services, promise: Promise) -> None:
    limit = 1 + 3 * 2 + 2
    assert promise.measured(lambda: _shutdown_seconds(serve), lambda seconds: seconds < limit) < limit


def test_second_signal_exits_immediately_with_code_1(serve: Services, promise: Promise) -> None:
    server = serve("--drain-timeout", "60", fake_ms=STEP_MS)
    pids = family(server.process.pid)
    with concurrent_requests(server, seeded(_request(30), 5)):
        assert _are_running(server, 5)
        server.process.send_signal(signal.SIGTERM)
        assert server.has_logged("ending")
        time.sleep(0.3)
        assert server.process.poll() is None
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 1
        assert server.wait_for(lambda: not living(pids), 5)
        promise.at_most(
            "time from the second signal until no process is left",
            time.monotonic() - began,
            target=1,
            floor=5,
            unit="s",
            n=1,
        )


def test_killed_service_is_detected(serve: Services) -> None:
    """Control: interrupted streams do not count as complete."""
    server = serve(fake_ms=STEP_MS)
    with concurrent_requests(server, seeded(_request(10), 5)) as streams:
        assert _are_running(server, 5)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    assert not any(stream.is_complete for stream in streams)
