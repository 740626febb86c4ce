"""The only place where things are wired: settings -> engine -> service -> routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI

from app import VERSION
from app.api import chat, complete, errors, openai, operations, page, score, tokens
from app.api.metrics import Metrics
from app.api.openapi import TAGS, DescribedApp
from app.api.request_ids import RequestIds
from app.api.shelf import Shelf
from app.chat_template import ChatTemplate
from app.connections import Connections, Limits, possible_connections
from app.descriptors import watch_descriptors
from app.engine.admission import QueueLimits
from app.engine.client import EngineClient
from app.engine.cores import available_cores
from app.engine.frames import WorkerConfig
from app.kernels import build_for_next_start, libraries_at_start
from app.long_texts import LongTexts
from app.service import Service
from app.settings import Settings

_DESCRIPTION = """Text completion by a decoder-only transformer. `POST /complete` streams server-sent events.

Errors have one shape: `{"error": {"message", "type", "param", "code", "request_id"}}`."""

_log = logging.getLogger("inkstream")


def create_app(settings: Settings, engine: Callable[[Settings], EngineClient] | None = None) -> FastAPI:
    """The application; its engine starts and ends with its lifespan. `engine` makes another client (tests)."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        client = (engine or make_client)(settings)
        app.state.long_texts = long_texts = LongTexts()
        app.state.service = service = Service(settings, client, long_texts)
        app.state.metrics = metrics = Metrics(client, connections)
        app.state.shelf = shelf = Shelf(settings.resume_seconds)
        client.start()
        works = [service.load_tokenizer(), metrics.watch_loop(), watch_descriptors()]
        works.append(build_for_next_start(client, settings.cache_dir))
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            long_texts.close()
            if chat_template:
                await chat_template.close()
            shelf.clear()
            await asyncio.gather(client.stop(), service.guides.close())

    app = DescribedApp(
        title="inkstream",
        version=VERSION,
        description=_DESCRIPTION,
        openapi_tags=TAGS,
        generate_unique_id_function=lambda route: route.name,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.add_middleware(RequestIds)
    app.state.connections = connections = Connections(_connection_limits(settings))
    app.state.chat_template = chat_template = ChatTemplate.load(settings.weights)
    errors.install(app)
    for room in (complete, openai, chat, score):
        app.include_router(room.router, tags=["completion"])
    for room in (tokens, operations, page):
        app.include_router(room.router)
    return app


def _connection_limits(settings: Settings) -> Limits:
    connections = possible_connections(settings.max_connections)
    if connections < settings.max_connections:
        _log.warning("the limit of open files (ulimit -n) allows %d connections", connections)
    return Limits(
        connections=connections,
        per_address=settings.max_connections_per_address or max(1, connections // 2),
        header_bytes=settings.max_header_bytes,
        headers=settings.max_headers,
        url_bytes=settings.max_url_bytes,
        head_seconds=settings.head_timeout,
        body_seconds=settings.body_timeout,
        write_seconds=settings.write_timeout,
        idle_seconds=settings.keep_alive_timeout,
    )


def make_client(settings: Settings) -> EngineClient:
    """An engine process with what the settings say of it."""
    libraries, cores = libraries_at_start(settings), available_cores()
    if settings.threads > cores:
        _log.warning(
            "--threads %d is more than the %d cores there are: threads will wait for one another",
            settings.threads,
            cores,
        )
    config = WorkerConfig(
        weights=str(settings.weights),
        device=settings.device,
        dtype=settings.dtype,
        kernels=settings.kernels,
        quantize=settings.quantize,
        library=str(libraries.found) if libraries.found else None,
        cache_dir=str(libraries.cache_dir) if libraries.cache_dir else None,
        threads=settings.threads or cores,
        kv_blocks=settings.kv_blocks,
        max_context=settings.max_context,
        tokens_per_step=settings.tokens_per_step,
        prompt_tokens_beside=settings.prompt_tokens_beside,
        max_running=settings.max_running,
    )
    limits = QueueLimits(max_requests=settings.max_waiting, max_prompt_tokens=settings.max_waiting_tokens)
    return EngineClient(config, limits, silence_seconds=settings.engine_silence)
