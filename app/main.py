"""Application factory: wires settings -> engine -> service -> routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from msgspec.structs import replace

from app import VERSION
from app.access.api_keys import ApiKeys
from app.api import health, score, static_pages, tokens
from app.api.metrics import Metrics
from app.api.native import routes
from app.api.openai import routes as openai_routes
from app.api.openapi import TAGS, DescribedApp
from app.api.resume_store import ResumeStore
from app.chat.template import ChatTemplate
from app.common import logs
from app.common.ipc import WorkerConfig
from app.common.operating_system import available_cores
from app.common.settings import Settings
from app.engine.cpu.toolchain.library_cache import cache_directory
from app.engine_client.client import EngineClient
from app.engine_client.engine_pool import EnginePool
from app.engine_client.fair_queue import FairQueue, QueueLimits
from app.http import request_log
from app.http.auth import AuthMiddleware, public_routes
from app.http.connection_limits import ConnectionLimits, HttpLimits, ensure_file_limit
from app.http.host_filter import CorsMiddleware, HostFilter
from app.http.idempotency import IdempotencyMiddleware
from app.http.request_log import RequestCounts, RequestLogMiddleware
from app.serving.hot_reload import HotReload
from app.serving.kernel_prebuild import build_for_next_start, libraries_at_start
from app.serving.model_instance import ModelInstance
from app.serving.service import Service
from app.serving.weights_snapshot import WeightsSnapshot, take_fingerprint, without_links
from app.tokenization.text_encoder import TokenizerPool
from model.checkpoint.manifest import read_model_name
from model.checkpoint.tensor_index import check_layout

if TYPE_CHECKING:
    from app.http.tracing import Tracing  # its packages are optional

_DESCRIPTION = """Text completion by a decoder-only transformer. `POST /complete` streams server-sent events.

