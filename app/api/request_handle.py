"""One admitted request of any completion API: counted once, charged to its tenant, and always released."""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import Request
from starlette.responses import Response

from app.access.worker_turns import WorkAccount
from app.api.dependencies import metrics_of, service_of, version_header
from app.api.metrics import Metrics
from app.api.schemas import Timings
from app.common.errors import (
    EngineError,
    EngineFailed,
    InvalidRequest,
    NotReady,
    QueueFull,
    RateLimitExceeded,
    Unavailable,
)
from app.common.fault_injection import fault
from app.common.time_slice import TimeSlice
from app.engine_client.engine_pool import EnginePool
from app.generation.collector import CollectedOutput, collect
from app.generation.completion import CompletionTimes
from app.generation.request import Finished, GenerationRequest
from app.http.auth import tenant_of
from app.http.disconnect import until_disconnect
from app.http.errors import ApiError, from_engine
from app.http.json_stream import JsonStream
from app.http.request_log import AccessRecord, record_of
from app.http.response_model import ResponseModel
from app.serving.model_instance import ModelInstance
from app.serving.service import Admitted, Service

if TYPE_CHECKING:
    from app.http.tracing import Phase  # its packages are optional

_log = logging.getLogger("inkstream")
_SUCCESS_REASONS = ("stop", "length")


