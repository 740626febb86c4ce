"""Native completion API: POST /complete, streaming or not, its resumption, and DELETE /complete/{id}.

A stream outlives its connection: each connection subscribes to a ResumableStream, which keeps recent frames for replay.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from pydantic import ConfigDict, Field, model_validator
from starlette.responses import Response

from app.access.rate_limiter import Reservation, Tenant
from app.api import schemas
from app.api.dependencies import RequestRoute, documented, read_body, resume_store_of
from app.api.event_frames import EventFrames
from app.api.openapi import declared
from app.api.request_handle import RequestHandle
from app.api.resume_store import ResumeStore, StoredStream, Subscription
from app.api.schemas import CompletionFields, Prompts, TokenIds, documented_defaults
from app.common.types import MODEL_DEFAULT_FIELDS
from app.generation.request import CompletionEvent, Delta, Finished, GenerationRequest, Heartbeat, Queued, Started
from app.http import sse
from app.http.auth import owner_of, tenant_of
from app.http.errors import ApiError
from app.http.request_log import record_of
from app.http.response_model import ResponseModel, json_response

if TYPE_CHECKING:
    from app.http.tracing import RequestTrace  # its packages are optional

_WEIGHTS_CLOSED = "the weights of this stream are no longer served: send the request again"


class ResumableStream(StoredStream, EventFrames):
    """A completion whose client may reconnect."""

    def __init__(
        self,
        handle: RequestHandle,
        resume_store: ResumeStore,
        *,
        owner: str,
        extra: Mapping[str, Any],
        replay_bytes: int,
    ) -> None:
        StoredStream.__init__(
            self, resume_store, name=handle.name, owner=owner, replay_bytes=replay_bytes, alias=handle.callers_id
        )
        EventFrames.__init__(self, handle)
        self.headers = handle.headers
        self._id_prefix = f"{handle.name}:"
        self._extra = extra
        self._receipt = schemas.Receipt.of(handle.admitted)
        self._finished: dict[int, Finished] = {}
        self._is_suspended = False
        self._delivery: Reservation | None = None
        """Of a connection that reads a completion whose own reservation has ended."""

    def attach(self) -> Subscription:
        """Subscribes a connection."""
        self._is_suspended, self._writer = False, None
        subscription = super().attach()
        self.handle.session.stream.wake()
        return subscription

    def reattach(self, tenant: Tenant) -> Subscription:
        """Subscribes a connection of a client that reconnects, which is a request like any other.

        Raises Unavailable or ApiError if the completion cannot be resumed, or the tenant's limits do not allow it.
        """
        if self._is_suspended and self.handle.session.stream.is_open:
            if self.handle.admitted.instance.is_closed:
                raise ApiError(404, _WEIGHTS_CLOSED, code="events_gone")
            self.handle.service.require_open()  # the engine may be restarting: the stream waits for it
            self.handle.resume()
        elif self._subscription:  # which ends now
            (self._delivery or self.handle.admitted.reservation).count_reconnection(time.monotonic())
        else:
            self._delivery = self.handle.service.admission.reserve_delivery(tenant)
        return self.attach()

    def _suspend(self) -> None:
        """Suspends the completion at once."""
        self._end_delivery()
        if self.is_finished:
            self.handle.close()
        else:
            self._is_suspended = self.handle.session.stream.is_open
            self.handle.suspend()

    def _end_delivery(self) -> None:
        if self._delivery:
            self._delivery.end(0)
            self._delivery = None

    def cancel(self) -> bool:
        """Cancels the completion and notifies its reader; False if it had already finished."""
        was_running = self.handle.session.stream.is_open
        self.handle.session.stream.cancel()
        if was_running:
            self.handle.record_cancelled()
        return was_running

    @property
    def trace(self) -> RequestTrace | None:
        """The trace of the request that began this stream."""
        return self.handle.trace

    def log_fields(self) -> dict[str, Any]:
        """Fields for the log line of a request that resumes this stream."""
        return {**self.handle.log_fields(), "stream": self.name}

    def close(self) -> None:
        """Releases the completion; the stream can no longer be resumed."""
        self._end_delivery()
        self.handle.close()

    async def frames(
        self, subscription: Subscription, number: int = 0, writer: sse.BodyWriter | None = None
    ) -> AsyncIterator[bytes]:
        """The event stream from frame `number` on; ends with exactly one `done` or `error`."""

        def is_current() -> bool:
            return subscription is self._subscription

        for piece in self._replayed(subscription, number):
            yield piece
        while is_current() and not self.is_finished:
            if frames := await self.next_frames(writer, is_current):
                yield frames

    def encode(self, event: CompletionEvent) -> bytes:
        """The frame of an event, also for the replay buffer."""
        if isinstance(event, Delta) and not event.tokens:  # first, since nearly all events are
            buffer = self._replay_buffer
            return buffer.append(sse.text_event(event.index, event.text, f"{self._id_prefix}{buffer.next_number}"))
        match event:
            case Delta(index, text, details):
                tokenizer = self.handle.admitted.tokenizer
                tokens = [schemas.token(tokenizer, detail) for detail in details]
                return self._append("token", schemas.TokenEvent(index, text, tokens))
            case Queued(position):
                eta_ms = round(self.handle.engine.queue.eta_seconds(position, time.monotonic()) * 1e3)
                return self._append("queue", schemas.QueueEvent(position, eta_ms))
            case Started():
                return self._append("start", self._start())
            case Finished(index):
                self._finished[index] = event
            case Heartbeat():
                return sse.PING
        return b""

    def encode_end(self) -> bytes:
        """The event `done`."""
        return self._append("done", self._done())

    def encode_error(self, body: dict[str, Any]) -> bytes:
        """The event `error`."""
        return self._append("error", body)

    def _append(self, name: str, data: ResponseModel | dict[str, Any]) -> bytes:
        return self._replay_buffer.append(sse.event(name, data, f"{self._id_prefix}{self.next_number}"))

    def _start(self) -> schemas.StartEvent:
        return schemas.StartEvent(
            id=self.name,
            model=self.handle.admitted.instance.model_name,
            weights_version=self._receipt.weights_version,
            seed=self._receipt.seed,
            prompt_tokens=self.handle.session.prompt_tokens,
            cached_tokens=self.handle.session.cached_tokens,
            settings=self._receipt.settings,
            **self._extra,
        )

    def _done(self) -> schemas.DoneEvent:
        session = self.handle.session
        choices = [
            schemas.ChoiceEnd(i, end.finish_reason, end.stop_reason) for i, end in sorted(self._finished.items())
        ]
        return schemas.DoneEvent(choices, schemas.Usage.of(session), schemas.Timings.of(session), self._receipt)


_DEFAULT_MAX_TOKENS = 128


class CompleteRequest(CompletionFields):
    """Body of POST /complete. An unknown field is an error."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra=documented_defaults(unless=MODEL_DEFAULT_FIELDS, max_tokens=_DEFAULT_MAX_TOKENS, stream=True),
    )

    prompt: Prompts = Field(
        description="Text, token ids, or a list of either. May be empty.", examples=["Once upon a time"]
    )
    source: str | TokenIds | None = Field(
        None, description="Input of the encoder, for models that have one; `prompt` is then optional."
    )
    include_stop: bool | None = Field(None, description="Keep the stop string or token at the end of the text.")

    @model_validator(mode="before")
    @classmethod
    def _default_prompt(cls, body: Any) -> Any:
        if isinstance(body, dict) and "prompt" not in body and body.get("source") is not None:
            return {**body, "prompt": ""}
        return body

    @property
    def generation_request(self) -> GenerationRequest:
        """The generation request."""
        return self.to_generation_request(
            self.prompt,
            max_tokens=_DEFAULT_MAX_TOKENS,
            source=self.source,
            include_stop=bool(self.include_stop),
            is_streamed=self.stream is not False,
        )


