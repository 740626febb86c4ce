"""uvicorn with our socket, our signals and our exit codes. Knows the application only as an ASGI app with a service."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from app import event_loop
from app.engine.client import EngineClient, EngineGone
from app.engine.errors import NotReady
from app.engine.native.choice import check_possible
from app.kernels import libraries_at_start
from app.main import create_app
from app.service import Service
from app.settings import Settings
from model.chat_template import read_chat_template
from model.presence import check_layout

_log = logging.getLogger("inkstream")


class StartError(ValueError):
    """The service cannot start as configured; the message says what to change."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handling (it raises the signal again after the end), and watching the service."""

    gone: EngineGone | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: serve() owns the signals."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """The application's lifespan has begun when this returns."""
        await super().startup(sockets)
        assert isinstance(self.config.app, FastAPI)
        service: Service = self.config.app.state.service
        self._watching = asyncio.create_task(self._watch(service))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the listener, waits for open streams, ends the lifespan."""
        self._watching.cancel()
        await super().shutdown(sockets)

    async def _watch(self, service: Service) -> None:
        """When the engine is gone for good, so is the service."""
        self.gone = await service.wait_gone()
        self.should_exit = True


def bind(settings: Settings) -> socket.socket:
    """The listening socket, before anything slow. Raises StartError."""
    if not settings.is_loopback and not settings.insecure_no_auth:
        raise StartError(
            f"--host {settings.host} can be reached from other machines and no key protects the service: "
            "use --host 127.0.0.1, or --insecure-no-auth behind a proxy that asks for keys"
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
    return listener


def serve(settings: Settings, engine: Callable[[Settings], EngineClient] | None = None) -> int:
    """Runs until a signal or until the engine is gone. Exit codes: 0 after a signal, 1 failed, 2 bad configuration.

    `engine` makes another client of the engine (benchmarks bring a stand-in).
    """
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    _check_weights(settings.weights)
    _check_kernels(settings)
    with bind(settings) as listener:
        gone = event_loop.run(_serve(settings, listener, engine))
    if gone is None:
        return 0
    print(f"error: {gone}", file=sys.stderr, flush=True)
    return gone.exit_code


async def _serve(
    settings: Settings, listener: socket.socket, engine: Callable[[Settings], EngineClient] | None
) -> EngineGone | None:
    app = create_app(settings, engine)
    # What is there now stays: a full collection that looks through it stops every stream for tens of milliseconds.
    gc.freeze()
    # After the drain time-out every stream is told why it ends; those that do not even read that are cut then.
    drain = math.ceil(settings.drain_timeout) + 2
    server = _Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=drain, ws="none"))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, server, app)
    host, port = listener.getsockname()[:2]
    _log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    await server.serve(sockets=[listener])
    return server.gone


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


def _on_signal(server: uvicorn.Server, app: FastAPI) -> None:
    """First: no new requests, open streams go on until the drain time-out. Second: at once."""
    if server.should_exit:
        os._exit(1)
    service: Service | None = getattr(app.state, "service", None)
    server.should_exit = True
    if service is None:  # so early that nothing has begun
        return
    seconds = service.settings.drain_timeout
    _log.info("ending: open streams get up to %g s; a second signal ends at once", seconds)
    service.draining = True
    error = NotReady("the service is shutting down: send it again in a moment", 5)
    asyncio.get_running_loop().call_later(seconds, service.engine.fail_all, error)
