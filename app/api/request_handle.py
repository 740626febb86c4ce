"""One admitted request of any API: counted once, and always released."""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from app.access.rate_limiter import Tenant
from app.access.tenant_queue import WorkAccount
from app.api.dependencies import version_header
from app.api.metrics import Metrics
from app.common.errors import (
    EngineError,
    EngineFailed,
    InvalidRequest,
    NotReady,
    QueueFull,
    RateLimitExceeded,
    Unavailable,
)
from app.common.event_loop import TimeSlice
from app.common.fault_injection import fault, is_armed
from app.engine_client.engine_pool import EnginePool
from app.generation.request import Delta, Finished, GenerationRequest, TokenTable
from app.generation.session import GenerationSession
from app.http import sse
from app.http.access_record import record_of
from app.http.errors import ApiError, from_engine, request_id_of
from app.http.json_stream import JsonStream
from app.serving.model_instance import ModelInstance
from app.serving.service import Admitted, Service

_log = logging.getLogger("inkstream")
_SUCCEEDED = ("stop", "length")


@dataclass(slots=True)
class CollectedOutput:
    """The collected output of one choice."""

    ended: Finished
    text: str
    tokens: TokenTable = field(default_factory=TokenTable)


class RequestHandle:
    """Owns a completion; the caller must always call close()."""

    def __init__(self, name: str, admitted: Admitted, service: Service, metrics: Metrics) -> None:
        self.name = name
        self.admitted = admitted
        self.service = service
        self._metrics = metrics
        self._outcome: str | None = None
        self._closed = False
        self._has_failed = False
        """Whether it failed through the server's fault."""
        self._charged_seconds = 0.0

    @classmethod
    async def begin(
        cls,
        request: Request,
        wish: GenerationRequest,
        service: Service,
        metrics: Metrics,
        caller: Tenant,
        *,
        heartbeat: float = 10.0,
        served: ModelInstance | None = None,
    ) -> RequestHandle:
        """Admits a request; raises every error that can be detected before the first byte of the response.

        `served` is the model instance whose chat template rendered the prompt, if one did.
        """
        name = request_id_of(request)

        async def discard(admitted: Admitted) -> None:
            cls(name, admitted, service, metrics).close()

        try:
            # Checking a grammar or tokenizing a long text may take a while: stop if the client disconnects.
            work = service.begin(name, wish, caller, heartbeat, served)
            admitted = await sse.until_disconnect(work, request.receive, discard=discard)
        except Exception as error:
            if isinstance(error, EngineError):
                metrics.rejected(_reason(error))
            if _is_ours(error):
                service.failures.record_failure()
            raise
        if admitted is None:
            raise ApiError(499, "the client has left")
        job = cls(name, admitted, service, metrics)
        record_of(request).facts = job.facts
        return job

    @property
    def headers(self) -> dict[str, str]:
        """Response headers."""
        left = self.admitted.reservation.headers(time.monotonic())
        return {"X-Request-Id": self.name, **version_header(self.admitted.weights_version), **left}

    @property
    def engine(self) -> EnginePool:
        """The engine pool on which it started, even after a hot reload."""
        return self.service.engine if is_armed("job.other_engine") else self.admitted.instance.engine

    @property
    def completion(self) -> GenerationSession:
        """Its generation session."""
        return self.admitted.session

    def breather(self) -> TimeSlice:
        """Time slices of a long response, which alternate with those of other tenants."""
        account = WorkAccount(self.completion.stream.requests[0].cache_namespace, self.admitted.reservation)
        return TimeSlice(partial(self.service.loop_share.pause, account))

    @property
    def _tokens(self) -> int:
        """Prompt and completion tokens so far."""
        completion = self.completion
        return completion.n_tokens + (completion.prompt_tokens if completion.times.started is not None else 0)

    def pause(self) -> None:
        """Suspends the request after a disconnect: it uses neither the engine nor its tenant's limits until go_on()."""
        self.completion.pause()
        self.admitted.reservation.pause(self._tokens)

    def go_on(self) -> None:
        """Resumes the request. Raises Unavailable if the engine or the rate limits have no capacity now."""
        completion = self.completion
        # Generated text is prefilled again, and counts as prompt.
        most = completion.prompt_tokens + sum(request.max_tokens for request in completion.stream.requests)
        self.admitted.reservation.resume(most, time.monotonic())
        try:
            self.engine.resume(completion.stream)
        except BaseException:
            self.admitted.reservation.pause(0)
            raise
        completion.resume()

    def note(self, news: object) -> None:
        """Updates the metrics for an event that is about to be sent."""
        self._charge_work()
        if isinstance(news, Delta):
            self._metrics.progressed(self.completion)
        elif isinstance(news, Finished):
            self._outcome = news.finish_reason

    def note_cancelled(self) -> None:
        """Records that the request was cancelled through the API, even if no connection reads the final event."""
        self._outcome = "cancelled"

    def failure(self, error: Exception) -> ApiError:
        """The error that the client gets for an exception in mid-stream."""
        self._outcome = "error"
        self._has_failed |= _is_ours(error)
        guide = self.admitted.request.grammar
        if isinstance(error, InvalidRequest) and guide:
            error.param = error.param or guide[0]
        if isinstance(error, EngineError):
            return from_engine(error)
        _log.error("request %s failed in its stream", self.name, exc_info=error)
        return ApiError(500, "internal error; look up the request id in the server's log")

    async def respond(self, work: Coroutine[Any, Any, Mapping[str, Any]], request: Request) -> Response:
        """Responds with the result of `work`; the reservation ends when the client has the last byte."""
        try:
            answer = await sse.until_disconnect(work, request.receive)
            if not answer:  # the client has disconnected
                self.close()
                return Response(status_code=499)
            fault("api.answer", answer)
            self._end()
            lease, used, facts = self.admitted.reservation, self._tokens, self.facts()
            lease.record_usage(used)
            # A slow client keeps the response alive, but not this object with all the state of generation.
            record_of(request).facts = lambda: facts
            return JsonStream(answer, self.headers, self.breather(), partial(lease.end, used))
        except BaseException as error:
            self._has_failed |= isinstance(error, Exception) and _is_ours(error)
            self.close()
            raise

    async def collect(self) -> list[CollectedOutput]:
        """Collects the whole output by choice. Raises EngineError."""
        texts: list[list[str]] = [[] for _ in self.completion.choices]
        tokens = [TokenTable() for _ in self.completion.choices]
        ends: dict[int, Finished] = {}
        try:
            while not self.completion.is_done:
                if not await self.completion.wait_event():
                    continue
                news = self.completion.next_event()
                self.note(news)
                if isinstance(news, Delta):
                    texts[news.index].append(news.text)
                    tokens[news.index].extend(news.tokens)
                elif isinstance(news, Finished):
                    ends[news.index] = news
        except Exception as error:
            self.failure(error)
            raise
        return [CollectedOutput(ends[i], "".join(text), tokens[i]) for i, text in enumerate(texts)]

    def close(self) -> None:
        """Ends the request and counts it; idempotent."""
        self._end()
        self.admitted.reservation.end(self._tokens)

    def _end(self) -> None:
        """Stops generation and releases the model instance."""
        self.completion.close()
        if not self._closed:
            self._closed = True
            self._charge_work()
            self.admitted.instance.release()
            outcome = self._outcome or "disconnected"
            self._metrics.ended(self.completion, outcome, self.completion.duration)
            if self._has_failed:
                self.service.failures.record_failure()
            elif outcome in _SUCCEEDED:
                self.service.failures.record_success()

    def _charge_work(self) -> None:
        """Charges the tenant for the host work that was reported since the last call."""
        seconds = self.completion.stream.work_seconds
        if seconds > self._charged_seconds:
            self.admitted.reservation.charge_work(seconds - self._charged_seconds, time.monotonic())
            self._charged_seconds = seconds

    def facts(self) -> dict[str, Any]:
        """Facts for the log line."""
        completion, timings = self.completion, self.completion.timings()
        return {
            "outcome": self._outcome or "disconnected",
            "prompt_tokens": completion.prompt_tokens,
            "cached_tokens": completion.cached_tokens,
            "completion_tokens": completion.n_tokens,
            "queue_ms": None if completion.times.started is None else timings["queue_ms"],
            "first_token_ms": None if completion.times.first_token is None else timings["first_token_ms"],
        }


def _is_ours(error: Exception) -> bool:
    """Whether the server is to blame for a failed request, and neither the request nor too little time or capacity."""
    return isinstance(error, EngineFailed) or not isinstance(error, EngineError | ApiError)


def _reason(error: EngineError) -> str:
    match error:
        case QueueFull():
            return "queue_full"
        case RateLimitExceeded():
            return "quota"
        case NotReady():
            return "not_ready"
        case Unavailable():
            return "busy"
        case EngineFailed():
            return "failed"
    return "invalid"
