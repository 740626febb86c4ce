"""Runs the real service in a process of its own."""

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
_POLL_SECONDS = 0.005
"""Short compared with the measured times, and long enough to leave the cores to the service."""


class ServiceStartError(RuntimeError):
    """The service exited or did not become ready in time; the message holds the last line of its log."""


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """A service whose process was just started and may not listen yet."""

    process: subprocess.Popen[bytes]
    address: Address
    started_at: float
    """By time.perf_counter()."""
    log: Path

    async def wait_for(self, connection: Connection, route: str) -> float:
        """Seconds from the start until the route answers with 200. Raises ServiceStartError."""
        while time.perf_counter() - self.started_at < _START_SECONDS:
            try:
                await connection.open()
                response = await connection.request("GET", route)
                await response.read_all()
                if response.status == 200:
                    return time.perf_counter() - self.started_at
            except ConnectionRefusedError:
                pass
            if self.process.poll() is not None:
                break
            await asyncio.sleep(_POLL_SECONDS)
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["its log is empty"]
        raise ServiceStartError(f"the service does not start: {lines[-1]}")


@contextmanager
def start_service(flags: Sequence[str]) -> Iterator[ServiceProcess]:
    """Starts `inkstream serve` with these flags on a free port, without waiting for it; terminates it on exit."""
    port = _free_port()
    command = [sys.executable, "-m", "app", "serve", "--port", str(port), *flags]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as file:
            started_at = time.perf_counter()
            process = subprocess.Popen(command, cwd=_ROOT, stdout=file, stderr=file)
        try:
            yield ServiceProcess(process, Address(host="127.0.0.1", port=port, tls=False, base=""), started_at, log)
        finally:
            process.terminate()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
