"""Runs the service as a process on a real socket, and stops it with its test."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.common.operating_system import die_with_parent
from app.engine.cpu.toolchain.builder import find_or_build
from app.engine.cpu.toolchain.cpu_target import BuildError, UnsupportedCpu
from benchmarks.service_process import ServiceProcess, launch
from tests.support import ROOT


@dataclass(frozen=True, slots=True)
class Server:
    """A running service."""

    url: str
    service: ServiceProcess

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The API process."""
        return self.service.process

    @property
    def log(self) -> Path:
        """Its log file."""
        return self.service.log

    def metric(self, name: str, headers: Mapping[str, str] | None = None) -> float:
        """Value of a gauge or counter; `name` includes labels. `headers` are for a service with keys."""
        found = re.search(rf"^inkstream_{re.escape(name)} (\S+)$", self.metrics_text(headers), re.MULTILINE)
        assert found, f"no metric {name}"
        return float(found.group(1))

    def metrics_text(self, headers: Mapping[str, str] | None = None) -> str:
        """The response to GET /metrics."""
        address = self.service.address
        connection = http.client.HTTPConnection(address.host, address.port, timeout=60)
        try:
            connection.request("GET", "/metrics", headers=dict(headers or {}))
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def log_text(self) -> str:
        """The complete lines of the log, without a partly written last line."""
        whole, newline, _ = self.log.read_bytes().rpartition(b"\n")
        return (whole + newline).decode()

    def has_logged(self, *words: str, since: int = 0) -> bool:
        """Waits until all these words appear in the log after `since` characters: a thread writes it with a delay."""
        return self.wait_for(lambda: all(word in self.log_text()[since:] for word in words))

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60.0) -> bool:
        """Polls until `condition` is true or the time has expired. Pauses grow to 0.1 s, to save CPU time."""
        deadline, pause = time.monotonic() + seconds, 0.02
        while time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(pause)
            pause = min(0.1, 1.1 * pause)
        return condition()


_STARTED: list[ServiceProcess] = []
"""Services that start_server() has started and no test has stopped yet."""


_REASONS_AGAINST: list[str] = []
"""Why this pytest run must not call start_server()."""


def forbid_servers(reason: str) -> None:
    """Makes start_server() fail from now on."""
    _REASONS_AGAINST.append(reason)


@contextlib.contextmanager
def own_servers() -> Iterator[None]:
    """Kills services that were started in the block and still run at its end."""
    before = list(_STARTED)
    yield
    for service in [service for service in _STARTED if service not in before]:
        _kill(service)


def start_server(
    folder: Path,
    weights: Path,
    *flags: str,
    wait: bool = True,
    sabotage: str = "pass",
    environment: Mapping[str, str] | None = None,
    fake_ms: float | None = None,
    terminal: int | None = None,
    wrapper: Sequence[str] = (),
) -> Server:
    """Starts `python -m app serve` on a free port, and waits until it is ready.

    Args:
        wait: False returns as soon as the service listens.
        sabotage: Python code that the service runs first.
        fake_ms: use the fake engine, whose steps take this many milliseconds.
        terminal: descriptor of its controlling terminal.
        wrapper: command that runs the command after it.
    """
    assert not _REASONS_AGAINST, _REASONS_AGAINST[0]
    program = f"import sys; from app.__main__ import main; exec({sabotage!r}); sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program]
    if fake_ms is not None:
        assert sabotage == "pass", "the fake service takes armed faults, not sabotage"
        command = [sys.executable, "-m", "tests.support.fake_service", str(fake_ms)]
    log = folder / f"server-{time.monotonic_ns()}.log"
    variables = {k: v for k, v in os.environ.items() if not k.startswith("INKSTREAM_")} | dict(environment or {})
    if "--kernels" not in flags:
        variables |= kernels()
    variables["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [variables.get("PYTHONPATH")])])
    service = launch(
        [*wrapper, *command, "serve", "--weights", str(weights), "--port", "0", *flags],
        log,
        environment=variables,
        prepare=None if terminal is None else functools.partial(hang_on, terminal),
    )
    _STARTED.append(service)
    try:
        service.wait_until_listening()
        if wait:
            _wait_until_ready(service)
        return Server(service.url, service)
    except BaseException:
        _kill(service)
        print(log.read_text())
        raise


@functools.cache
def kernels() -> Mapping[str, str]:
    """Environment of services: native kernels if this machine supports them, built now if necessary.

    Every run thus uses the same backend. An engine without torch starts in a third of the CPU time.
    """
    try:
        library = find_or_build()
    except (UnsupportedCpu, BuildError):
        return {"INKSTREAM_KERNELS": "torch"}
    return {"INKSTREAM_KERNELS": "auto", "INKSTREAM_CACHE_DIR": str(library.parent)}


@contextlib.contextmanager
def running_server(folder: Path, weights: Path, *flags: str, **options: Any) -> Iterator[Server]:
    """Runs a service for the block; it must stop with exit code 0."""
    server = start_server(folder, weights, *flags, **options)
    try:
        yield server
    finally:
        assert stop_server(server) == 0


def _wait_until_ready(service: ServiceProcess) -> None:
    """Polls the log, which is cheap: a request each time would add a tenth to the CPU time of the start."""
    next_request = 0.0

    def is_ready() -> bool:
        nonlocal next_request
        if "ready: " not in service.log.read_text() and time.monotonic() < next_request:
            return False
        next_request = time.monotonic() + 0.5  # for services that do not log it
        return service.status("/health/ready") == 200

    service.wait_for(is_ready, poll=0.02)


def free_ports(n: int) -> list[int]:
    """`n` ports on which nothing listens."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [listener.getsockname()[1] for listener in listeners]


def hang_on(terminal: int) -> None:
    """Runs in a child process: sets its controlling terminal, and makes it end with its parent."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored when the tests run under nohup
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    die_with_parent()


def stop_server(server: Server) -> int:
    """Sends SIGTERM, and returns the exit code."""
    if server.process.poll() is None:
        server.process.terminate()
    try:
        return server.process.wait(timeout=120)
    except subprocess.TimeoutExpired:
        _kill(server.service)
        raise


def _kill(service: ServiceProcess) -> None:
    service.kill()
    _STARTED.remove(service)


def is_clean(server: Server, seconds: float = 60.0) -> bool:
    """Whether, within `seconds`, no request runs or waits and no cache block is in use."""
    names = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
    return server.wait_for(lambda: not any(server.metric(name) for name in names), seconds)
