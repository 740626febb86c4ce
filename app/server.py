"""The HTTP server: uvicorn with its own listening socket, signal handling, and a graceful end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import uvicorn
from fastapi import FastAPI

from app.common import event_loop, logs
from app.common.errors import NotReady
from app.common.logs import START
from app.common.settings import Settings
from app.common.start_signals import HeldHangup, has_terminal
from app.engine_client.supervisor import EngineStopped
from app.http.acceptor import Acceptor
from app.http.connection_limits import ConnectionLimits
from app.http.http_protocol import HttpProtocol
from app.main import create_app
from app.serving.model_instance import ModelInstance
from app.serving.service import Service
from app.start_summary import follow_start

if TYPE_CHECKING:
    from app.http.tracing import Tracing  # its packages are optional

_CLOSE_SECONDS = 2.0
"""Seconds after the drain for clients to read the final events and for cancelled work to stop."""
_log, _start_log = logging.getLogger("inkstream"), logging.getLogger(START)


class _Server(uvicorn.Server):
    """uvicorn with a graceful drain: the listener stays open until all streams have ended or the timeout expires."""

    failure: EngineStopped | None = None
    has_pending_hangup = False
    """Whether SIGHUP arrived before there was anything to reload."""

    def __init__(self, config: uvicorn.Config, address: tuple[str, int]) -> None:
        super().__init__(config)
        self._address = address

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: _serve() owns the signals. uvicorn would raise them again after shutdown."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns once the application's lifespan has started."""
        await super().startup(sockets=[])
        assert isinstance(self.config.app, FastAPI)
        assert sockets
        self._service: Service = self.config.app.state.service
        self._connections: ConnectionLimits = self.config.app.state.connections
        protocol = functools.partial(
            HttpProtocol, self._connections, self.config, self.server_state, self.lifespan.state, None
        )
        self._acceptor = Acceptor(sockets[0], self.config.backlog, protocol, self._connections)
        if self.has_pending_hangup and (reloader := getattr(self.config.app.state, "reloader", None)):
            reloader.request_reload()
        self._watch_task = asyncio.create_task(self._watch_engine())
        self._start_task = asyncio.create_task(self._report_start())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Lets open streams finish while new requests get 503, then closes everything and ends the lifespan."""
        self._watch_task.cancel()
        self._start_task.cancel()
        for connection in self._open_connections:
            connection.shutdown()
        await self._drain()
        self._acceptor.close()
        for connection in self._open_connections:
            connection.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_CLOSE_SECONDS)
        await self.lifespan.shutdown()

    def begin_drain(self) -> None:
        """Stops accepting new requests."""
        self.should_exit = True
        _notify_systemd("STOPPING=1")
        self._service.draining = True
        self._connections.is_draining = True

    @property
    def _open_connections(self) -> list[HttpProtocol]:
        return list(cast(set[HttpProtocol], self.server_state.connections))

    @property
    def drain_timeout(self) -> float:
        """Seconds that open streams have to finish."""
        return self._service.settings.drain_timeout

    async def _watch_engine(self) -> None:
        """Stops the service once the engine has failed permanently."""
        self.failure = await self._service.wait_stopped()
        self.begin_drain()

    async def _report_start(self) -> None:
        await follow_start(self._service, self._address)
        _notify_systemd("READY=1")

    async def _drain(self) -> None:
        tasks = set(self.server_state.tasks)  # later tasks only send error responses
        if tasks:
            _, tasks = await asyncio.wait(tasks, timeout=self.drain_timeout)
        if tasks:
            _log.warning("drain timeout expired: ending %d requests", len(tasks))
            self._service.fail_all(NotReady("the service is shutting down: try again in a moment", 5))
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        quiet = 0
        for _ in range(100):  # slow clients may still be reading the last responses, and requests wait for their turns
            is_writing = any(connection.flow.write_paused for connection in self._open_connections)
            has_work = is_writing or self._connections.best_effort.is_exhausted or self._acceptor.has_work
            quiet = 0 if has_work else quiet + 1
            if quiet == 2:  # what a connection has sent is read an iteration after it is opened
                break
            await asyncio.sleep(_CLOSE_SECONDS / 100)


def _notify_systemd(state: str) -> None:
    """Reports a state to systemd, if it started this process as a unit with Type=notify (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    path = f"\0{address[1:]}" if address[0] == "@" else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.connect(path)
            channel.send(state.encode())
    except OSError as error:
        _log.warning("systemd cannot be told %s: %s", state, os.strerror(error.errno or 0))


async def run(
    settings: Settings, listener: socket.socket, instance: ModelInstance, tracing: Tracing | None
) -> EngineStopped | None:
    """Serves until a signal, or a permanent engine failure, which it returns. `instance` has been started."""
    app = create_app(settings, instance, tracing)
    # Objects that exist now are permanent: a full collection that scans them stalls every stream for tens of ms.
    gc.freeze()
    protocol = cast(type[asyncio.Protocol], HttpProtocol)
    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, http=protocol, ws="none")
    host, port = listener.getsockname()[:2]
    server = _Server(config, (host, port))
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(signal_number) is signal.SIG_IGN:
            continue  # a script started the service in the background: its Ctrl+C is not meant for it
        event_loop.on_signal(loop, signal_number, functools.partial(_on_signal, server))
    held = signal.getsignal(signal.SIGHUP)  # ignored under nohup
    ends_with_terminal = held.ends_with_terminal if isinstance(held, HeldHangup) else False
    event_loop.on_signal(loop, signal.SIGHUP, functools.partial(_on_sighup, server, app, ends_with_terminal))
    server.has_pending_hangup = isinstance(held, HeldHangup) and held.is_pending
    _start_log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    await server.serve(sockets=[listener])
    return server.failure


def _on_sighup(server: _Server, app: FastAPI, ends_with_terminal: bool) -> None:
    """SIGHUP from a closed terminal stops the service; any other SIGHUP reloads the weights."""
    if ends_with_terminal and not has_terminal():
        if not server.should_exit:
            _on_signal(server)
    elif server.started and (reloader := getattr(app.state, "reloader", None)):
        reloader.request_reload()
    else:
        server.has_pending_hangup = True


def _on_signal(server: _Server) -> None:
    """The first signal starts the drain: open streams get until the drain timeout. The second stops at once."""
    if server.should_exit:
        logs.flush()
        os._exit(1)
    if not server.started:  # before startup there is nothing to drain
        server.should_exit = True
        return
    server.begin_drain()
    _log.info("ending: open streams get up to %g s; a second signal stops at once", server.drain_timeout)
