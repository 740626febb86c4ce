"""Containers as docs/deploy.md starts them: runs the commands of the page, and inspects containers.

`docker` on the path is podman, and `docker compose` is podman-compose: tests/container/run puts them there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.support import ROOT
from tests.support.docs_commands import commands

PAGE = ROOT / "docs/deploy.md"
PORTS = {"SERVICE_PORT": "8000", "NGINX_PORT": "8080", "PROMETHEUS_PORT": "9090"}
"""Variables of docker-compose.yml, with their defaults."""
DIRECT, NGINX, PROMETHEUS = (f"http://127.0.0.1:{os.environ.get(name, port)}" for name, port in PORTS.items())


def run(command: str, timeout: float = 900) -> str:
    """Output of a command of the page, run in the project's folder with the chosen port. Raises AssertionError."""
    assert command in commands(PAGE.read_text()), f"docs/deploy.md has no command: {command}"
    return shell(command.replace("127.0.0.1:8000:", f"{DIRECT.removeprefix('http://')}:"), timeout)


def shell(command: str, timeout: float = 900) -> str:
    """Runs any command. Returns its output; raises AssertionError if it fails."""
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


class Container:
    """A running container, known by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def facts(self) -> Any:
        """Output of `inspect`."""
        return json.loads(shell(f"docker inspect {self.name}"))[0]

    def inside(self, *command: str) -> str:
        """Output of a command in the container. Raises AssertionError if it fails."""
        return shell(shlex.join(["docker", "exec", self.name, *command])).strip()

    def engines(self) -> list[int]:
        """Its engine processes by the host's pids: a kill from the host is faster than one from inside."""
        return [pid for pid in self._processes() if b"app.engine" in _read(pid, "cmdline").split(b"\0")]

    def cpu_seconds(self) -> float:
        """CPU seconds of its live processes."""
        fields = [_read(pid, "stat").rpartition(b")")[2].split() for pid in self._processes()]
        return sum(int(field[11]) + int(field[12]) for field in fields if field) / os.sysconf("SC_CLK_TCK")

    def _processes(self) -> set[int]:
        every = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
        parents = {pid: _read(pid, "stat").rpartition(b")")[2].split()[1:2] for pid in every}
        found = {int(self.facts()["State"]["Pid"])}
        while more := {pid for pid, parent in parents.items() if parent and int(parent[0]) in found} - found:
            found |= more
        return found

    def is_healthy(self) -> bool:
        """Runs the image's HEALTHCHECK, because no systemd does it here."""
        return subprocess.run(["podman", "healthcheck", "run", self.name], capture_output=True).returncode == 0


def _read(pid: int, file: str) -> bytes:
    """The content of a file in /proc; empty if the process has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/{file}").read_bytes()
    return b""


def running_with(*arguments: str) -> list[int]:
    """The host's pids of processes whose command has these arguments in this order."""
    wanted = b"\0".join(map(str.encode, arguments)) + b"\0"
    every = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in every if b"\0" + wanted in _read(pid, "cmdline")]


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> float:
    """Waits for a condition; returns the seconds it took. Raises AssertionError at the time-out."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"still false after {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - began


def status(url: str, **more: Any) -> int:
    """Status code of a GET; 0 if the server does not respond."""
    try:
        return httpx.get(url, timeout=5, **more).status_code
    except httpx.TransportError:
        return 0


def is_ready(url: str = DIRECT) -> bool:
    """Whether the service accepts requests."""
    return status(f"{url}/health/ready") == 200


def metric(name: str) -> float:
    """The sum over all labels."""
    lines = httpx.get(f"{DIRECT}/metrics", timeout=10).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"inkstream_{name}[ {{]", line))
