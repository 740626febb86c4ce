"""Application factory: wires settings -> engine -> service -> routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from app.access.api_keys import ApiKeys
from app.api import health, score, static_pages, tokens
from app.api.dependencies import RepeatQuotas
from app.api.direct_routes import DirectRoutes
from app.api.metrics import Metrics
from app.api.native import routes
from app.api.openai import routes as openai_routes
from app.api.openapi import TAGS, DescribedApp
from app.api.resume_store import ResumeStore
from app.common.operating_system import ensure_file_limit
from app.common.settings import Settings
from app.common.version import VERSION
from app.http import request_log
from app.http.auth import AuthMiddleware, has_known_key, public_routes
from app.http.connection_limits import ConnectionLimits, HttpLimits
from app.http.cors import CorsMiddleware
from app.http.host_filter import HostFilter
from app.http.idempotency import IdempotencyMiddleware
from app.http.incoming_bodies import IncomingBodies
from app.http.request_log import RequestLogMiddleware
from app.serving.hot_reload import HotReload
from app.serving.instance_factory import open_instance
from app.serving.kernel_prebuild import build_for_next_start
from app.serving.model_instance import ModelInstance
from app.serving.service import Service
from app.tokenization.tokenizer_pool import TokenizerPool
from model.checkpoint.hub import hub_model

if TYPE_CHECKING:
    from app.http.tracing import Tracing  # its packages are optional

_DESCRIPTION = """Text completion by a decoder-only transformer. `POST /complete` streams server-sent events.

Errors have a common format: `{"error": {"message", "type", "param", "code", "request_id"}}`."""

FirstInstance = tuple[Settings, ModelInstance]
"""The first model instance, whose engine has been started, and the settings, which name its weights directory."""
_log = logging.getLogger("inkstream")


def create_app(
    settings: Settings, opening: Awaitable[FirstInstance] | None = None, tracing: Tracing | None = None
) -> FastAPI:
    """The application; its engines stop with its lifespan.

    opening: returns the first instance, which the lifespan awaits; without it the lifespan opens one.
    tracing: exports traces; closed with the application.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tokenizer_pool = TokenizerPool()
        opened, instance = await (opening or _open(settings))
        app.state.service = service = Service(opened, instance, tokenizer_pool)
        app.state.metrics = metrics = Metrics(lambda: service.engines, connections, app.state.key_names)
        app.state.resume_store = resume_store = ResumeStore(settings.resume_seconds)
        # Keep the choice of --replicas auto, which depends on free memory: running engines leave less of it.
        chosen = opened.model_copy(update={"replicas": len(instance.engine.engines)})

        def reopen() -> Awaitable[ModelInstance]:
            return open_instance(chosen, service.reserved_bytes)

        app.state.reloader = reloader = HotReload(service, reopen, metrics.record_reload)
        background = [
            service.load(),
            reloader.run(),
            metrics.watch_loop(),
            connections.monitor_descriptors(),
            service.failures.run(),
            build_for_next_start(instance.engine, settings.cache_dir),
        ]
        try:
            async with _running(background):
                app.state.is_started.set()
                yield
        finally:
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
    keys = ApiKeys(settings.keys_file) if settings.keys_file else None
    connections = ConnectionLimits(connection_limits(settings), partial(has_known_key, keys=keys))
    _add_middleware(app, settings, keys, connections, tracing)
    _add_routes(app, settings)
    return app


async def _open(settings: Settings) -> FirstInstance:
    instance = await open_instance(settings)
    instance.start()
    return settings, instance


@asynccontextmanager
async def _running(background: Iterable[Coroutine[Any, Any, object]]) -> AsyncIterator[None]:
    """Runs the coroutines until the end of the block."""
    tasks = [asyncio.create_task(coroutine) for coroutine in background]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _add_routes(app: FastAPI, settings: Settings) -> None:
    for module in (routes, openai_routes, score):
        app.include_router(module.router, tags=["completion"])
    for module in (tokens, health, static_pages):
        app.include_router(module.router)
    direct = [module.router for module in (routes, openai_routes, score, tokens, health, static_pages)]
    app.router.middleware_stack = DirectRoutes(app.router.middleware_stack, direct)
    app.state.pages = static_pages.Pages(settings.compared_origins)


def _add_middleware(
    app: FastAPI, settings: Settings, keys: ApiKeys | None, connections: ConnectionLimits, tracing: Tracing | None
) -> None:
    """Adds the middleware, which runs before routing; the last one added runs first."""
    request_log.install(app)
    app.state.is_started = asyncio.Event()
    app.state.connections = connections
    app.state.key_names = (lambda: keys.names) if keys else tuple
    app.state.incoming_bodies = IncomingBodies(settings.body_timeout / 2)
    app.add_middleware(
        IdempotencyMiddleware,
        bodies=app.state.incoming_bodies,
        max_body_bytes=settings.max_body_bytes,
        replay_bytes=settings.resume_bytes,
        seconds=settings.resume_seconds,
        quotas=RepeatQuotas(),
    )
    public = public_routes([health.router, static_pages.router])
    app.add_middleware(AuthMiddleware, keys=keys, public=public, best_effort=connections.best_effort)
    if settings.origins:
        app.add_middleware(CorsMiddleware, origins=settings.origins, best_effort=connections.best_effort)
    app.add_middleware(HostFilter, allowed=settings.host_names, best_effort=connections.best_effort)
    if hub_model(str(settings.weights)):
        app.add_middleware(health.DownloadGate, is_open=app.state.is_started.is_set)
    app.add_middleware(RequestLogMiddleware, counts=connections.requests, tracing=tracing)


def connection_limits(settings: Settings) -> HttpLimits:
    """The HTTP server's limits; the number of connections depends on the process's limit of open files."""
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
