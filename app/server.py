"""The HTTP server: uvicorn with a listening socket, signal handling and a graceful end of our own."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable
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
from app.main import FirstInstance, create_app
from app.serving.service import Service
from app.start_summary import follow_start

if TYPE_CHECKING:
    from app.http.tracing import Tracing  # its packages are optional

_CLOSE_SECONDS = 2.0
"""Seconds after the drain for clients to read the final events and for cancelled work to stop."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_log, _start_log = logging.getLogger("inkstream"), logging.getLogger(START)


class _Server:
    """uvicorn without its listener; the listener stays open until all streams have ended or the drain timeout expires.

    uvicorn runs the lifespan. It would close its own listener first, and then wait.
    """

    failure: EngineStopped | None = None

    def __init__(self, app: FastAPI, listener: socket.socket, *, reloads_at_start: bool) -> None:
        self.is_started = self.is_draining = False
        self._app, self._listener, self._reloads_at_start = app, listener, reloads_at_start
        self._connections: ConnectionLimits = app.state.connections
        protocol = cast(type[asyncio.Protocol], functools.partial(HttpProtocol, self._connections))
        self._config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(_CLOSE_SECONDS),
        )
        self._uvicorn = uvicorn.Server(self._config)
        self._state = self._uvicorn.server_state
        self._is_listening = False
        self._tasks = list[asyncio.Task[None]]()

    async def serve(self, on_start: Callable[[], None]) -> None:
        """Returns after the drain and the end of the application's lifespan; calls `on_start` after its start."""
        async with asyncio.TaskGroup() as group:
            starting = group.create_task(self._start(on_start))
            await self._uvicorn.serve(sockets=[])
            starting.cancel()  # where the application did not start

    async def _start(self, on_start: Callable[[], None]) -> None:
        await self._app.state.is_started.wait()
        self._service: Service = self._app.state.service
        self.listen()
        self.is_started = True
        if self._reloads_at_start:
            self.reload()
        self._tasks = [asyncio.create_task(work) for work in (self._watch_engine(), self._report_start())]
        on_start()

    def listen(self) -> None:
        """Accepts connections, if it does not yet."""
        if not self._is_listening:
            self._is_listening = True
            protocol = functools.partial(HttpProtocol, self._connections, self._config, self._state, {})
            self._acceptor = Acceptor(self._listener, self._config.backlog, protocol, self._connections)

    def reload(self) -> None:
        """Reloads the weights, now or after the start."""
        if self.is_started:
            self._app.state.reloader.request_reload()
        else:
            self._reloads_at_start = True

    def begin_drain(self) -> None:
        """Refuses new requests, lets open streams finish, then ends serve()."""
        if not self.is_started:
            self._uvicorn.should_exit = True
        if not self.is_started or self.is_draining:
            return
        self.is_draining = True
        _notify_systemd("STOPPING=1")
        self._service.draining = True
        self._connections.is_draining = True
        self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        """Lets open streams finish while new requests get 503, then closes everything."""
        for task in self._tasks:
            task.cancel()
        try:
            for connection in self._open_connections:
                connection.shutdown()
            await self._drain()
            self._acceptor.close()
            for connection in self._open_connections:
                connection.abort()
            if self._state.tasks:
                await asyncio.wait(self._state.tasks, timeout=_CLOSE_SECONDS)
        finally:
            self._uvicorn.should_exit = True

    @property
    def _open_connections(self) -> list[HttpProtocol]:
        return list(cast(set[HttpProtocol], self._state.connections))

    @property
    def drain_timeout(self) -> float:
        """Seconds that open streams have to finish."""
        return self._service.settings.drain_timeout

    async def _watch_engine(self) -> None:
        """Stops the service once the engine has failed permanently."""
        self.failure = await self._service.wait_stopped()
        self.begin_drain()

    async def _report_start(self) -> None:
        await follow_start(self._service, _address(self._listener))
        _notify_systemd("READY=1")

    async def _drain(self) -> None:
        tasks = set(self._state.tasks)  # later tasks only send error responses
        if tasks:
            _, tasks = await asyncio.wait(tasks, timeout=self.drain_timeout)
        if tasks:
            _log.warning("drain timeout expired: ending %d requests", len(tasks))
            self._service.fail_all(NotReady("the service is shutting down: try again in a moment", 5))
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        quiet = 0
        for _ in range(100):  # slow clients may still be reading the last responses, and requests wait for their turns
            is_writing = any(connection.flow.is_write_paused for connection in self._open_connections)
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
    settings: Settings, listener: socket.socket, opening: asyncio.Task[FirstInstance], tracing: Tracing | None
) -> EngineStopped | None:
    """Serves until a signal, or a permanent engine failure, which it returns.

    opening: returns the first instance, started. While it downloads a model, all but liveness probes get 503. What it
    raises is raised here.
    """
    app = create_app(settings, opening, tracing)
    # Objects that exist now are permanent: a full collection that scans them stalls every stream for tens of ms.
    gc.freeze()
    held = signal.getsignal(signal.SIGHUP)  # ignored under nohup
    ends_with_terminal = held.ends_with_terminal if isinstance(held, HeldHangup) else False
    server = _Server(app, listener, reloads_at_start=isinstance(held, HeldHangup) and held.is_pending)
    loop = asyncio.get_running_loop()
    event_loop.on_signal(loop, signal.SIGHUP, functools.partial(_on_sighup, server, ends_with_terminal))
    are_ignored = [number for number in _STOP_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]

    def take_signals() -> None:
        """Replaces the handlers that uvicorn has installed since, and puts back at its end."""
        for number in _STOP_SIGNALS:
            if number in are_ignored:  # a script started the service in the background: its Ctrl+C is not meant for it
                signal.signal(number, signal.SIG_IGN)
            else:
                event_loop.on_signal(loop, number, functools.partial(_on_signal, server))

    host, port = _address(listener)
    _start_log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    if not opening.done():
        server.listen()
    await opening
    await server.serve(take_signals)
    return server.failure


def _address(listener: socket.socket) -> tuple[str, int]:
    host, port = listener.getsockname()[:2]
    return host, port


def _on_sighup(server: _Server, ends_with_terminal: bool) -> None:
    """SIGHUP from a closed terminal stops the service; any other SIGHUP reloads the weights."""
    if not (ends_with_terminal and not has_terminal()):
        server.reload()
    elif not server.is_draining:
        server.begin_drain()


def _on_signal(server: _Server) -> None:
    """The first signal starts the drain: open streams get until the drain timeout. The second stops at once."""
    if server.is_draining:
        logs.flush()
        os._exit(1)
    server.begin_drain()
    _log.info("ending: open streams get up to %g s; a second signal stops at once", server.drain_timeout)
