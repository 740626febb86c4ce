"""POST /complete, streaming or not, its resumption, and DELETE /complete/{id}."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from pydantic import ConfigDict, Field, model_validator
from starlette.responses import Response

from app.api import serializers
from app.api.completion_fields import CompletionFields, Ids, Prompts
from app.api.dependencies import CallerDep, MetricsDep, ServiceDep, ShelfDep, body_schema, owner_of, read_body
from app.api.native.event_stream import ResumableStream
from app.api.openapi import declared
from app.api.request_handle import RequestHandle
from app.api.response_schemas import Cancellation, CompleteResponse
from app.generation.request import GenerationRequest
from app.http import sse
from app.http.access_record import record_of
from app.http.errors import ApiError

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
    extra: dict[str, Any] = {**serializers.echoed(body)}
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
    asked = job.admitted.wish.logprobs is not None
    choices = []
    for one in collected:
        tokens = serializers.token_elements(job.admitted.tokenizer, one.tokens) if asked else None
        choices.append({**serializers.choice(one.ended), "text": one.text, "tokens": tokens})
    return {
        "id": job.name,
        "model": job.admitted.served.model_name,
        "choices": choices,
        "usage": job.completion.usage(),
        "timings": job.completion.timings(),
        "receipt": serializers.receipt(job.admitted),
        **extra,
    }
