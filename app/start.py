"""Start of the service: checks the configuration, opens the port, starts the engine, then imports and runs the server.

The engine process imports its modules and loads the weights while this process imports FastAPI, which takes as long as
everything before it.
"""

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
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from app.access.api_keys import read_keys
from app.common import event_loop, logs
from app.common.operating_system import ensure_file_limit, listener_on, why_no_cuda
from app.common.settings import Settings
from app.common.version import VERSION
from app.engine.cpu.toolchain.backend_selection import check_native_available
from app.engine_client.supervisor import EngineStopped
from app.serving.instance_factory import open_instance
from app.serving.kernel_prebuild import libraries_at_start
from app.serving.model_instance import ModelInstance
from model.cache_formats import check_kv_cache
from model.checkpoint.chat_template_file import read_chat_template
from model.checkpoint.gguf_directory import opened_weights
from model.checkpoint.hub import hub_model, resolve_weights
from model.checkpoint.manifest import read_model_name
from model.checkpoint.tensor_index import check_layout
from model.files import CheckpointError, linked_caches

if TYPE_CHECKING:
    from app.http.tracing import Tracing  # its packages are optional

_UNSENT_BYTES = 1 << 14
_log = logging.getLogger("inkstream")


class StartError(ValueError):
    """The service cannot start as configured; the message says what to change."""


def serve(settings: Settings) -> int:
    """Runs until a signal or a permanent engine failure. Exit codes: 0 signal, 1 failure, 2 bad configuration."""
    logs.set_up(settings.log_level, logs.resolve_format(settings.log_format))
    # A panic in the tokenizers library is one log line of app/tokenization/text_encoder.py.
    os.environ["RUST_BACKTRACE"] = "0"
    with _start_errors():
        for check in CHECKS.values():
            check(settings)
    tracing = open_tracing(settings)
    with bind(settings) as listener:
        # A thread that tokenizes a long text yields to the event loop after one millisecond, not five: with sixteen
        # concurrent 1 MB texts the p99 of health checks was 25 to 28 ms instead of 47 to 174 (R8).
        sys.setswitchinterval(0.001)
        outcome = event_loop.run(_serve(settings, listener, tracing))
    if isinstance(outcome, EngineStopped):
        logs.write_line(f"error: {outcome}")
        return outcome.exit_code
    return 130 if outcome is signal.SIGINT else 0


@contextlib.contextmanager
def _start_errors() -> Iterator[None]:
    """Turns a ValueError into a StartError; each part of the configuration raises its own subclass."""
    try:
        yield
    except ValueError as error:
        raise StartError(str(error)) from None


def _download(settings: Settings) -> Settings:
    """The settings with the directory of the Hub's model that they name. Raises ValueError."""
    directory = resolve_weights(settings.weights, _log.info)
    _check_directory(directory)
    if settings.watch:
        _log.warning("--watch has no effect on a model of the Hub: its commit does not change; restart for a newer one")
    return settings.model_copy(update={"weights": directory})


def _check_weights(settings: Settings) -> None:
    if hub_model(str(settings.weights)) is None:
        _check_directory(resolve_weights(settings.weights, _log.info))


def _check_directory(directory: Path) -> None:
    """Fails fast on what can be checked without loading; the engine process checks the rest. Raises ValueError."""
    with opened_weights(directory, with_tokenizer=False) as opened:
        check_layout(opened, with_tokenizer=opened == directory)
        read_chat_template(opened)
        read_model_name(opened)
    for cache, count in linked_caches(directory).items():
        _log.info("%s: %d files are links into the cache %s", directory, count, cache)


def _check_kernels(settings: Settings) -> None:
    if settings.cache_dir and settings.cache_dir.exists() and not settings.cache_dir.is_dir():
        raise ValueError(f"--cache-dir {settings.cache_dir}: is not a directory")
    check_native_available(settings.kernels, settings.device, libraries_at_start(settings))


def _check_device(settings: Settings) -> None:
    """Fails if a GPU is required and there can be none, or the cache's format has none; the engine finds the rest."""
    check_kv_cache(settings.kv_cache, settings.device)
    if settings.device == "cuda" and (problem := why_no_cuda()):
        raise ValueError(f"--device cuda: {problem}; or use --device cpu")


CHECKS: Mapping[str, Callable[[Settings], object]] = {
    "files": lambda settings: ensure_file_limit(settings.max_connections),
    "weights": _check_weights,
    "kernels": _check_kernels,
    "device": _check_device,
}
"""Topic -> what must hold before the port is opened; raises ValueError with the reason."""


async def _serve(
    settings: Settings, listener: socket.socket, tracing: Tracing | None
) -> EngineStopped | signal.Signals | None:
    """Returns a permanent failure, or the signal that ended the start."""
    stopped_by: list[signal.Signals] = []
    serving = asyncio.current_task()
    assert serving
    opening = asyncio.create_task(_open(settings, lambda: _cancel_on_signals(serving, stopped_by)))
    try:
        if hub_model(str(settings.weights)) is None:
            await opening
        gc.disable()  # as in app/__main__.py
        # FastAPI is half of this process's imports. In a thread, so that the engine gets its configuration meanwhile.
        server = await asyncio.to_thread(_import_server)
        gc.freeze()
        gc.enable()
        failure: EngineStopped | None = await server.run(settings, listener, opening, tracing)
    except BaseException as error:
        if opening.done() and not opening.cancelled() and not opening.exception():
            await opening.result()[1].close()
        if stopped_by and isinstance(error, asyncio.CancelledError):
            return stopped_by[0]
        raise
    return failure


async def _open(settings: Settings, before_start: Callable[[], None]) -> tuple[Settings, ModelInstance]:
    """The first model instance, whose engine has been started, and settings with its directory. Raises StartError.

    A model of the Hub is downloaded, which a signal ends at once: there is nothing else to clean up.
    """
    if hub_model(str(settings.weights)):
        with _start_errors():
            settings = await asyncio.to_thread(_download, settings)
    try:
        instance = await open_instance(settings)
    except CheckpointError as error:  # of config.json, which --replicas auto reads
        raise StartError(str(error)) from None
    before_start()
    instance.start()
    return settings, instance


def _cancel_on_signals(task: asyncio.Task[Any], stopped_by: list[signal.Signals]) -> None:
    """Makes Ctrl+C and SIGTERM cancel the task, which then stops the engine; until the server handles both."""
    loop = asyncio.get_running_loop()

    def cancel(number: signal.Signals) -> None:
        if stopped_by:  # the second one stops at once; the engine ends with this process
            os._exit(130)
        stopped_by.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            event_loop.on_signal(loop, number, functools.partial(cancel, number))


def _import_server() -> Any:
    """app.server. It and FastAPI's OpenAPI document build their models later: no health check needs one."""
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
    with _start_errors():
        has_keys = bool(settings.keys_file and read_keys(settings.keys_file))
    if not has_keys and not settings.is_loopback and not settings.insecure_no_auth:
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
    holder = listener_on(settings.port) if error.errno == errno.EADDRINUSE else ""
    advice = f"choose another, such as --port {other} (make serve PORT={other})"
    return f"({reason}{f' by {holder}' if holder else ''}): {advice}"
