"""The HTTP server process: uvicorn with its own listening socket, signal handling and exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
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
from app.common.operating_system import has_terminal, is_foreground_job, listener_on, why_no_cuda
from app.common.settings import Settings
from app.common.terminal_log import START
from app.engine.cpu.toolchain.backend_selection import check_native_available
from app.engine_client.engine_pool import EnginePool
from app.engine_client.supervisor import EngineStopped
from app.http.connection_limits import ConnectionLimits, ensure_file_limit
from app.http.download_responder import answer_not_ready
from app.http.http_protocol import HttpProtocol
from app.main import TracingError, create_app
from app.serving.kernel_prebuild import libraries_at_start
from app.serving.service import Service
from app.start_summary import follow_start
from model.checkpoint.hub import hub_model, resolve_weights
from model.checkpoint.manifest import read_model_name
from model.checkpoint.tensor_index import check_layout, read_chat_template

_UNSENT_BYTES = 1 << 14
_CLOSE_SECONDS = 2.0
"""Seconds after the drain for clients to read the final events and for cancelled work to stop."""
_TERMINAL_SECONDS = 1.0
"""Seconds between two looks at the terminal."""
_log, _start_log = logging.getLogger("inkstream"), logging.getLogger(START)


class StartError(ValueError):
    """The service cannot start as configured; the message says what to change."""


class _Server(uvicorn.Server):
    """uvicorn with a graceful drain: the listener stays open until all streams have ended or the timeout expires."""

    failure: EngineStopped | None = None

    def __init__(self, config: uvicorn.Config, address: tuple[str, int]) -> None:
        super().__init__(config)
        self._address = address

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: _serve() owns the signals. uvicorn would raise them again after shutdown."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Returns once the application's lifespan has started."""
        await super().startup(sockets)
        assert isinstance(self.config.app, FastAPI)
        self._service: Service = self.config.app.state.service
        self._connections: ConnectionLimits = self.config.app.state.connections
        self._watch_task = asyncio.create_task(self._watch_engine())
        self._start_task = asyncio.create_task(self._report_start())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Lets open streams finish while new requests get 503, then closes everything and ends the lifespan."""
        self._watch_task.cancel()
        self._start_task.cancel()
        for connection in self._open_connections:
            connection.shutdown()
        await self._drain()
        for server in self.servers:
            server.close()
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
        for _ in range(100):  # slow clients may still be reading the last responses
            if not any(connection.flow.write_paused for connection in self._open_connections):
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


def bind(settings: Settings) -> socket.socket:
    """Opens the listening socket; called before anything slow. Raises StartError."""
    if not _has_keys(settings) and not settings.is_loopback and not settings.insecure_no_auth:
        raise StartError(
            f"--host {settings.host} is reachable from other machines, but no key protects the service: create one "
            "(inkstream keys add NAME --keys-file FILE) and serve with --keys-file FILE, use --host 127.0.0.1, or "
            "--insecure-no-auth behind a proxy that authenticates clients"
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except (socket.gaierror, UnicodeError):  # UnicodeError: the name cannot be encoded for a DNS query
        raise StartError(f"--host {settings.host}: this name has no address") from None
    except OSError as error:
        raise StartError(f"cannot listen on {settings.host}:{settings.port} {_advice(settings, error)}") from None
    # Accepted sockets inherit TCP_NODELAY. asyncio does not set it on sockets created like this, and Nagle's algorithm
    # delayed the second packet of every stream by 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        # Otherwise the kernel buffers megabytes for a client that does not read, and stalls are detected late.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    return listener


def _advice(settings: Settings, error: OSError) -> str:
    """Why an address cannot be listened on, and what to change."""
    reason = os.strerror(error.errno or 0)  # str(error) would repeat the address
    if error.errno == errno.EADDRNOTAVAIL:
        return f"({reason}): --host must be an address of this machine, such as 127.0.0.1"
    other = settings.port + 1 if 1024 <= settings.port < 65535 else 8000
    advice = f"with make serve PORT={other}" if "MAKELEVEL" in os.environ else f"such as --port {other}"
    holder = listener_on(settings.port) if error.errno == errno.EADDRINUSE else ""
    return f"({reason}{f' by {holder}' if holder else ''}): choose another --port, {advice}"


def serve(settings: Settings, engine: Callable[[Settings], EnginePool] | None = None) -> int:
    """Runs until a signal or a permanent engine failure. Exit codes: 0 after a signal, 1 failed, 2 bad configuration.

    Benchmarks pass `engine` to substitute a fake engine.
    """
    logs.set_up(settings.log_level, logs.resolve_format(settings.log_format))
    os.environ["RUST_BACKTRACE"] = (
        "0"  # a panic in the tokenizers library is one log line of app/tokenization/text_encoder.py
    )
    _check_file_limit(settings)
    if not (is_download := _is_hub_model(settings)):
        settings = _with_weights(settings)
    _check_kernels(settings)
    _check_device(settings)
    with bind(settings) as listener:
        if is_download:  # after the port is known to be free, on which probes get answers meanwhile
            with answer_not_ready(listener):
                settings = _with_weights(settings)
        # A thread that tokenizes a long text yields to the event loop after one millisecond, not five: with sixteen
        # concurrent 1 MB texts the p99 of health checks was 25 to 28 ms instead of 47 to 174 (R8).
        sys.setswitchinterval(0.001)
        failure = event_loop.run(_serve(settings, listener, engine))
    if failure is None:
        return 0
    logs.write_line(f"error: {failure}")
    return failure.exit_code


async def _serve(
    settings: Settings, listener: socket.socket, engine: Callable[[Settings], EnginePool] | None
) -> EngineStopped | None:
    try:
        app = create_app(settings, engine)
    except TracingError as error:
        raise StartError(str(error)) from None
    # Objects that exist now are permanent: a full collection that scans them stalls every stream for tens of ms.
    gc.freeze()
    connection = cast(type[asyncio.Protocol], functools.partial(HttpProtocol, app.state.connections))
    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, http=connection, ws="none")
    host, port = listener.getsockname()[:2]
    server = _Server(config, (host, port))
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(signal_number) is signal.SIG_IGN:
            continue  # a script started the service in the background: its Ctrl+C is not meant for it
        event_loop.on_signal(loop, signal_number, functools.partial(_on_signal, server))
    ends_with_terminal = has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # as under nohup
    event_loop.on_signal(loop, signal.SIGHUP, functools.partial(_on_sighup, server, app, ends_with_terminal))
    watching = loop.create_task(_watch_terminal(server)) if ends_with_terminal else None
    _start_log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    await server.serve(sockets=[listener])
    if watching:
        watching.cancel()
    return server.failure


def _has_keys(settings: Settings) -> bool:
    """Raises StartError for an unusable keys file."""
    try:
        return bool(settings.keys_file and read_keys(settings.keys_file))
    except KeyFileError as error:
        raise StartError(str(error)) from None


def _check_file_limit(settings: Settings) -> None:
    """Raises StartError if the limit of open files is too low for an engine and its clients."""
    try:
        ensure_file_limit(settings.max_connections)
    except ValueError as error:
        raise StartError(str(error)) from None


def _is_hub_model(settings: Settings) -> bool:
    """Whether the weights are a model's name and no directory. Raises StartError."""
    try:
        return hub_model(str(settings.weights)) is not None
    except ValueError as error:
        raise StartError(str(error)) from None


