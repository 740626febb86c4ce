"""OpenAI's door: POST /v1/completions, streaming or not, for the clients that people have."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.api import openai_shapes as shapes
from app.api import sse
from app.api.dependencies import MetricsDep, ServiceDep, body_schema, read_body
from app.api.errors import ApiError, request_id_of
from app.api.job import Collected, Job
from app.api.openai_fields import CompletionsRequest
from app.api.openai_schemas import CompletionsResponse
from app.api.schemas import ErrorResponse
from app.choice import Delta, Ended, TokenDetail
from app.completion import News
from app.service import Service

_PING_SECONDS = 15.0
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 404, 413, 415, 500, 503, 504)
}
router = APIRouter(responses=_ERRORS)


@router.post("/v1/completions", response_model=CompletionsResponse, openapi_extra=body_schema(CompletionsRequest))
async def completions(request: Request, service: ServiceDep, metrics: MetricsDep) -> Response:
    """Continue a prompt, as OpenAI's completions endpoint does."""
    body = await read_body(request, CompletionsRequest, service.settings.max_body_bytes)
    check_model(body.model, service)
    job = await Job.begin(request_id_of(request), body.wish, service, metrics, heartbeat=_PING_SECONDS)
    answer = _Answer(job, body)
    headers = {"X-Request-Id": job.name}
    if body.stream:
        return sse.EventStreamResponse(answer.frames(), job.close, headers)
    try:
        whole = await sse.until_disconnect(answer.whole(), request.receive)
    finally:
        job.close()
    return JSONResponse(whole, headers=headers) if whole else Response(status_code=499)


def check_model(name: str | None, service: Service) -> None:
    """Raises ApiError 404 for a model that is not here."""
    if name and name != service.model_name:
        message = f"there is no model {name[:100]!r} here; the one that is served is {service.model_name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


class _Answer:
    """What one request of this door is answered with."""

    def __init__(self, job: Job, body: CompletionsRequest) -> None:
        self._job = job
        self._body = body
        self._tokenizer = job.admitted.tokenizer
        options = body.stream_options
        self._tells_usage = bool(options and options.include_usage)
        self._keeps_telling_usage = bool(options and options.continuous_usage_stats)
        self._pending: dict[int, tuple[TokenDetail, ...]] = {}
        self._head = {
            "id": f"cmpl-{job.name.removeprefix('req-')}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": job.service.model_name,
            "system_fingerprint": job.admitted.weights_version[:16],
            "seed": job.admitted.params.seed,
        }
        self._extra = {name: value for name in ("user", "request_id") if (value := getattr(body, name)) is not None}
        if job.admitted.truncated:
            self._extra["truncated"] = True
        if body.warnings:
            self._extra["warnings"] = body.warnings

    async def whole(self) -> dict[str, Any]:
        """The answer in one object. Raises EngineError."""
        collected = self._best(await self._job.collect())
        choices = [self._choice(i, one.text, one.tokens, one.ended) for i, one in enumerate(collected)]
        return {**self._head, "choices": choices, "usage": self._job.completion.usage(), **self._extra}

    async def frames(self) -> AsyncIterator[bytes]:
        """Data-only frames; a sign of life after long silence; `[DONE]` in the end."""
        completion, last = self._job.completion, time.monotonic()
        try:
            while not completion.is_over:
                await completion.ready()
                for frame in self._frames_of(completion.take()):
                    yield frame
                    last = time.monotonic()
                if time.monotonic() - last >= _PING_SECONDS:
                    yield b": ping\n"
                    last = time.monotonic()
            if self._tells_usage:
                yield _frame({**self._head, "choices": [], "usage": completion.usage(), **self._extra})
        except Exception as error:
            yield _frame(self._job.failure(error).body(self._job.name))
        yield b"data: [DONE]\n\n"

    def _frames_of(self, news: News) -> list[bytes]:
        self._job.note(news)
        if isinstance(news, Ended):
            return [self._chunk(news.index, "", self._pending.pop(news.index, ()), news)]
        if not isinstance(news, Delta):
            return []
        tokens = (*self._pending.pop(news.index, ()), *news.tokens)
        if not news.text:  # tokens without text go with the next that have some, or with the end
            self._pending[news.index] = tokens
            return []
        parts = shapes.one_by_one(Delta(news.index, news.text, tokens))
        return [self._chunk(part.index, part.text, part.tokens) for part in parts]

    def _chunk(self, index: int, text: str, tokens: tuple[TokenDetail, ...], ended: Ended | None = None) -> bytes:
        chunk = {**self._head, "choices": [self._choice(index, text, tokens, ended)], **self._extra}
        if self._keeps_telling_usage:
            chunk["usage"] = self._job.completion.usage()
        elif self._tells_usage:
            chunk["usage"] = None
        return _frame(chunk)

    def _choice(
        self, index: int, text: str, tokens: list[TokenDetail] | tuple[TokenDetail, ...], ended: Ended | None
    ) -> dict[str, Any]:
        asked = self._body.logprobs is not None and (tokens or not self._body.stream)
        return {
            "index": index,
            "text": text,
            "logprobs": shapes.logprobs(self._tokenizer, tokens) if asked else None,
            "finish_reason": ended.finish_reason if ended else None,
            "stop_reason": ended.stop_reason if ended else None,
        }

    def _best(self, collected: list[Collected]) -> list[Collected]:
        """Of every prompt's continuations the n best, by the mean log-probability of their tokens."""
        wish, choices = self._job.admitted.wish, self._job.completion.choices
        if not wish.ranks:
            return collected
        best = []
        for start in range(0, len(collected), wish.n_drawn):
            places = range(start, start + wish.n_drawn)
            ranked = sorted(places, key=lambda place: -choices[place].mean_logprob)
            best += [collected[place] for place in ranked[: wish.n]]
        return best


def _frame(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, ensure_ascii=True)}\n\n".encode("ascii")
