"""Native completion API: POST /complete, streaming or not, its resumption, and DELETE /complete/{id}.

A stream outlives its connection: ResumableStream generates into a buffer, and each connection reads from it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from pydantic import ConfigDict, Field, model_validator
from starlette.responses import Response

from app.api import response_schemas
from app.api.completion_fields import CompletionFields, Ids, Prompts
from app.api.dependencies import CallerDep, MetricsDep, ServiceDep, ShelfDep, body_schema, owner_of, read_body
from app.api.openapi import declared
from app.api.request_handle import RequestHandle
from app.api.response_schemas import Cancellation, CompleteResponse
from app.api.resume_store import ReplayBuffer, ResumeStore
from app.common.event_loop import TimeSlice
from app.generation.request import CompletionEvent, Delta, Finished, GenerationRequest, Heartbeat, Queued, Started
from app.http import sse
from app.http.access_record import record_of
from app.http.errors import ApiError

_OTHER_WEIGHTS = "the weights that this stream began with are no longer served: send the request again"


class Subscription:
    """One connection's subscription to a stream; a newer connection replaces it."""


class ResumableStream:
    """A completion whose frames are numbered and kept for resumption; one connection at a time reads them."""

    def __init__(
        self, job: RequestHandle, shelf: ResumeStore, *, owner: str, extra: Mapping[str, Any], journal_bytes: int
    ) -> None:
        self.name = job.name
        self.headers = job.headers
        self.owner = owner
        self._job = job
        self._shelf = shelf
        self._extra = extra
        self._receipt = response_schemas.receipt(job.admitted)
        self._journal = ReplayBuffer(journal_bytes)
        self._ends: dict[int, Finished] = {}
        self.is_finished = self._paused = False
        self._reader: Subscription | None = None
        shelf.put(self)

    def attach(self) -> Subscription:
        """Subscribes a connection. Raises Unavailable or ApiError if the completion cannot be resumed."""
        if self._paused and self._job.completion.stream.is_open:
            if self._job.admitted.instance.is_closed:
                raise ApiError(404, _OTHER_WEIGHTS, code="events_gone")
            self._job.service.require_open()  # an engine that is not ready is fine: the stream waits
            self._job.go_on()
        self._paused = False
        self._shelf.come_back(self)
        self._reader = Subscription()
        self._job.completion.stream.wake()
        return self._reader

    def detach(self, reader: Subscription) -> None:
        """Unsubscribes: suspends the completion at once; the client may reconnect within the resume timeout."""
        if reader is self._reader:
            self._reader = None
            if self.is_finished:
                self._job.close()
            else:
                self._paused = self._job.completion.stream.is_open
                self._job.pause()
            self._shelf.leave(self)

    def cancel(self) -> bool:
        """Cancels the completion and notifies its reader; False if it had already finished."""
        running = self._job.completion.stream.is_open
        self._job.completion.stream.cancel()
        if running:
            self._job.note_cancelled()
        return running

    def facts(self) -> dict[str, Any]:
        """Facts for the log line of a request that resumes this stream."""
        return {**self._job.facts(), "stream": self.name}

    def close(self) -> None:
        """Releases the completion; the stream can no longer be resumed."""
        self._job.close()

    @property
    def next_number(self) -> int:
        """The next frame's number."""
        return self._journal.next_number

    def keeps(self, number: int) -> bool:
        """Whether all frames from this number on can be replayed."""
        return self._journal.first <= number <= self._journal.next_number

    async def frames(self, reader: Subscription, number: int = 0) -> AsyncIterator[bytes]:
        """The event stream from frame `number` on; ends with exactly one `done` or `error`."""
        if reader is self._reader and number < self._journal.next_number:
            yield self._journal.since(number)
        while reader is self._reader and not self.is_finished:
            if frames := await self._next(reader):
                yield frames

    async def _next(self, reader: Subscription) -> bytes:
        """Encodes all pending events, up to a time slice; empty if there are none."""
        completion = self._job.completion
        frames: list[bytes] = []
        try:
            if not completion.is_done and not await completion.wait_event():
                return b""
            breather = TimeSlice()
            while reader is self._reader and completion.has_event and not (frames and breather.is_due):
                news = completion.next_event()
                self._job.note(news)
                frames.append(sse.PING if isinstance(news, Heartbeat) else self._written(news))
        except Exception as error:
            self.is_finished = True
            frames.append(self._kept("error", self._job.failure(error).body(self.name)))
        return b"".join(frames)

    def _written(self, news: CompletionEvent) -> bytes:
        match news:
            case Delta(index, text, details):
                if not details:
                    return self._journal.append(sse.text_event(index, text, self._next_id))
                tokens = response_schemas.tokens(self._job.admitted.tokenizer, details)
                return self._kept("token", {"index": index, "text": text, "tokens": tokens})
            case Queued(position):
                eta_ms = round(self._job.engine.queue.eta_seconds(position, time.monotonic()) * 1e3)
                return self._kept("queue", {"position": position, "eta_ms": eta_ms})
            case Started():
                return self._kept("start", self._start())
            case Finished(index):
                self._ends[index] = news
                if self._job.completion.is_done:
                    self.is_finished = True
                    return self._kept("done", self._done())
        return b""

    @property
    def _next_id(self) -> str:
        return f"{self.name}:{self._journal.next_number}"

    def _kept(self, name: str, data: Mapping[str, Any]) -> bytes:
        return self._journal.append(sse.event(name, data, self._next_id))

    def _start(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "model": self._job.admitted.instance.model_name,
            "weights_version": self._receipt["weights_version"],
            "seed": self._receipt["seed"],
            "prompt_tokens": self._job.completion.prompt_tokens,
            "cached_tokens": self._job.completion.cached_tokens,
            "settings": self._receipt["settings"],
            **self._extra,
        }

    def _done(self) -> dict[str, Any]:
        return {
            "choices": [response_schemas.choice(self._ends[index]) for index in sorted(self._ends)],
            "usage": self._job.completion.usage(),
            "timings": self._job.completion.timings(),
            "receipt": self._receipt,
        }


