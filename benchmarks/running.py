"""Context manager that runs the real service in a process of its own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.http_client import Address, Connection

_ROOT = Path(__file__).parent.parent
_START_SECONDS = 120.0
_PAUSE_SECONDS = 0.005
"""Pause between two polls: short compared with the measured times, long enough to leave the cores to the service."""


class NotStarted(RuntimeError):
    """The service ended, or took too long; the message is what it said last."""


@dataclass(frozen=True, slots=True)
class Running:
    """The service, from the moment its process was started."""

    process: subprocess.Popen[bytes]
    address: Address
    began: float
    """By the clock of time.perf_counter."""
    log: Path

    async def wait(self, connection: Connection, route: str) -> float:
        """Seconds from the start until the route answers with 200. Raises NotStarted."""
        while time.perf_counter() - self.began < _START_SECONDS:
            try:
                await connection.open()
                response = await connection.request("GET", route)
                await response.read_all()
                if response.status == 200:
                    return time.perf_counter() - self.began
            except ConnectionRefusedError:
                pass
            if self.process.poll() is not None:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        raise NotStarted(f"the service does not start: {lines[-1]}")


@contextmanager
def running(flags: Sequence[str]) -> Iterator[Running]:
    """`inkstream serve` with these flags on a free port; it has only just been started, and ends with the block."""
    port = _free_port()
    command = [sys.executable, "-m", "app", "serve", "--port", str(port), *flags]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as file:
            began = time.perf_counter()
            process = subprocess.Popen(command, cwd=_ROOT, stdout=file, stderr=file)
        try:
            yield Running(process, Address(host="127.0.0.1", port=port, tls=False, base=""), began, log)
        finally:
            process.terminate()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
