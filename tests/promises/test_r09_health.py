"""Health tells the truth: an engine that raises, returns, sleeps, holds the GIL, is stopped or makes empty steps is
detected within the watchdog's time and a second, and no load makes /health/ready report a running engine as lost.

/health/live stays 200: the API process is healthy and restarts the engine, so it must not be killed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.load.concurrent_clients import (
    RequestSpec,
    concurrent_requests,
    engine_pid,
    is_live,
    is_ready,
    outputs,
    send_all,
)
from tests.support.processes import has_exited
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

_SILENCE = 1.0
_SPECS = [
    RequestSpec(body={"prompt": "Once", "max_tokens": 120, "ignore_eos": True, "seed": seed, "temperature": 1.0})
    for seed in range(4)
]


def _empty_steps(_server: Server, faults: Faults) -> None:
    faults.arm("engine.step", "sleep", seconds=0.005)
    faults.arm("engine.idle", "nothing")


def _inject(do: str) -> Callable[[Server, Faults], None]:
    return lambda _server, faults: faults.arm("engine.step", do, times=1)


_HANGS: dict[str, Callable[[Server, Faults], None]] = {
    "raises": _inject("raise"),
    "returns": _inject("exit"),
    "sleeps": _inject("sleep"),
    "holds the GIL": _inject("hold gil"),
    "is stopped": lambda server, _faults: os.kill(engine_pid(server), signal.SIGSTOP),
    "makes empty steps": _empty_steps,
}
_SILENT = ("sleeps", "holds the GIL", "is stopped")


def _seconds_until(condition: Callable[[], bool], limit: float) -> float:
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > limit:
            return float("inf")
        time.sleep(0.01)
    return time.monotonic() - started


@dataclass(frozen=True, slots=True)
class _Detection:
    """Result of one hang."""

    seconds: float
    """Seconds until the watchdog found the hang."""
    restarts: float
    log: str


def _hang_and_recover(
    server: Server, faults: Faults, hang: Callable[[Server, Faults], None], expected: list[Any]
) -> _Detection:
    restarts, since = server.metric("engine_restarts_total"), len(server.log_text())

    def is_found() -> bool:
        # A fake engine restarts in half a second, which polling may miss.
        return not is_ready(server) or server.metric("engine_restarts_total") > restarts

    faults.arm("engine.step", "sleep", seconds=0.05)  # completions take 6 s, enough for the steps below
    with concurrent_requests(server, _SPECS) as answers:
        assert server.wait_for(lambda: all(answer.n_events > 3 for answer in answers))
        hung = engine_pid(server)
        hang(server, faults)
        seconds = _seconds_until(is_found, 30)
        phase = httpx.get(f"{server.url}/health/ready", timeout=60).json()
        assert phase["status"] == "ready" or phase["phase"], phase
        assert is_live(server)
        faults.disarm()
        assert server.wait_for(lambda: is_ready(server), 60), server.log.read_text()
        assert has_exited(hung) and engine_pid(server) != hung
    assert outputs(answers) == expected, "outputs must not change through a hang"
    assert server.has_logged("ready: ", since=since)  # all earlier lines are written, too
    return _Detection(seconds, server.metric("engine_restarts_total") - restarts, server.log_text()[since:])


@pytest.fixture(scope="module")
def server(serve_module: Services, faults: Faults) -> Server:
    """A service with the shortest possible --engine-silence."""
    flags = ("--engine-silence", f"{_SILENCE}", "--max-running", "16")
    return serve_module(*flags, fake_ms=5, environment=faults.removing("engine.idle"), logs_tracebacks=True)


def test_six_kinds_of_hang_are_detected_and_the_engine_restarts(
    server: Server, faults: Faults, promise: Promise
) -> None:
    found: dict[str, _Detection] = {}
    expected = outputs(send_all(server, _SPECS))
    for name, hang in _HANGS.items():
        # An engine that gets no CPU for a second counts as silent, too, and is restarted once more.
        found[name] = promise.measured(
            lambda hang=hang: _hang_and_recover(server, faults, hang, expected),  # type: ignore[misc]
            lambda found: found.seconds <= _SILENCE + 1 and found.restarts == 1,
        )
        assert found[name].restarts == 1
        assert ("it was silent for" in found[name].log) == (name in _SILENT), name
        assert ("its steps did nothing for" in found[name].log) == (name == "makes empty steps")
    log = server.log.read_text()
    assert "Timeout (" in log and "_hold_gil" in log, "the log must show where it hung, also with the GIL held"
    seconds = [one.seconds for one in found.values()]
    good = sum(one <= _SILENCE + 1 for one in seconds)
    promise.all_of("kinds of hang detected within watchdog + 1 s", good, len(_HANGS))
    promise.at_most("slowest detection of a hang", max(seconds), target=_SILENCE + 1, n=len(_HANGS), unit="s")


def test_hang_is_not_detected_without_the_watchdog(serve: Services) -> None:
    """Positive control: the same check fails without the watchdog."""
    server = serve("--engine-silence", "600", fake_ms=5)
    os.kill(engine_pid(server), signal.SIGSTOP)
    assert _seconds_until(lambda: not is_ready(server), _SILENCE + 1) == float("inf")
    os.kill(engine_pid(server), signal.SIGCONT)


def test_overload_does_not_make_the_service_unready(server: Server, promise: Promise) -> None:
    """Ten times as many requests as can run, long and short prompts, and the shortest --engine-silence."""
    seconds = promise.size(6, 600)
    # An engine that gets no CPU for a second because of other processes counts as silent: repeat such runs.
    unready, checks, restarts = promise.measured(
        lambda: _count_unready(server, seconds), lambda found: found[0] == found[2] == 0
    )
    assert restarts == 0, server.log.read_text()
    promise.at_most(f"false reports of a lost engine in {seconds} s at ten times the load", unready, target=0, n=checks)


def _count_unready(server: Server, seconds: float) -> tuple[int, int, float]:
    """Number of not-ready checks, number of checks, and number of engine restarts."""
    before, deadline = server.metric("engine_restarts_total"), time.monotonic() + seconds
    unready = checks = 0
    loaders = [threading.Thread(target=_load, args=(server, lane, deadline)) for lane in range(2)]
    for loader in loaders:
        loader.start()
    while time.monotonic() < deadline:
        checks += 1
        unready += not is_ready(server)
        time.sleep(0.05)
    for loader in loaders:
        loader.join()
    return unready, checks, server.metric("engine_restarts_total") - before


def _load(server: Server, lane: int, deadline: float) -> None:
    number = 0
    while time.monotonic() < deadline:
        send_all(server, [_spec(lane, number + index) for index in range(80)])
        number += 80


def _spec(lane: int, number: int) -> RequestSpec:
    prompt, max_tokens = "fox " * (600 if number % 10 == 0 else 5), 20 + 10 * lane
    return RequestSpec(body={"prompt": prompt, "ignore_eos": True, "seed": number, "max_tokens": max_tokens})


def test_slow_grammar_compilation_is_not_a_hang(server: Server, faults: Faults, promise: Promise) -> None:
    """The grammar compiles concurrently with the steps, within its own limits."""
    lengths = iter(range(5, 8))  # a cached grammar would not be compiled

    def restarts() -> float:
        before = server.metric("engine_restarts_total")
        faults.arm("engine.guide", "sleep", seconds=2.5, times=1)
        body = {"prompt": "a", "regex": f"[ab]{{{next(lengths)}}}", "max_tokens": 8, "stream": False}
        assert httpx.post(f"{server.url}/complete", json=body, timeout=60).status_code == 200
        assert not faults.is_armed("engine.guide")
        return server.metric("engine_restarts_total") - before

    # An engine that gets no CPU for a second counts as silent.
    assert promise.measured(restarts, lambda restarts: restarts == 0) == 0