_DEFAULT_MAX_TOKENS = 128


class CompleteRequest(CompletionFields):
    """Body of POST /complete. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid")

    prompt: Prompts = Field(
        description="Text, token ids, or a list of either. Empty: start from nothing.", examples=["Once upon a time"]
    )
    source: str | Ids | None = Field(
        None, description="What the encoder reads, for models that have one; `prompt` may then be left out."
    )
    include_stop: bool | None = Field(None, description="Keep the stop at the end of the text.")

    @model_validator(mode="before")
    @classmethod
    def _answer_from_the_start(cls, body: Any) -> Any:
        if isinstance(body, dict) and "prompt" not in body and body.get("source") is not None:
            return {**body, "prompt": ""}
        return body

    @property
    def wish(self) -> GenerationRequest:
        """The generation request."""
        return self.to_wish(
            self.prompt,
            max_tokens=_DEFAULT_MAX_TOKENS,
            source=self.source,
            include_stop=bool(self.include_stop),
            is_streamed=self.stream is not False,
        )


router = APIRouter(responses=declared(400, 401, 404, 413, 415, 429, 500, 503, 504))


@router.post("/complete", response_model=CompleteResponse, openapi_extra=body_schema(CompleteRequest))
async def complete(
    request: Request, service: ServiceDep, metrics: MetricsDep, shelf: ShelfDep, caller: CallerDep
) -> Response:
    """Continue a prompt. Streams server-sent events (start, queue, token, done, error) unless "stream" is false."""
    body = await read_body(request, CompleteRequest, service.settings.max_body_bytes)
    job = await RequestHandle.begin(request, body.wish, service, metrics, caller)
    extra: dict[str, Any] = {**response_schemas.echoed(body)}
    if job.admitted.truncated:
        extra["truncated"] = True
    if body.stream is not False:
        limit = service.settings.resume_bytes
        return _respond(ResumableStream(job, shelf, owner=owner_of(request), extra=extra, journal_bytes=limit))
    return await job.respond(_whole(job, extra), request)


@router.get("/complete/{request_id}/events")
async def resume(
    request: Request,
    request_id: str,
    shelf: ShelfDep,
    last_event_id: Annotated[str | None, Header(description="The id of the last event that arrived.")] = None,
    after: Annotated[int | None, Query(ge=-1, description="Its number, where no header can be sent.")] = None,
) -> Response:
    """Go on with a stream after the last event that arrived. The text is what it would have been without the break."""
    stream = shelf.find(request_id, owner_of(request))
    if not isinstance(stream, ResumableStream):
        raise ApiError(404, "no stream that can be resumed has this id", code="unknown_request")
    number = after + 1 if last_event_id is None and after is not None else next_number(request_id, last_event_id)
    if number > stream.next_number:
        param = "after" if last_event_id is None else "Last-Event-ID"
        raise ApiError(400, f"{param}: the last event that was sent is {stream.next_number - 1}", param=param)
    if not stream.keeps(number):
        raise ApiError(404, f"event {number} is no longer kept: send the request again", code="events_gone")
    record_of(request).facts = stream.facts
    return _respond(stream, number)


@router.delete("/complete/{request_id}", response_model=Cancellation)
async def cancel(request: Request, request_id: str, shelf: ShelfDep) -> dict[str, Any]:
    """Stop a completion. Its stream ends with finish_reason "cancelled"."""
    stream = shelf.find(request_id, owner_of(request))
    if not isinstance(stream, ResumableStream) or not stream.cancel():
        raise ApiError(404, "no running request has this id", code="unknown_request")
    return {"id": request_id, "cancelled": True}


def _respond(stream: ResumableStream, number: int = 0) -> Response:
    reader = stream.attach()
    return sse.EventStreamResponse(stream.frames(reader, number), lambda: stream.detach(reader), stream.headers)


def next_number(request_id: str, last_event_id: str | None) -> int:
    """The number of the event that comes after `last_event_id`. Raises ApiError 400."""
    if last_event_id is None:
        return 0
    name, _, number = last_event_id.rpartition(":")
    if name != request_id or not number.isdecimal() or len(number) > 9:
        raise ApiError(400, "Last-Event-ID must be the id of an event of this stream", param="Last-Event-ID")
    return int(number) + 1


async def _whole(job: RequestHandle, extra: dict[str, Any]) -> dict[str, Any]:
    """The response as one object. Raises EngineError."""
    collected = await job.collect()
    asked = job.admitted.request.logprobs is not None
    choices = []
    for one in collected:
        tokens = response_schemas.token_elements(job.admitted.tokenizer, one.tokens) if asked else None
        choices.append({**response_schemas.choice(one.ended), "text": one.text, "tokens": tokens})
    return {
        "id": job.name,
        "model": job.admitted.instance.model_name,
        "choices": choices,
        "usage": job.completion.usage(),
        "timings": job.completion.timings(),
        "receipt": response_schemas.receipt(job.admitted),
        **extra,
    }
