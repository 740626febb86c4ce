"""The fixtures `serve` and `serve_module`: services that end with their test or module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.keyed_server import Keyring
from tests.support.servers import Server, start_server, stop_server


class Services:
    """Starts services. Those that no test killed must end with exit code 0 and without a logged traceback."""

    def __init__(self, folder: Path, weights: Path) -> None:
        self._folder, self._weights = folder, weights
        self._started: list[Server] = []
        self._to_stop: list[tuple[Server, bool]] = []

    def __call__(
        self,
        *flags: str,
        weights: Path | None = None,
        ring: Keyring | None = None,
        is_killed: bool = False,
        logs_tracebacks: bool = False,
        **options: Any,
    ) -> Server:
        """Calls start_server(), with the keys of `ring`. `is_killed`: kill the service at the end; it may be busy."""
        keys = ("--keys-file", str(ring.file)) if ring else ()
        server = start_server(self._folder, weights or self._weights, *keys, *flags, **options)
        self._started.append(server)
        if not is_killed:
            self._to_stop.append((server, logs_tracebacks))
        return server

    def stop(self) -> None:
        """Stops the services that still run."""
        for server, logs_tracebacks in self._to_stop:
            if server.process.poll() in (None, 0):
                assert stop_server(server) == 0, server.log.read_text()
                assert logs_tracebacks or "Traceback" not in server.log.read_text()

    def kill(self) -> None:
        """Kills the services that still run."""
        for server in self._started:
            server.process.kill()
            server.process.wait()


def services(folder: Path, weights: Path) -> Iterator[Services]:
    """The body of both fixtures."""
    serve = Services(folder, weights)
    try:
        yield serve
        serve.stop()
    finally:
        serve.kill()
