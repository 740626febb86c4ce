"""Health tells the truth: an engine that raises, returns, sleeps, holds the GIL, is stopped or makes empty steps is
detected within the watchdog's time and a second, and no load makes /health/ready report a running engine as lost.

/health/live says 200 all along: the process that answers is well, brings the engine back, and is not to be killed.
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


def _deed(do: str) -> Callable[[Server, Faults], None]:
    return lambda _server, faults: faults.arm("engine.step", do, times=1)


_HANGS: dict[str, Callable[[Server, Faults], None]] = {
    "raises": _deed("raise"),
    "returns": _deed("exit"),
    "sleeps": _deed("sleep"),
    "holds the GIL": _deed("hold gil"),
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
class _Found:
    """The result of one hang."""

    seconds: float
    """Seconds until the watchdog found the hang."""
    restarts: float
    log: str


def _hung(server: Server, faults: Faults, hang: Callable[[Server, Faults], None], expected: list[Any]) -> _Found:
    restarts, since = server.metric("engine_restarts_total"), len(server.log_text())

    def is_found() -> bool:
        # A fake engine is back after half a second, which may go by unseen.
        return not is_ready(server) or server.metric("engine_restarts_total") > restarts

    faults.arm("engine.step", "sleep", seconds=0.05)  # the texts take 6 s, and so may what follows
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
    assert outputs(answers) == expected, "a hang is a pause"
    assert server.has_logged("ready: ", since=since)  # and so all that was said before it
    return _Found(seconds, server.metric("engine_restarts_total") - restarts, server.log_text()[since:])


@pytest.fixture(scope="module")
def server(serve_module: Services, faults: Faults) -> Server:
    """A service whose watchdog acts after the shortest silence that can be set."""
    flags = ("--engine-silence", f"{_SILENCE}", "--max-running", "16")
    return serve_module(*flags, fake_ms=5, environment=faults.removing("engine.idle"), logs_tracebacks=True)


def test_six_ways_to_hang_are_found_and_the_engine_comes_back(server: Server, faults: Faults, promise: Promise) -> None:
    found: dict[str, _Found] = {}
    expected = outputs(send_all(server, _SPECS))
    for name, hang in _HANGS.items():
        # An engine that gets no core for a second is silent, too: it comes back once more than it hung.
        found[name] = promise.measured(
            lambda hang=hang: _hung(server, faults, hang, expected),  # type: ignore[misc]
            lambda found: found.seconds <= _SILENCE + 1 and found.restarts == 1,
        )
        assert found[name].restarts == 1
        assert ("it was silent for" in found[name].log) == (name in _SILENT), name
        assert ("its steps did nothing for" in found[name].log) == (name == "makes empty steps")
    log = server.log.read_text()
    assert "Timeout (" in log and "_hold_gil" in log, "the log says where it hung, also with the GIL held"
    seconds = [one.seconds for one in found.values()]
    good = sum(one <= _SILENCE + 1 for one in seconds)
    promise.all_of("kinds of hang detected within watchdog + 1 s", good, len(_HANGS))
    promise.at_most("slowest detection of a hang", max(seconds), target=_SILENCE + 1, n=len(_HANGS), unit="s")


def test_without_the_watchdog_a_hang_is_not_found(serve: Services) -> None:
    """The positive control: the same check fails without the watchdog."""
    server = serve("--engine-silence", "600", fake_ms=5)
    os.kill(engine_pid(server), signal.SIGSTOP)
    assert _seconds_until(lambda: not is_ready(server), _SILENCE + 1) == float("inf")
    os.kill(engine_pid(server), signal.SIGCONT)


def test_no_load_makes_health_flip(server: Server, promise: Promise) -> None:
    """Ten times as many requests as run at once, prompts long and short, and the shortest silence there is."""
    seconds = promise.size(6, 600)
    # An engine that others keep from any core for a second is silent: not by this load.
    flips, looks, restarts = promise.measured(lambda: _flips(server, seconds), lambda found: found[0] == found[2] == 0)
    assert restarts == 0, server.log.read_text()
    promise.at_most(f"false reports of a lost engine in {seconds} s at ten times the load", flips, target=0, n=looks)


def _flips(server: Server, seconds: float) -> tuple[int, int, float]:
    """How often it was not ready, at how many looks, and how many engines ended."""
    before, deadline = server.metric("engine_restarts_total"), time.monotonic() + seconds
    flips = looks = 0
    loaders = [threading.Thread(target=_load, args=(server, lane, deadline)) for lane in range(2)]
    for loader in loaders:
        loader.start()
    while time.monotonic() < deadline:
        looks += 1
        flips += not is_ready(server)
        time.sleep(0.05)
    for loader in loaders:
        loader.join()
    return flips, looks, server.metric("engine_restarts_total") - before


def _load(server: Server, lane: int, deadline: float) -> None:
    number = 0
    while time.monotonic() < deadline:
        send_all(server, [_ask(lane, number + index) for index in range(80)])
        number += 80


def _ask(lane: int, number: int) -> RequestSpec:
    prompt, max_tokens = "fox " * (600 if number % 10 == 0 else 5), 20 + 10 * lane
    return RequestSpec(body={"prompt": prompt, "ignore_eos": True, "seed": number, "max_tokens": max_tokens})


def test_a_guide_that_takes_its_time_is_no_hang(server: Server, faults: Faults, promise: Promise) -> None:
    """The grammar compiles concurrently with the steps, within its own limits."""
    lengths = iter(range(5, 8))  # a grammar that is compiled already would take no time

    def restarts() -> float:
        before = server.metric("engine_restarts_total")
        faults.arm("engine.guide", "sleep", seconds=2.5, times=1)
        body = {"prompt": "a", "regex": f"[ab]{{{next(lengths)}}}", "max_tokens": 8, "stream": False}
        assert httpx.post(f"{server.url}/complete", json=body, timeout=60).status_code == 200
        assert not faults.is_armed("engine.guide")
        return server.metric("engine_restarts_total") - before

    # Who gets no core for a second is silent.
    assert promise.measured(restarts, lambda restarts: restarts == 0) == 0