_STORY = {"prompt": "Once upon a time", "max_tokens": 40}
_CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
_EXAMPLES = {
    "Stream": _STORY,
    "One object": {**_STORY, "stream": False},
    "Same text each time": {**_STORY, "seed": 7, "temperature": 0.7, "stream": False},
    "Three continuations": {"prompt": "Once upon a time", "max_tokens": 12, "n": 3, "stream": False},
    "Alternatives": {"prompt": "Once upon a time", "max_tokens": 4, "logprobs": 3, "stream": False},
    "JSON": {"prompt": "The capital, as JSON: ", "json_schema": _CITY, "stream": False},
}
router = APIRouter(route_class=RequestRoute, responses=declared(400, 401, 404, 413, 415, 429, 500, 503, 504))


@router.post("/complete", openapi_extra=documented(schemas.CompleteResponse, CompleteRequest, _EXAMPLES))
async def complete(request: Request) -> Response:
    """Continue a prompt. Streams server-sent events (start, queue, token, done, error) unless "stream" is false."""
    body = await read_body(request, CompleteRequest)
    handle = await RequestHandle.begin(request, body.generation_request)
    extra = {"user": body.user, "request_id": body.request_id, "truncated": handle.admitted.truncated or None}
    if body.stream is False:
        return await handle.respond(_full_response(handle, extra), request)
    limit, resume_store = handle.service.settings.resume_bytes, resume_store_of(request)
    stream = ResumableStream(handle, resume_store, owner=owner_of(request), extra=extra, replay_bytes=limit)
    return _respond(stream, stream.attach())