Errors have a common format: `{"error": {"message", "type", "param", "code", "request_id"}}`."""

_log = logging.getLogger("inkstream")


class TracingError(ValueError):
    """Traces cannot be exported as configured; the message says what to change."""


def _open_tracing(settings: Settings) -> Tracing | None:
    """None if no traces are exported. Raises TracingError."""
    if not settings.traces or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        # OpenTelemetry is an optional dependency, and takes a quarter of a second to import.
        tracing: Tracing = import_module("app.http.tracing").Tracing(os.environ, VERSION)
    except ModuleNotFoundError:
        remedy = (
            "install inkstream with the extra traces (in a checkout: .venv/bin/python -m pip install -e '.[traces]')"
        )
        raise TracingError(f"--traces needs packages of OpenTelemetry: {remedy}") from None
    except ValueError as error:
        raise TracingError(f"--traces: {error}") from None
    return tracing


def create_app(settings: Settings, engine: Callable[[Settings], EnginePool] | None = None) -> FastAPI:
    """The application; its engine starts and stops with its lifespan. Tests pass `engine` to substitute a fake.

    Raises TracingError.
    """
    tracing = _open_tracing(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async def open_instance() -> ModelInstance:
            return await _open_instance(settings, engine or make_engine_pool)

        tokenizer_pool = TokenizerPool()
        instance = await open_instance()
        app.state.service = service = Service(settings, instance, tokenizer_pool)
        app.state.metrics = metrics = Metrics(lambda: service.engines, connections)
        app.state.resume_store = resume_store = ResumeStore(settings.resume_seconds)
        instance.start()
        app.state.reloader = reloader = HotReload(service, open_instance, metrics.record_reload)
        coroutines = [
            service.load(),
            reloader.run(),
            metrics.watch_loop(),
            connections.monitor_descriptors(),
            service.failures.run(),
            build_for_next_start(instance.engine, settings.cache_dir),
        ]
        tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            tokenizer_pool.close()
            resume_store.clear()
            await service.close()
            if tracing:
                await asyncio.to_thread(tracing.close)

    app = DescribedApp(
        longest_deadline_ms=settings.max_deadline_ms,
        title="inkstream",
        version=VERSION,
        description=_DESCRIPTION,
        openapi_tags=TAGS,
        lifespan=lifespan,
    )
    app.state.connections = connections = ConnectionLimits(connection_limits(settings))
    _add_middleware(app, settings, connections.requests, tracing)
    request_log.install(app)
    for module in (routes, openai_routes, score):
        app.include_router(module.router, tags=["completion"])
    for module in (tokens, health, static_pages):
        app.include_router(module.router)
    app.state.bundles = static_pages.new_bundles()
    app.state.page_headers = static_pages.page_headers(settings.compared_origins)
    return app


def _add_middleware(app: FastAPI, settings: Settings, counts: RequestCounts, tracing: Tracing | None) -> None:
    """Adds the middleware, which runs before routing; the last one added runs first."""
    keys = ApiKeys(settings.keys_file) if settings.keys_file else None
    app.add_middleware(
        IdempotencyMiddleware,
        max_body_bytes=settings.max_body_bytes,
        replay_bytes=settings.resume_bytes,
        seconds=settings.resume_seconds,
    )
    app.add_middleware(AuthMiddleware, keys=keys, public=public_routes([health.router, static_pages.router]))
    if settings.origins:
        app.add_middleware(CorsMiddleware, origins=settings.origins)
    app.add_middleware(HostFilter, allowed=settings.host_names)
    app.add_middleware(RequestLogMiddleware, counts=counts, tracing=tracing)


async def _open_instance(settings: Settings, make_engine: Callable[[Settings], EnginePool]) -> ModelInstance:
    """Opens an instance of the current weights directory; a symlink to it may be changed later.

    Raises CheckpointError.
    """
    fingerprint = await asyncio.to_thread(take_fingerprint, settings.weights)
    weights = await asyncio.to_thread(without_links, settings.weights)
    snapshot = await asyncio.to_thread(WeightsSnapshot.open, weights)
    try:
        chat_template, name = await asyncio.to_thread(_load_facts, snapshot)
        engine = make_engine(settings.model_copy(update={"weights": weights}))
    except BaseException:
        snapshot.close()
        raise
    return ModelInstance(
        weights,
        fingerprint,
        engine,
        chat_template,
        grammar_seconds=settings.guide_seconds,
        name=name,
        snapshot=snapshot,
        copies=_copy_directories(settings),
    )


def _load_facts(snapshot: WeightsSnapshot) -> tuple[ChatTemplate | None, str | None]:
    """Chat template and name of the model. Raises CheckpointError if files are missing or invalid."""
    with snapshot.reading():
        check_layout(snapshot.directory)
        return ChatTemplate.load(snapshot.directory), read_model_name(snapshot.directory)


def _copy_directories(settings: Settings) -> list[Path]:
    """Directories for copies of weights: the cache directory is on disk, the temporary one may be in memory."""
    folders = [cache_directory(settings.cache_dir)]
    with contextlib.suppress(OSError):  # no writable temporary directory
        folders.append(Path(tempfile.gettempdir()))
    return [folder for folder in folders if folder]


def connection_limits(settings: Settings) -> HttpLimits:
    """The HTTP server's limits, of which the number of connections depends on the process's limit of open files."""
    connections = ensure_file_limit(settings.max_connections)
    if connections < settings.max_connections:
        _log.warning("the limit of open files (ulimit -n) allows only %d connections", connections)
    return HttpLimits(
        connections=connections,
        per_address=settings.max_connections_per_address or max(1, connections // 2),
        header_bytes=settings.max_header_bytes,
        headers=settings.max_headers,
        url_bytes=settings.max_url_bytes,
        head_seconds=settings.head_timeout,
        body_seconds=settings.body_timeout,
        write_seconds=settings.write_timeout,
        response_seconds=settings.body_timeout + settings.request_timeout + settings.write_timeout,
        idle_seconds=settings.keep_alive_timeout,
    )


def make_engine_pool(settings: Settings) -> EnginePool:
    """Builds the pool of engine processes from the settings."""
    cores = available_cores()
    if settings.threads > cores:
        _log.warning(
            "--threads %d exceeds the %d available cores: threads will compete for them",
            settings.threads,
            cores,
        )
    if settings.replicas > (threads := settings.threads or cores):
        _log.warning(
            "--replicas %d exceeds the %d threads (--threads): each replica takes one, and they will compete for cores",
            settings.replicas,
            threads,
        )
    limits = QueueLimits(max_requests=settings.max_waiting, max_prompt_tokens=settings.max_waiting_tokens)
    queue = FairQueue(limits)
    configs = _worker_configs(settings, cores)
    return EnginePool([EngineClient(config, silence_seconds=settings.engine_silence) for config in configs], queue)


def _worker_configs(settings: Settings, cores: int) -> list[WorkerConfig]:
    libraries = libraries_at_start(settings)
    config = WorkerConfig(
        weights=str(settings.weights),
        device=settings.device,
        dtype=settings.dtype,
        kernels=settings.kernels,
        quantize=settings.quantize,
        deterministic=settings.deterministic,
        library=str(libraries.found) if libraries.found else None,
        cache_dir=str(libraries.cache_dir) if libraries.cache_dir else None,
        # The same number of threads for each: a request may start on one engine and finish on another.
        threads=max(1, (settings.threads or cores) // settings.replicas),
        replicas=settings.replicas,
        concurrent_loaders=settings.replicas - 1,
        kv_blocks=settings.kv_blocks,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_context=settings.max_context,
        tokens_per_step=settings.tokens_per_step,
        prompt_tokens_beside=settings.prompt_tokens_beside,
        max_running=settings.max_running,
        log_level=settings.log_level,
        log_format=logs.resolve_format(settings.log_format),
    )
    return [replace(config, replica=index) for index in range(settings.replicas)]
