"""A signal at any moment of a start does what it says: SIGHUP is a reload that waits until the service is ready, Ctrl+C
and SIGTERM end the service without a traceback and without a process that stays.

The moments begin when the process handles SIGHUP, which is its first act; before, Python itself starts. The control is
a process without that act: SIGHUP ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.service_process import ServiceProcess, launch
from tests.support import ROOT
from tests.support.promise_figures import Promise
from tests.support.servers import kernels

_LONGEST = 1.6
"""Seconds after which a start is ready, or nearly so."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a signal did."""

    code: int
    seconds: float
    log: str
    left: list[str]
    """Command lines of processes that stay."""


def _start(folder: Path, weights: Path, mark: str) -> ServiceProcess:
    command = [sys.executable, "-m", "app", "serve", "--port", "0", "--weights", weights]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INKSTREAM_")}
    environment = {**kept, **kernels(), "PYTHONPATH": str(ROOT), "START_TEST": mark}
    return launch(command, folder / f"{mark}.log", environment=environment)


def _handles(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _wait_until_handled(service: ServiceProcess) -> None:
    service.wait_for(lambda: _handles(service.process.pid, signal.SIGHUP), poll=0.001)


def _marked(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"START_TEST={mark}\0".encode() in (folder / "environ").read_bytes() + b"\0":
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def _stop(folder: Path, weights: Path, number: signal.Signals, delay: float) -> Outcome:
    mark = f"{number.name}-{time.monotonic_ns()}"
    service = _start(folder, weights, mark)
    try:
        _wait_until_handled(service)
        time.sleep(delay)
        began = time.monotonic()
        service.process.send_signal(number)
        code = service.process.wait(60)
        seconds = time.monotonic() - began
        for _ in range(40):  # an engine that is just starting notices within a moment
            if not (left := _marked(mark)):
                break
            time.sleep(0.05)
        return Outcome(code, seconds, service.log.read_text(), left)
    finally:
        service.kill()


def _reloads_after(folder: Path, weights: Path, delay: float) -> tuple[int, str]:
    """Number of reloads of a service that got SIGHUP during its start."""
    service = _start(folder, weights, f"hangup-{time.monotonic_ns()}")
    try:
        _wait_until_handled(service)
        time.sleep(delay)
        service.process.send_signal(signal.SIGHUP)
        service.wait_for_route("/health/ready")
        count = 0
        for _ in range(200):
            lines = httpx.get(f"{service.url}/metrics").text.splitlines()
            count = sum(int(float(line.split()[-1])) for line in lines if 'total{outcome="switched"}' in line)
            if count:
                break
            time.sleep(0.05)
        assert service.stop() == 0
        return count, service.log.read_text()
    finally:
        service.kill()


def _delays(count: int) -> list[float]:
    return [_LONGEST * step / count for step in range(count)]


def test_hangup_during_a_start_becomes_a_reload(tmp_path: Path, weights: Path, promise: Promise) -> None:
    n = promise.size(4, 32)
    found = [_reloads_after(tmp_path, weights, delay) for delay in _delays(n)]
    good = sum(count == 1 and "Traceback" not in log for count, log in found)
    promise.all_of("SIGHUPs at any moment of a start that were reloads once it was ready", good, n)


def test_stop_signals_during_a_start_leave_nothing(tmp_path: Path, weights: Path, promise: Promise) -> None:
    n = promise.size(5, 40)
    allowed = {signal.SIGINT: (130, 0), signal.SIGTERM: (-signal.SIGTERM, 0)}  # 0: the server handles it already
    found = [(number, _stop(tmp_path, weights, number, delay)) for number in allowed for delay in _delays(n)]
    bad = [
        (number, outcome)
        for number, outcome in found
        if outcome.code not in allowed[number] or outcome.left or "Traceback" in outcome.log
    ]
    assert not bad, bad[:2]
    promise.all_of("stop signals at any moment of a start: exit code, no traceback, no process", len(found), 2 * n)
    slowest = max(outcome.seconds for _, outcome in found)
    promise.at_most("seconds until it ended", slowest, target=2, floor=15, n=2 * n, unit="s")


def test_process_without_the_first_act_is_ended_by_a_hangup(tmp_path: Path) -> None:
    program = "import signal, time; print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout and process.stdout.readline()
        assert not _handles(process.pid, signal.SIGHUP)
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == -signal.SIGHUP