_LastEventId = Annotated[str | None, Header(description="Id of the last event that the client received.")]
_After = Annotated[int | None, Query(ge=-1, description="Number of that event, for clients that cannot send headers.")]


@router.get("/complete/{request_id}/events")
async def resume(
    request: Request, request_id: str, last_event_id: _LastEventId = None, after: _After = None
) -> Response:
    """Resume a stream after the last event that arrived. The text is the same as without the interruption."""
    stream, number = _resumable(request, request_id, last_event_id, after)
    record = record_of(request)
    record.log_fields = stream.log_fields
    if record.trace and stream.trace:
        record.trace.link(stream.trace)
    return _respond(stream, stream.reattach(tenant_of(request)), number)


@router.head("/complete/{request_id}/events", include_in_schema=False)
async def resume_headers(
    request: Request, request_id: str, last_event_id: _LastEventId = None, after: _After = None
) -> Response:
    """Whether a stream can be resumed; takes it from no connection."""
    stream, _ = _resumable(request, request_id, last_event_id, after)
    return Response(headers={**stream.headers, **sse.HEADERS})


def _resumable(
    request: Request, request_id: str, last_event_id: str | None, after: int | None
) -> tuple[ResumableStream, int]:
    """The stream, and the number of the event to resume it from. Raises ApiError 400, 404."""
    stream = resume_store_of(request).find(request_id, owner_of(request))
    if not isinstance(stream, ResumableStream):
        raise ApiError(404, "there is no resumable stream with this id: send the request again", code="unknown_request")
    number = after + 1 if last_event_id is None and after is not None else next_number(stream.name, last_event_id)
    if number > stream.next_number:
        param = "after" if last_event_id is None else "Last-Event-ID"
        raise ApiError(
            400, f"{param} must be at most {stream.next_number - 1}, the last event that was sent", param=param
        )
    if not stream.can_replay_from(number):
        raise ApiError(404, f"event {number} is no longer available: send the request again", code="events_gone")
    return stream, number


@router.delete("/complete/{request_id}", openapi_extra=documented(schemas.Cancellation))
async def cancel(request: Request, request_id: str) -> Response:
    """Cancel a completion. Its stream ends with finish_reason "cancelled"."""
    stream = resume_store_of(request).find(request_id, owner_of(request))
    if not isinstance(stream, ResumableStream) or not stream.cancel():
        raise ApiError(404, "there is no running request with this id", code="unknown_request")
    return json_response(schemas.Cancellation(request_id, cancelled=True))


def _respond(stream: ResumableStream, subscription: Subscription, number: int = 0) -> Response:
    return sse.EventStreamResponse(
        partial(stream.frames, subscription, number), lambda: stream.detach(subscription), stream.headers
    )


def next_number(request_id: str, last_event_id: str | None) -> int:
    """The number of the event that comes after `last_event_id`. Raises ApiError 400."""
    if last_event_id is None:
        return 0
    name, _, number = last_event_id.rpartition(":")
    if name != request_id or not number.isdecimal() or len(number) > 9:
        raise ApiError(400, "Last-Event-ID must be the id of an event of this stream", param="Last-Event-ID")
    return int(number) + 1


async def _full_response(handle: RequestHandle, extra: dict[str, Any]) -> schemas.CompleteResponse:
    """The response as one object. Raises EngineError."""
    outputs = await handle.collect()
    admitted = handle.admitted
    wants_logprobs = admitted.request.logprobs is not None
    choices = [
        schemas.Choice(
            index=output.finished.index,
            finish_reason=output.finished.finish_reason,
            stop_reason=output.finished.stop_reason,
            text=output.text,
            tokens=schemas.token_array(admitted.tokenizer, output.tokens) if wants_logprobs else None,
        )
        for output in outputs
    ]
    return schemas.CompleteResponse(
        id=handle.name,
        model=admitted.instance.model_name,
        choices=choices,
        usage=schemas.Usage.of(handle.session),
        timings=schemas.Timings.of(handle.session),
        receipt=schemas.Receipt.of(admitted),
        **extra,
    )