def _with_weights(settings: Settings) -> Settings:
    """The settings with the directory of the weights, downloaded if they name a model. Raises StartError."""
    try:
        directory = resolve_weights(settings.weights, _log.info)
    except ValueError as error:
        raise StartError(str(error)) from None
    _check_weights(directory)
    if settings.watch and directory != settings.weights:
        _log.warning("--watch has no effect on a model of the Hub: its commit does not change; restart for a newer one")
    return settings.model_copy(update={"weights": directory})


def _check_weights(directory: Path) -> None:
    """Fails fast on what can be checked without loading; the engine process checks the rest. Raises StartError."""
    try:
        check_layout(directory)
        read_chat_template(directory)
        read_model_name(directory)
    except ValueError as error:
        raise StartError(str(error)) from None


def _check_kernels(settings: Settings) -> None:
    """Raises StartError if native kernels are required but unavailable, or the cache directory is unusable."""
    if settings.cache_dir and settings.cache_dir.exists() and not settings.cache_dir.is_dir():
        raise StartError(f"--cache-dir {settings.cache_dir}: is not a directory")
    try:
        check_native_available(settings.kernels, settings.device, libraries_at_start(settings))
    except ValueError as error:
        raise StartError(str(error)) from None


def _check_device(settings: Settings) -> None:
    """Raises StartError if a GPU is required and there can be none; the engine finds the rest."""
    if settings.device == "cuda" and (problem := why_no_cuda()):
        raise StartError(f"--device cuda: {problem}; or use --device cpu")


async def _watch_terminal(server: _Server) -> None:
    """Stops the service when the terminal closes whose foreground job it is.

    The kernel sends SIGHUP to the leader of the session only. A shell passes it on, but make does not.
    """
    is_foreground = False
    while not is_foreground or has_terminal():
        is_foreground = is_foreground_job()
        await asyncio.sleep(_TERMINAL_SECONDS)
    _stop_once(server)


def _on_sighup(server: _Server, app: FastAPI, ends_with_terminal: bool) -> None:
    """SIGHUP from a closed terminal stops the service; any other SIGHUP reloads the weights."""
    if ends_with_terminal and not has_terminal():
        _stop_once(server)
    elif reloader := getattr(app.state, "reloader", None):
        reloader.request_reload()


def _stop_once(server: _Server) -> None:
    """As the first signal does; a later one of the same event does not count as the second."""
    if not server.should_exit:
        _on_signal(server)


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
