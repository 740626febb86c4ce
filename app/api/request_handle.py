"""One admitted request of any door on its way to its client: counted once, ended in every case."""

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
from app.common.errors import EngineError, EngineFailed, InvalidRequest, NotReady, QueueFull, QuotaUsedUp, Unavailable
from app.common.event_loop import TimeSlice
from app.common.fault_injection import fault, is_armed
from app.engine_client.engine_pool import EnginePool
from app.generation.request import Delta, Finished, GenerationRequest
from app.generation.session import GenerationSession
from app.generation.token_table import TokenTable
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
    """All that came of one choice."""

    ended: Finished
    text: str
    tokens: TokenTable = field(default_factory=TokenTable)


class RequestHandle:
    """Owns a completion; close() must be called in the end, whatever happens."""

    def __init__(self, name: str, admitted: Admitted, service: Service, metrics: Metrics) -> None:
        self.name = name
        self.admitted = admitted
        self.service = service
        self._metrics = metrics
        self._outcome: str | None = None
        self._closed = False
        self._has_failed = False
        """On the server's side."""
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
        """Admits a request; what can be known to be wrong is raised here, before any byte of an answer.

        `served` is what the prompt was made for, where it was made by the weights' own chat template.
        """
        name = request_id_of(request)

        async def discard(admitted: Admitted) -> None:
            cls(name, admitted, service, metrics).close()

        try:
            # A guide or a long text may take a while, and nobody must wait for those of a client that has left.
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
        """Of the answer."""
        left = self.admitted.lease.headers(time.monotonic())
        return {"X-Request-Id": self.name, **version_header(self.admitted.weights_version), **left}

    @property
    def engine(self) -> EnginePool:
        """The one it began with, whichever serves now."""
        return self.service.engine if is_armed("job.other_engine") else self.admitted.served.engine

    @property
    def completion(self) -> GenerationSession:
        """What the engine makes of it."""
        return self.admitted.completion

    def breather(self) -> TimeSlice:
        """For a long answer, whose slices take turns with those of other tenants."""
        account = WorkAccount(self.completion.stream.requests[0].salt, self.admitted.lease)
        return TimeSlice(partial(self.service.loop_share.pause, account))

    @property
    def _tokens(self) -> int:
        """That were read and written for it."""
        completion = self.completion
        return completion.n_tokens + (completion.prompt_tokens if completion.clock.started is not None else 0)

    def pause(self) -> None:
        """Nobody listens: neither the engine nor its caller's quota has to do with it until go_on()."""
        self.completion.pause()
        self.admitted.lease.pause(self._tokens)

    def go_on(self) -> None:
        """Somebody listens again. Raises Unavailable where the engine, or the quota, has no room for it now."""
        completion = self.completion
        # What was written is read again, and counts as prompt.
        most = completion.prompt_tokens + sum(request.max_tokens for request in completion.stream.requests)
        self.admitted.lease.go_on(most, time.monotonic())
        try:
            self.engine.resume(completion.stream)
        except BaseException:
            self.admitted.lease.pause(0)
            raise
        completion.go_on()

    def note(self, news: object) -> None:
        """Keeps the metrics in step with what is sent."""
        self._charge_work()
        if isinstance(news, Delta):
            self._metrics.progressed(self.completion)
        elif isinstance(news, Finished):
            self._outcome = news.finish_reason

    def note_cancelled(self) -> None:
        """It was ended from outside, whether or not somebody reads that."""
        self._outcome = "cancelled"

    def failure(self, error: Exception) -> ApiError:
        """What the client is told of an error in mid-stream."""
        self._outcome = "error"
        self._has_failed |= _is_ours(error)
        guide = self.admitted.wish.guide
        if isinstance(error, InvalidRequest) and guide:
            error.param = error.param or guide[0]
        if isinstance(error, EngineError):
            return from_engine(error)
        _log.error("request %s failed in its stream", self.name, exc_info=error)
        return ApiError(500, "an error on our side; the request id names it in the server's log")

    async def respond(self, work: Coroutine[Any, Any, Mapping[str, Any]], request: Request) -> Response:
        """`work` as the whole answer; the job ends with it, the lease when the client has the last byte."""
        try:
            answer = await sse.until_disconnect(work, request.receive)
            if not answer:  # the client has left
                self.close()
                return Response(status_code=499)
            fault("api.answer", answer)
            self._end()
            lease, used, facts = self.admitted.lease, self._tokens, self.facts()
            lease.settle(used)
            # A slow client holds the answer, and no longer this object with all that generation needed.
            record_of(request).facts = lambda: facts
            return JsonStream(answer, self.headers, self.breather(), partial(lease.end, used))
        except BaseException as error:
            self._has_failed |= isinstance(error, Exception) and _is_ours(error)
            self.close()
            raise

    async def collect(self) -> list[CollectedOutput]:
        """Everything, by choice. Raises EngineError."""
        texts: list[list[str]] = [[] for _ in self.completion.choices]
        tokens = [TokenTable() for _ in self.completion.choices]
        ends: dict[int, Finished] = {}
        try:
            while not self.completion.is_over:
                if not await self.completion.ready():
                    continue
                news = self.completion.take()
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
        """The request is over, however it ended; counts it once."""
        self._end()
        self.admitted.lease.end(self._tokens)

    def _end(self) -> None:
        """Nothing is computed for it any more."""
        self.completion.close()
        if not self._closed:
            self._closed = True
            self._charge_work()
            self.admitted.served.release()
            outcome = self._outcome or "disconnected"
            self._metrics.ended(self.completion, outcome, self.completion.duration)
            if self._has_failed:
                self.service.failures.record_failure()
            elif outcome in _SUCCEEDED:
                self.service.failures.record_success()

    def _charge_work(self) -> None:
        """Charges the key for the host work that was reported since the last time."""
        seconds = self.completion.stream.work_seconds
        if seconds > self._charged_seconds:
            self.admitted.lease.charge_work(seconds - self._charged_seconds, time.monotonic())
            self._charged_seconds = seconds

    def facts(self) -> dict[str, Any]:
        """For the line in the log."""
        completion, timings = self.completion, self.completion.timings()
        return {
            "outcome": self._outcome or "disconnected",
            "prompt_tokens": completion.prompt_tokens,
            "cached_tokens": completion.cached_tokens,
            "completion_tokens": completion.n_tokens,
            "queue_ms": None if completion.clock.started is None else timings["queue_ms"],
            "first_token_ms": None if completion.clock.first_token is None else timings["first_token_ms"],
        }


def _is_ours(error: Exception) -> bool:
    """Whether the server is to blame for a failed request, and neither the request nor too little time or capacity."""
    return isinstance(error, EngineFailed) or not isinstance(error, EngineError | ApiError)


def _reason(error: EngineError) -> str:
    match error:
        case QueueFull():
            return "queue_full"
        case QuotaUsedUp():
            return "quota"
        case NotReady():
            return "not_ready"
        case Unavailable():
            return "busy"
        case EngineFailed():
            return "failed"
    return "invalid"
