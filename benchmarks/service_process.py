"""Runs a service in a process of its own. Benchmarks and tests start every service here."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.client import Address, parse_address

ROOT = Path(__file__).parent.parent
_START_SECONDS = 120.0
_POLL_SECONDS = 0.005
"""Short compared with the measured times, and long enough to leave the cores to the service."""


class ServiceStartError(RuntimeError):
    """The service exited or did not become ready in time; the message holds the last line of its log."""


@dataclass(slots=True)
class ServiceProcess:
    """A service whose process was just started and may not listen yet."""

    process: subprocess.Popen[bytes]
    log: Path
    started_at: float
    """By time.monotonic()."""
    url: str = ""
    """Empty until wait_until_listening()."""

    @property
    def address(self) -> Address:
        """Where it listens."""
        return parse_address(self.url)

    def wait_for(
        self, condition: Callable[[], bool], *, poll: float = _POLL_SECONDS, most: float = _START_SECONDS
    ) -> float:
        """Seconds from the start until the condition holds. Raises ServiceStartError."""
        while True:
            has_ended = self.process.poll() is not None  # checked first: all earlier output is then in the log
            if condition():
                return time.monotonic() - self.started_at
            if has_ended or time.monotonic() - self.started_at > most:
                lines = self.log.read_text(errors="replace").strip().splitlines() or ["its log is empty"]
                raise ServiceStartError(f"the service does not start: {lines[-1].strip()}")
            time.sleep(poll)

    def wait_until_listening(self) -> None:
        """Waits until the log names the address. Raises ServiceStartError."""
        self.wait_for(self._read_url)

    def wait_for_route(self, route: str, *, most: float = _START_SECONDS, poll: float = _POLL_SECONDS) -> float:
        """Seconds from the start until the route answers with 200. Raises ServiceStartError."""
        if not self.url:
            self.wait_until_listening()
        return self.wait_for(lambda: self.status(route) == 200, most=most, poll=poll)

    def status(self, route: str) -> int:
        """Status of the route; 0 if nothing answers."""
        connection = http.client.HTTPConnection(self.address.host, self.address.port, timeout=60)
        try:
            connection.request("GET", route)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def stop(self) -> int:
        """Terminates the service, and returns its exit code."""
        self.process.terminate()
        return self.process.wait()

    def kill(self) -> None:
        """Kills the service with its engines, one of which may be stopped."""
        if self.process.poll() is None:
            children = child_pids(self.process.pid)
            self.process.kill()
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        self.process.wait()

    def _read_url(self) -> bool:
        found = re.search(rb'listening on (http://[^\s"]+)[^\n]*\n', self.log.read_bytes())
        self.url = found[1].decode() if found else ""
        return bool(found)


def child_pids(pid: int) -> list[int]:
    """Processes that a process has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread may end meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def launch(
    command: Sequence[str | Path],
    log: Path,
    *,
    url: str = "",
    environment: Mapping[str, str] | None = None,
    prepare: Callable[[], None] | None = None,
    directory: Path = ROOT,
) -> ServiceProcess:
    """Starts a service that logs to a file.

    url: its address; by default read from its log. prepare: runs in the child before the program.
    directory: its working directory.
    """
    with log.open("w") as file:
        started_at = time.monotonic()
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=file, stderr=file, preexec_fn=prepare
        )
    return ServiceProcess(process, log, started_at, url)


@contextmanager
def running(
    command: Sequence[str | Path],
    *,
    url: str = "",
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[ServiceProcess]:
    """Runs a service for the length of a block, without waiting for its start."""
    with tempfile.TemporaryDirectory() as folder:
        service = launch(command, log or Path(folder) / "log", url=url, environment=environment)
        try:
            yield service
        finally:
            service.stop()


def serve_command(*flags: str | Path) -> list[str | Path]:
    """`inkstream serve` on a free port, with these flags."""
    return [sys.executable, "-m", "app", "serve", "--port", "0", *flags]
