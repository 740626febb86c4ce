"""Health tells the truth: an engine that raises, returns, sleeps, holds the GIL, is stopped or makes empty steps is
found within the watchdog's time and a second, and no load makes /health/ready say that an engine is gone that is not.

/health/live says 200 all along: the process that answers is well, brings the engine back, and is not to be killed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from arming import Faults
from conftest import Server, start_server, stop_server
from promise import Promise
from visitors import Ask, crowd, engine_pid, is_gone, is_live, is_ready, visit

_SILENCE = 1.0
_ASKS = [
    Ask(body={"prompt": "Once", "max_tokens": 120, "ignore_eos": True, "seed": seed, "temperature": 1.0})
    for seed in range(4)
]


def _stop(server: Server, faults: Faults) -> None:
    del faults
    os.kill(engine_pid(server), signal.SIGSTOP)


def _empty_steps(server: Server, faults: Faults) -> None:
    del server
    faults.arm("engine.step", "sleep", seconds=0.005)
    faults.arm("engine.idle", "nothing")


def _deed(do: str, **order: Any) -> Callable[[Server, Faults], None]:
    return lambda _server, faults: faults.arm("engine.step", do, times=1, **order)


_HANGS: dict[str, Callable[[Server, Faults], None]] = {
    "raises": _deed("raise"),
    "returns": _deed("exit"),
    "sleeps": _deed("sleep"),
    "holds the GIL": _deed("hold gil"),
    "is stopped": _stop,
    "makes empty steps": _empty_steps,
}


def _seconds_until(condition: Callable[[], bool], limit: float) -> float:
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > limit:
            return float("inf")
        time.sleep(0.01)
    return time.monotonic() - started


def test_six_ways_to_hang_are_found_and_the_engine_comes_back(tmp_path: Path, weights: Path, promise: Promise) -> None:
    faults = Faults(tmp_path / "faults")
    flags = ("--engine-silence", f"{_SILENCE}")
    server = start_server(tmp_path, weights, *flags, fake_ms=5, environment=faults.environment)
    found: dict[str, float] = {}
    try:
        expected = [answer.told() for answer in visit(server, _ASKS)]
        for name, hang in _HANGS.items():
            with crowd(server, _ASKS) as answers:
                assert server.wait_for(lambda: all(answer.n_events > 3 for answer in answers))
                hung = engine_pid(server)
                hang(server, faults)
                found[name] = _seconds_until(lambda: not is_ready(server), 3 * _SILENCE + 5)
                phase = httpx.get(f"{server.url}/health/ready").json()
                assert phase["status"] == "ready" or phase["phase"], phase
                assert is_live(server)
                faults.disarm("engine.idle")
                faults.disarm("engine.step")
                assert server.wait_for(lambda: is_ready(server), 30), server.log.read_text()
                assert is_gone(hung) and engine_pid(server) != hung
            assert [answer.told() for answer in answers] == expected, f"an engine that {name} is a pause"
        assert server.metric("engine_restarts_total") == len(_HANGS)
    finally:
        assert stop_server(server) == 0
    log = server.log.read_text()
    assert log.count("it was silent for") == 3 and log.count("its steps did nothing for") == 1
    assert "Timeout (" in log and "_hold_gil" in log, "the log says where it hung, also with the GIL held"
    good = sum(seconds <= _SILENCE + 1 for seconds in found.values())
    promise.all_of("R9", "ways to hang that are found within watchdog + 1 s", good, len(_HANGS))
    promise.at_most("R9", "slowest to be found", max(found.values()), target=_SILENCE + 1, n=len(_HANGS), unit="s")


def test_without_the_watchdog_a_hang_is_not_found(tmp_path: Path, weights: Path) -> None:
    """The positive control: the same check fails where nobody watches."""
    server = start_server(tmp_path, weights, "--engine-silence", "600", fake_ms=5)
    try:
        os.kill(engine_pid(server), signal.SIGSTOP)
        assert _seconds_until(lambda: not is_ready(server), _SILENCE + 1) == float("inf")
        os.kill(engine_pid(server), signal.SIGCONT)
    finally:
        assert stop_server(server) == 0


def test_a_guide_that_takes_its_time_is_no_hang(tmp_path: Path, weights: Path) -> None:
    """It is prepared beside the steps, and bounded by its own limits."""
    faults = Faults(tmp_path / "faults")
    server = start_server(tmp_path, weights, "--engine-silence", "1", fake_ms=5, environment=faults.environment)
    try:
        faults.arm("engine.guide", "sleep", seconds=2.5, times=1)
        body = {"prompt": "a", "regex": "[ab]{5}", "max_tokens": 8, "stream": False}
        assert httpx.post(f"{server.url}/complete", json=body, timeout=30).status_code == 200
        assert server.metric("engine_restarts_total") == 0
    finally:
        assert stop_server(server) == 0


def test_no_load_makes_health_flip(tmp_path: Path, weights: Path, promise: Promise) -> None:
    """Ten times as many requests as run at once, prompts long and short, and the shortest silence there is."""
    flags = ("--engine-silence", "1", "--max-running", "16")
    server = start_server(tmp_path, weights, *flags, fake_ms=5)
    seconds = promise.size(6, 600)
    deadline = time.monotonic() + seconds
    try:
        flips, looks = [], 0
        loaders = [threading.Thread(target=_load, args=(server, lane, deadline)) for lane in range(2)]
        for loader in loaders:
            loader.start()
        while time.monotonic() < deadline:
            looks += 1
            if not is_ready(server):
                flips.append(time.monotonic())
            time.sleep(0.05)
        for loader in loaders:
            loader.join()
        assert server.metric("engine_restarts_total") == 0, server.log.read_text()
        promise.at_most("R9", f"false flips in {seconds} s at ten times the load", len(flips), target=0, n=looks)
    finally:
        assert stop_server(server) == 0


def _load(server: Server, lane: int, deadline: float) -> None:
    number = 0
    while time.monotonic() < deadline:
        visit(server, [_ask(lane, number + place) for place in range(80)])
        number += 80


def _ask(lane: int, number: int) -> Ask:
    prompt = "fox " * (600 if number % 10 == 0 else 5)
    extra: Sequence[tuple[str, Any]] = [("seed", number), ("max_tokens", 20 + 10 * lane)]
    return Ask(body={"prompt": prompt, "ignore_eos": True, **dict(extra)})


def test_the_log_names_the_signal_that_ended_an_engine(tmp_path: Path, weights: Path) -> None:
    server = start_server(tmp_path, weights, fake_ms=5)
    try:
        os.kill(engine_pid(server), signal.SIGSEGV)
        assert server.tells("was ended by SIGSEGV")
        assert server.tells("Fatal Python error"), "and where it was then"
        assert server.wait_for(lambda: is_ready(server), 30)
    finally:
        assert stop_server(server) == 0