class RequestHandle:
    """Owns one completion; the caller must always call end()."""

    def __init__(self, record: AccessRecord, admitted: Admitted, service: Service, metrics: Metrics) -> None:
        self.name = record.request_id
        self.callers_id = record.callers_id
        """The X-Request-Id that the caller sent; empty for none."""
        self._key = record.key or ""
        self.trace = trace = record.trace
        if trace:
            trace.hold()
        self.admitted = admitted
        self.completion = admitted.completion
        self.service = service
        self._metrics = metrics
        self._outcome: str | None = None
        self._is_ended = False
        self._has_failed = False
        """Whether the request failed through the server's fault."""
        self._charged_seconds = 0.0

    @classmethod
    async def begin(
        cls,
        request: Request,
        generation_request: GenerationRequest,
        *,
        heartbeat: float = 10.0,
        instance: ModelInstance | None = None,
    ) -> RequestHandle:
        """Admits a request; raises every error that can be detected before the first byte of the response.

        `instance` is the model instance whose chat template rendered the prompt, if any.
        """
        record, times = record_of(request), CompletionTimes()
        service, metrics = service_of(request), metrics_of(request)
        trace = record.trace
        if trace:
            trace.start()
        try:
            # Validating a grammar or tokenizing a long text may take a while: stop if the client disconnects.
            work = service.begin(record.request_id, generation_request, tenant_of(request), heartbeat, instance, times)
            admitted = await until_disconnect(work, request.receive)
        except Exception as error:
            if isinstance(error, EngineError):
                metrics.record_rejected(_rejection_reason(error))
            if _is_server_fault(error):
                service.failures.record_failure()
            if trace:
                trace.add({}, _phases(times, 0))
            raise
        if admitted is None:
            raise ApiError(499, "the client has disconnected")
        handle = cls(record, admitted, service, metrics)
        record.log_fields = handle.log_fields
        return handle

    @property
    def public_name(self) -> str:
        """The name in errors: the caller's own, or the request id."""
        return self.callers_id or self.name

    @property
    def headers(self) -> dict[str, str]:
        """Response headers."""
        rate_limit_headers = self.admitted.reservation.headers(time.monotonic())
        return {"X-Request-Id": self.name, **version_header(self.admitted.model_version), **rate_limit_headers}

    @property
    def engine(self) -> EnginePool:
        """The engine pool on which the request started, even after a hot reload."""
        return self.admitted.instance.engine

    def time_slice(self) -> TimeSlice:
        """Time slices for a long response, which alternate with the work of other tenants."""
        account = WorkAccount(self.completion.requests[0].cache_namespace, self.admitted.reservation)
        return TimeSlice(partial(self.service.loop_share.pause, account))

    @property
    def _tokens(self) -> int:
        """Prompt and completion tokens so far."""
        completion = self.completion
        return completion.n_tokens + (completion.prompt_tokens if completion.times.started is not None else 0)

    def detach(self) -> None:
        """The client left: the request uses no engine and no rate limits until attach()."""
        self.completion.detach()
        self.admitted.reservation.pause(self._tokens)

    def attach(self) -> None:
        """The client is back. Raises Unavailable if the engine or the rate limits have no capacity now."""
        completion = self.completion
        # Generated tokens are prefilled again and count as prompt tokens.
        max_tokens = completion.prompt_tokens + sum(request.max_tokens for request in completion.requests)
        self.admitted.reservation.resume(max_tokens, time.monotonic())
        try:
            completion.attach()
        except BaseException:
            self.admitted.reservation.pause(0)
            raise

    def record_progress(self) -> None:
        """Records the metrics of events that are about to be sent."""
        if self.completion.work_seconds > self._charged_seconds:
            self._charge_work()
        if self.completion.inter_token_latencies:
            self._metrics.record_progress(self.completion)

    def record_finished(self, end: Finished) -> None:
        """Records the end of a choice, which is about to be sent."""
        self._outcome = end.finish_reason

    def record_cancelled(self) -> None:
        """Records that the request was cancelled through the API, even if no connection reads the final event."""
        self._outcome = "cancelled"

    def on_error(self, error: Exception) -> ApiError:
        """Records an exception of the completion; returns the error for the client."""
        self._outcome = "error"
        self._has_failed |= _is_server_fault(error)
        grammar = self.admitted.request.grammar
        if isinstance(error, InvalidRequest) and grammar:
            error.param = error.param or grammar[0]
        if isinstance(error, EngineError):
            return from_engine(error)
        _log.error("request %s failed in mid-stream", self.public_name, exc_info=error)
        return ApiError(500, "internal error; look up the request id in the server's log")

    async def respond(self, work: Coroutine[Any, Any, ResponseModel], request: Request) -> Response:
        """Responds with the result of `work`; the rate limit reservation ends when the client has the last byte."""
        try:
            content = await until_disconnect(work, request.receive)
            if content is None:  # the client has disconnected
                self.end()
                return Response(status_code=499)
            fault("api.answer", content)
            self._end()
            lease, n_tokens, log_fields = self.admitted.reservation, self._tokens, self.log_fields()
            lease.record_usage(n_tokens)
            # With a slow client the response lives long, and must not keep this object and the completion alive.
            record_of(request).log_fields = lambda: log_fields
            return JsonStream(content, self.headers, self.time_slice(), partial(lease.end, n_tokens))
        except BaseException as error:
            self._has_failed |= isinstance(error, Exception) and _is_server_fault(error)
            self.end()
            raise

    async def collect(self) -> list[CollectedOutput]:
        """Collects the output of all choices. Raises EngineError."""
        try:
            outputs = await collect(self.completion, self.record_progress)
        except Exception as error:
            self.on_error(error)
            raise
        for output in outputs:
            self.record_finished(output.finished)
        return outputs

    def end(self) -> None:
        """Ends the request and counts it; idempotent."""
        self._end()
        self.admitted.reservation.end(self._tokens)

    def _end(self) -> None:
        """Stops generation and releases the model instance."""
        self.completion.end()
        if not self._is_ended:
            self._is_ended = True
            self._charge_work()
            self.admitted.instance.release()
            outcome = self._outcome or "disconnected"
            exemplar = self.trace.exemplar if self.trace else None
            self._metrics.record_finished(self.completion, outcome, self.completion.duration, exemplar, self._key)
            self._end_trace(outcome)
            if self._has_failed:
                self.service.failures.record_failure()
            elif outcome in _SUCCESS_REASONS:
                self.service.failures.record_success()

    def _end_trace(self, outcome: str) -> None:
        if not self.trace:
            return
        completion, request = self.completion, self.admitted.request
        if self.trace.exemplar:
            # Names follow OpenTelemetry's semantic conventions for generative AI where these define one.
            attributes = {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "inkstream",
                "gen_ai.request.model": self.admitted.instance.model_name,
                "gen_ai.response.model": self.admitted.instance.model_name,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.request.choice.count": len(completion.choices),
                "gen_ai.usage.input_tokens": completion.prompt_tokens,
                "gen_ai.usage.output_tokens": completion.n_tokens,
                "gen_ai.usage.cache_read.input_tokens": completion.cached_tokens,
                "gen_ai.response.finish_reasons": [outcome],
            }
            self.trace.add(attributes, _phases(completion.times, completion.n_tokens))
        self.trace.end_completion(completion.incidents, outcome if outcome == "error" else None)

    def _charge_work(self) -> None:
        """Charges the tenant for the CPU work that the engine reported since the last call."""
        seconds = self.completion.work_seconds
        if seconds > self._charged_seconds:
            self.admitted.reservation.charge_work(seconds - self._charged_seconds, time.monotonic())
            self._charged_seconds = seconds

    def log_fields(self) -> dict[str, Any]:
        """Fields for the log line."""
        completion, timings = self.completion, Timings.of(self.completion)
        return {
            "outcome": self._outcome or "disconnected",
            "prompt_tokens": completion.prompt_tokens,
            "cached_tokens": completion.cached_tokens,
            "completion_tokens": completion.n_tokens,
            "queue_ms": None if completion.times.started is None else timings.queue_ms,
            "first_token_ms": None if completion.times.first_token is None else timings.first_token_ms,
            "tokens_per_second": timings.tokens_per_second or None,
        }


def _phases(times: CompletionTimes, n_tokens: int) -> list[Phase]:
    """The phases that a request has gone through; each ends with the next, the last one now or with the last token."""
    marks = {
        "admission": times.begun,
        "tokenize": times.tokenizing,
        "grammar": times.compiling,
        "queue": times.queued,
        "prefill": times.started,
        "decode": times.first_token,
    }
    starts = [(name, at) for name, at in marks.items() if at is not None]
    last = times.last_token if times.first_token is not None else None
    ends = [*(at for _, at in starts[1:]), last or time.monotonic()]
    own = {"decode": {"gen_ai.usage.output_tokens": n_tokens}}
    return [(name, at, end, own.get(name, {})) for (name, at), end in zip(starts, ends, strict=True)]


def _is_server_fault(error: Exception) -> bool:
    """Whether a request failed through the server's fault, not because of its content, a deadline or the load."""
    return isinstance(error, EngineFailed) or not isinstance(error, EngineError | ApiError)


def _rejection_reason(error: EngineError) -> str:
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
