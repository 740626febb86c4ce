"""The native door: POST /complete, streaming or not, and DELETE /complete/{id}."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app import VERSION
from app.api import sse
from app.api.dependencies import MetricsDep, ServiceDep, body_schema, read_body
from app.api.errors import ApiError, from_engine, request_id_of
from app.api.metrics import Metrics
from app.api.schemas import Cancellation, CompleteRequest, CompleteResponse, ErrorResponse
from app.completion import Completion, Delta, Ended, Idle, News, Queued, TokenDetail, prompt_sha256
from app.engine.errors import EngineError, NotReady, QueueFull
from app.engine.params import SamplingParams
from app.engine.types import Started
from app.service import Service, Wish
from model.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 128
_log = logging.getLogger("inkstream")
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 404, 413, 415, 422, 500, 503)
}
router = APIRouter(responses=_ERRORS)


@router.post("/complete", response_model=CompleteResponse, openapi_extra=body_schema(CompleteRequest))
async def complete(request: Request, service: ServiceDep, metrics: MetricsDep) -> Response:
    """Continue a prompt. Streams server-sent events (start, queue, token, done, error) unless "stream" is false."""
    body = await read_body(request, CompleteRequest, service.settings.max_body_bytes)
    try:
        job = await _Job.begin(request_id_of(request), body, service, metrics)
    except EngineError as error:
        metrics.rejected(_reason(error))
        raise
    headers = {"X-Request-Id": job.id}
    if body.stream is not False:
        return sse.EventStreamResponse(job.frames(), job.close, headers)
    try:
        answer = await sse.until_disconnect(job.whole(), request.receive)
    finally:
        job.close()
    # Nobody reads the answer to a client that has left.
    return JSONResponse(answer, headers=headers) if answer else Response(status_code=499)


@router.delete("/complete/{request_id}", response_model=Cancellation)
async def cancel(request_id: str, service: ServiceDep) -> dict[str, Any]:
    """Stop a completion. Its stream ends with finish_reason "cancelled"."""
    if not service.engine.cancel(request_id):
        raise ApiError(404, "no running request has this id", code="unknown_request")
    return {"id": request_id, "cancelled": True}


class _Job:
    """One request of this door: its completion, and what its answers are made of."""

    def __init__(
        self, request_id: str, completion: Completion, service: Service, metrics: Metrics, receipt: dict[str, Any]
    ) -> None:
        self.id = request_id
        self.completion = completion
        self.service = service
        self.metrics = metrics
        self.receipt = receipt
        self._tokenizer = completion.tokenizer
        self._outcome: str | None = None
        self._closed = False

    @classmethod
    async def begin(cls, request_id: str, body: CompleteRequest, service: Service, metrics: Metrics) -> _Job:
        """Admits the request; what can be known to be wrong is raised here, before any byte of an answer."""
        stops = body.stop or []
        wish = Wish(
            prompt=body.prompt,
            source=body.source,
            max_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            sampling={name: getattr(body, name) for name in ("temperature", "top_k", "top_p", "min_p")},
            seed=body.seed,
            stops=(stops,) if isinstance(stops, str) else tuple(stops),
            ignore_eos=bool(body.ignore_eos),
            logprobs=body.logprobs,
        )
        begun = await service.begin(request_id, wish)
        receipt = {
            "weights_version": begun.weights_version,
            "seed": begun.params.seed,
            "settings": _settings(wish, begun.params),
            "prompt_sha256": prompt_sha256(body.prompt),
            **({} if body.source is None else {"source_sha256": prompt_sha256(body.source)}),
            "version": VERSION,
        }
        return cls(request_id, begun.completion, service, metrics, receipt)

    async def frames(self) -> AsyncIterator[bytes]:
        """The event stream; ends with exactly one `done` or `error`."""
        number = 0
        try:
            async with aclosing(self.completion.news()) as news:
                async for item in news:
                    if isinstance(item, Idle):
                        yield sse.PING
                        continue
                    yield sse.event(*self._event(item), f"{self.id}:{number}")
                    number += 1
        except EngineError as error:
            yield sse.event("error", self._failure(from_engine(error)), f"{self.id}:{number}")
        except Exception:
            _log.exception("request %s failed in its stream", self.id)
            failure = ApiError(500, "an error on our side; the request id names it in the server's log")
            yield sse.event("error", self._failure(failure), f"{self.id}:{number}")

    async def whole(self) -> dict[str, Any]:
        """The answer in one object. Raises EngineError."""
        text, tokens, choice = [], [], {}
        try:
            async with aclosing(self.completion.news()) as news:
                async for item in news:
                    if isinstance(item, Delta):
                        text.append(item.text)
                        tokens += [self._token(token) for token in item.tokens]
                    elif isinstance(item, Ended):
                        choice = self._choice(item)
        except EngineError as error:
            self._failure(from_engine(error))
            raise
        asked = self.receipt["settings"]["logprobs"] is not None
        return {
            "id": self.id,
            "model": self.service.model_name,
            "choices": [{**choice, "text": "".join(text), "tokens": tokens if asked else None}],
            **self._closing_facts(),
        }

    def close(self) -> None:
        """The request is over, however it ended; counts it once."""
        self.completion.close()
        if not self._closed:
            self._closed = True
            outcome = self._outcome or "disconnected"
            duration = time.monotonic() - self.completion.clock.submitted
            self.metrics.ended(self.completion, outcome, duration)
            _log.info("request %s: %s, %d tokens, %.0f ms", self.id, outcome, self.completion.n_tokens, duration * 1e3)

    def _event(self, item: News) -> tuple[str, Mapping[str, Any]]:
        match item:
            case Queued(position):
                return "queue", {"position": position, "eta_ms": round(self.service.engine.eta_seconds(position) * 1e3)}
            case Started():
                return "start", self._start()
            case Delta(text, tokens):
                self.metrics.progressed(self.completion)
                detail = {"tokens": [self._token(token) for token in tokens]} if tokens else {}
                return "token", {"index": 0, "text": text, **detail}
            case Ended():
                return "done", {"choices": [self._choice(item)], **self._closing_facts()}
        raise AssertionError(item)

    def _start(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "model": self.service.model_name,
            "weights_version": self.receipt["weights_version"],
            "seed": self.receipt["seed"],
            "prompt_tokens": self.completion.prompt_tokens,
            "cached_tokens": self.completion.cached_tokens,
            "settings": self.receipt["settings"],
        }

    def _choice(self, ended: Ended) -> dict[str, Any]:
        self._outcome = ended.finish_reason
        return {"index": 0, "finish_reason": ended.finish_reason, "stop_reason": ended.stop_reason}

    def _failure(self, error: ApiError) -> dict[str, Any]:
        self._outcome = "error"
        return error.body(self.id)

    def _closing_facts(self) -> dict[str, Any]:
        return {"usage": self.completion.usage(), "timings": self.completion.timings(), "receipt": self.receipt}

    def _token(self, token: TokenDetail) -> dict[str, Any]:
        top = [_piece(self._tokenizer, token_id, logprob) for token_id, logprob in token.top]
        return _piece(self._tokenizer, token.id, token.logprob) | {"top": top}


def _settings(wish: Wish, params: SamplingParams) -> dict[str, Any]:
    """The settings that hold, under the names of the request's fields."""
    return {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "max_tokens": wish.max_tokens,
        "stop": list(wish.stops),
        "ignore_eos": wish.ignore_eos,
        "logprobs": wish.logprobs,
    }


def _piece(tokenizer: Tokenizer, token_id: int, logprob: float | None) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"id": token_id, "text": data.decode("utf-8", "replace"), "bytes": list(data), "logprob": logprob}


def _reason(error: EngineError) -> str:
    match error:
        case QueueFull():
            return "queue_full"
        case NotReady():
            return "not_ready"
    return "invalid"
