"""uvicorn with our socket, our signals and our exit codes. Knows the application only as an ASGI app with a service."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import uvicorn
from fastapi import FastAPI

from app.access.api_keys import KeyFileError, read_keys
from app.common import event_loop, logs
from app.common.errors import NotReady
from app.common.operating_system import has_terminal
from app.common.settings import Settings
from app.engine.cpu.toolchain.backend_selection import check_possible
from app.engine_client.engine_pool import EnginePool
from app.engine_client.supervisor import EngineGone
from app.http.connection_limits import ConnectionLimits, possible_connections
from app.http.http_protocol import HttpProtocol
from app.main import create_app
from app.serving.kernel_prebuild import libraries_at_start
from app.serving.service import Service
from model.checkpoint.layout_check import check_layout, read_chat_template

_UNSENT_BYTES = 1 << 14
_LAST_SECONDS = 2.0
"""For clients to take what ends their streams, and for what was ended to notice."""
_log = logging.getLogger("inkstream")


class StartError(ValueError):
    """The service cannot start as configured; the message says what to change."""


class _Server(uvicorn.Server):
    """uvicorn with our way to end: the listener stays open until every stream has ended or the time is over."""

    gone: EngineGone | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: _serve() owns the signals. uvicorn would raise them again after the end."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The application's lifespan has begun when this returns."""
        await super().startup(sockets)
        assert isinstance(self.config.app, FastAPI)
        self._service: Service = self.config.app.state.service
        self._connections: ConnectionLimits = self.config.app.state.connections
        self._watching = asyncio.create_task(self._watch())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Lets open streams end while new requests get 503; then closes everything and ends the lifespan."""
        self._watching.cancel()
        for connection in self._open:
            connection.shutdown()
        await self._drain()
        for server in self.servers:
            server.close()
        for connection in self._open:
            connection.send_off()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_LAST_SECONDS)
        await self.lifespan.shutdown()

    def begin_drain(self) -> None:
        """From now on nothing new is begun."""
        self.should_exit = True
        self._service.draining = True
        self._connections.is_draining = True

    @property
    def _open(self) -> list[HttpProtocol]:
        return list(cast(set[HttpProtocol], self.server_state.connections))

    @property
    def drain_timeout(self) -> float:
        """Seconds that open streams get."""
        return self._service.settings.drain_timeout

    async def _watch(self) -> None:
        """When the engine is gone for good, so is the service."""
        self.gone = await self._service.wait_gone()
        self.begin_drain()

    async def _drain(self) -> None:
        tasks = set(self.server_state.tasks)  # later ones are refusals
        if tasks:
            _, tasks = await asyncio.wait(tasks, timeout=self.drain_timeout)
        if tasks:
            _log.warning("the drain time-out is over: %d requests are ended", len(tasks))
            self._service.fail_all(NotReady("the service is shutting down: send it again in a moment", 5))
            await asyncio.wait(tasks, timeout=_LAST_SECONDS)
        for _ in range(100):  # what was answered last may still be on its way to a client that reads slowly
            if not any(connection.flow.write_paused for connection in self._open):
                break
            await asyncio.sleep(_LAST_SECONDS / 100)


def bind(settings: Settings) -> socket.socket:
    """The listening socket, before anything slow. Raises StartError."""
    if not _has_keys(settings) and not settings.is_loopback and not settings.insecure_no_auth:
        raise StartError(
            f"--host {settings.host} can be reached from other machines and no key protects the service: make one "
            "(inkstream keys add NAME --keys-file FILE) and serve with --keys-file FILE, use --host 127.0.0.1, or "
            "--insecure-no-auth behind a proxy that asks for keys"
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except (socket.gaierror, UnicodeError):  # the latter: no such name could be asked for
        raise StartError(f"--host {settings.host}: no address is known for this name") from None
    except OSError as error:
        reason = os.strerror(error.errno or 0)  # the error's own words name the address a second time
        raise StartError(
            f"cannot listen on {settings.host}:{settings.port} ({reason}): choose another --port"
        ) from None
    # Accepted sockets inherit it. asyncio does not set it on sockets made like this, and Nagle's algorithm held the
    # second packet of every stream back for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        # Else the kernel takes megabytes for a client that does not read, and who has stalled is noticed late.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    return listener


def serve(settings: Settings, engine: Callable[[Settings], EnginePool] | None = None) -> int:
    """Runs until a signal or until the engine is gone. Exit codes: 0 after a signal, 1 failed, 2 bad configuration.

    `engine` makes other engines (benchmarks bring a stand-in).
    """
    logs.set_up(settings.log_level, logs.chosen(settings.log_format))
    os.environ["RUST_BACKTRACE"] = (
        "0"  # a panic in the tokenizers library is one log line of app/tokenization/text_encoder.py
    )
    _check_files(settings)
    _check_weights(settings.weights)
    _check_kernels(settings)
    with bind(settings) as listener:
        # A thread that reads a long text lets the event loop go on after a millisecond, not after five: beside sixteen
        # texts of a megabyte the slowest in a hundred health checks took 25 to 28 ms instead of 47 to 174 (R8).
        sys.setswitchinterval(0.001)
        gone = event_loop.run(_serve(settings, listener, engine))
    if gone is None:
        return 0
    logs.tell(f"error: {gone}")
    return gone.exit_code


async def _serve(
    settings: Settings, listener: socket.socket, engine: Callable[[Settings], EnginePool] | None
) -> EngineGone | None:
    app = create_app(settings, engine)
    # What is there now stays: a full collection that looks through it stops every stream for tens of milliseconds.
    gc.freeze()
    connection = cast(type[asyncio.Protocol], functools.partial(HttpProtocol, app.state.connections))
    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, http=connection, ws="none")
    server = _Server(config)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        event_loop.on_signal(loop, number, functools.partial(_on_signal, server))
    event_loop.on_signal(loop, signal.SIGHUP, functools.partial(_on_hangup, server, app, has_terminal()))
    host, port = listener.getsockname()[:2]
    _log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    await server.serve(sockets=[listener])
    return server.gone


def _has_keys(settings: Settings) -> bool:
    """Raises StartError for a file of keys that cannot be used."""
    try:
        return bool(settings.keys_file and read_keys(settings.keys_file))
    except KeyFileError as error:
        raise StartError(str(error)) from None


def _check_files(settings: Settings) -> None:
    """Raises StartError where too few files may be open for an engine and its clients."""
    try:
        possible_connections(settings.max_connections)
    except ValueError as error:
        raise StartError(str(error)) from None


def _check_weights(directory: Path) -> None:
    """What can be seen at once is refused at once; the engine process checks the rest. Raises StartError."""
    try:
        check_layout(directory)
        read_chat_template(directory)
    except ValueError as error:
        raise StartError(str(error)) from None


def _check_kernels(settings: Settings) -> None:
    """Raises StartError where native kernels are asked for in vain, or could not be kept."""
    if settings.cache_dir and settings.cache_dir.exists() and not settings.cache_dir.is_dir():
        raise StartError(f"--cache-dir {settings.cache_dir}: is not a directory")
    try:
        check_possible(settings.kernels, settings.device, libraries_at_start(settings))
    except ValueError as error:
        raise StartError(str(error)) from None


def _on_hangup(server: _Server, app: FastAPI, had_terminal: bool) -> None:
    """A terminal that closes ends what runs in it; any other hang-up asks for new weights."""
    if had_terminal and not has_terminal():
        _on_signal(server)
    elif reloader := getattr(app.state, "reloader", None):
        reloader.ask()


def _on_signal(server: _Server) -> None:
    """First: no new requests, open streams go on until the drain time-out. Second: at once."""
    if server.should_exit:
        logs.flush()
        os._exit(1)
    if not server.started:  # so early that nothing has begun
        server.should_exit = True
        return
    server.begin_drain()
    _log.info("ending: open streams get up to %g s; a second signal ends at once", server.drain_timeout)
