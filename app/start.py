"""Start of the service: checks the configuration, opens the port, starts the engine, then imports and runs the server.

The engine process imports its modules and loads the weights while this process imports FastAPI, which takes as long as
everything before it.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from app import VERSION
from app.access.api_keys import KeyFileError, read_keys
from app.common import event_loop, logs
from app.common.operating_system import ensure_file_limit, listener_on, why_no_cuda
from app.common.settings import Settings
from app.engine.cpu.toolchain.backend_selection import check_native_available
from app.engine_client.engine_pool import EnginePool
from app.engine_client.supervisor import EngineStopped
from app.serving.instance_factory import make_engine_pool, open_instance
from app.serving.kernel_prebuild import libraries_at_start
from model.checkpoint.hub import hub_model, resolve_weights
from model.checkpoint.manifest import read_model_name
from model.checkpoint.tensor_index import check_layout, read_chat_template
from model.files import CheckpointError

if TYPE_CHECKING:
    from app.http.tracing import Tracing  # its packages are optional

_UNSENT_BYTES = 1 << 14
_log = logging.getLogger("inkstream")


class StartError(ValueError):
    """The service cannot start as configured; the message says what to change."""


def serve(settings: Settings, engine: Callable[[Settings], EnginePool] = make_engine_pool) -> int:
    """Runs until a signal or a permanent engine failure. Exit codes: 0 after a signal, 1 failed, 2 bad configuration.

    engine: makes the pool of engines; benchmarks substitute a fake one.
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
    tracing = open_tracing(settings)
    with bind(settings) as listener:
        if is_download:  # after the port is known to be free, on which probes get answers meanwhile
            responder = import_module("app.http.download_responder")  # needs FastAPI, as app.server does
            with responder.answer_not_ready(listener):
                settings = _with_weights(settings)
        # A thread that tokenizes a long text yields to the event loop after one millisecond, not five: with sixteen
        # concurrent 1 MB texts the p99 of health checks was 25 to 28 ms instead of 47 to 174 (R8).
        sys.setswitchinterval(0.001)
        failure = event_loop.run(_serve(settings, listener, engine, tracing))
    if failure is None:
        return 0
    logs.write_line(f"error: {failure}")
    return failure.exit_code


async def _serve(
    settings: Settings,
    listener: socket.socket,
    engine: Callable[[Settings], EnginePool],
    tracing: Tracing | None,
) -> EngineStopped | None:
    try:
        instance = await open_instance(settings, engine)
    except CheckpointError as error:  # of config.json, which --replicas auto reads
        raise StartError(str(error)) from None
    instance.start()
    try:
        gc.disable()  # as in app/__main__.py
        # FastAPI is half of this process's imports. In a thread, so that the engine gets its configuration meanwhile.
        server = await asyncio.to_thread(_import_server)
        gc.freeze()
        gc.enable()
        failure: EngineStopped | None = await server.run(settings, listener, engine, instance, tracing)
    except BaseException:
        await instance.close()
        raise
    return failure


def _import_server() -> Any:
    """app.server, whose models, and those of FastAPI's OpenAPI document, are built later: no health check needs one."""
    BaseModel.model_config["defer_build"] = True
    try:
        return import_module("app.server")
    finally:
        del BaseModel.model_config["defer_build"]


def open_tracing(settings: Settings) -> Tracing | None:
    """The exporter of traces; None without --traces. Raises StartError."""
    if not settings.traces or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        # OpenTelemetry is an optional dependency, and takes a quarter of a second to import.
        tracing: Tracing = import_module("app.http.tracing").Tracing(os.environ, VERSION)
    except ModuleNotFoundError:
        remedy = (
            "install inkstream with the extra traces (in a checkout: .venv/bin/python -m pip install -e '.[traces]')"
        )
        raise StartError(f"--traces needs packages of OpenTelemetry: {remedy}") from None
    except ValueError as error:
        raise StartError(f"--traces: {error}") from None
    return tracing


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
