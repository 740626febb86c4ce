"""Native completion API: POST /complete, streaming or not, its resumption, and DELETE /complete/{id}.

A stream outlives its connection: each connection attaches to a ResumableStream, which keeps recent frames for replay.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from pydantic import ConfigDict, Field, model_validator
from starlette.responses import Response

from app.api import schemas
from app.api.delivery import Connection
from app.api.dependencies import read_body, resume_store_of
from app.api.native.resumable_stream import ResumableStream, next_number
from app.api.openapi import declared
from app.api.request_handle import RequestHandle
from app.api.resume_fields import Resume, resumed
from app.api.route_documentation import documented
from app.api.schemas import CompletionFields, Prompts, TokenIds, documented_defaults
from app.common.types import MODEL_DEFAULT_FIELDS
from app.generation.request import GenerationRequest
from app.http import sse
from app.http.auth import owner_of, tenant_of
from app.http.errors import ApiError
from app.http.event_stream_response import EventStreamResponse
from app.http.request_log import record_of
from app.http.response_model import json_response

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

    resume: Resume | None = Field(
        None,
        description="What arrived of a stream that broke: this one goes on from there, computed with the same weights.",
    )

    @model_validator(mode="after")
    def _check_resume(self) -> CompleteRequest:
        if self.resume and self.stream is False:
            raise ValueError("resume goes on with a stream: leave out stream, or send the request without resume")
        return self

    @model_validator(mode="before")
    @classmethod
    def _default_prompt(cls, body: Any) -> Any:
        if isinstance(body, dict) and "prompt" not in body and body.get("source") is not None:
            return {**body, "prompt": ""}
        return body

    @property
    def generation_request(self) -> GenerationRequest:
        """The generation request."""
        request = self.to_generation_request(
            self.prompt,
            max_tokens=_DEFAULT_MAX_TOKENS,
            source=self.source,
            include_stop=bool(self.include_stop),
            is_streamed=self.stream is not False,
        )
        return resumed(request, self.resume.receipt, self.resume.choices) if self.resume else request


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
router = APIRouter(responses=declared(400, 401, 404, 413, 415, 429, 500, 503, 504))


@router.post("/complete", openapi_extra=documented(schemas.CompleteResponse, CompleteRequest, _EXAMPLES))
async def complete(request: Request) -> Response:
    """Continue a prompt. Streams server-sent events (start, queue, token, done, error) unless "stream" is false."""
    body = await read_body(request, CompleteRequest)
    handle = await RequestHandle.begin(request, body.generation_request)
    extra = {"user": body.user, "request_id": body.request_id, "truncated": handle.admitted.truncated or None}
    if body.stream is False:
        return await handle.respond(_full_response(handle, extra), request)
    limit, resume_store = handle.service.settings.resume_bytes, resume_store_of(request)
    after = body.resume.after if body.resume else None
    stream = ResumableStream(
        handle, resume_store, owner=owner_of(request), extra=extra, replay_bytes=limit, after=after
    )
    return _respond(stream, stream.next_number)


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
    stream.admit_reconnection(tenant_of(request))
    return _respond(stream, number)


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


def _respond(stream: ResumableStream, number: int) -> Response:
    connection = Connection()
    stream.attach(connection)
    return EventStreamResponse(
        partial(stream.frames_from, number, connection), lambda: stream.detach(connection), stream.headers
    )


async def _full_response(handle: RequestHandle, extra: dict[str, Any]) -> schemas.CompleteResponse:
    """The response as one object. Raises EngineError."""
    outputs = await handle.collect()
    admitted = handle.admitted
    wants_logprobs, wants_ids = admitted.request.logprobs is not None, admitted.request.returns_token_ids
    choices = [
        schemas.Choice(
            index=output.finished.index,
            finish_reason=output.finished.finish_reason,
            stop_reason=output.finished.stop_reason,
            text=output.text,
            tokens=schemas.token_array(admitted.tokenizer, output.tokens) if wants_logprobs else None,
            token_ids=handle.completion.generated(output.finished.index) if wants_ids else None,
        )
        for output in outputs
    ]
    return schemas.CompleteResponse(
        id=handle.name,
        model=admitted.instance.model_name,
        choices=choices,
        usage=schemas.Usage.of(handle.completion),
        timings=schemas.Timings.of(handle.completion),
        receipt=schemas.Receipt.of(admitted),
        **extra,
    )
