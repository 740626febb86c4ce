"""OpenAI-compatible responses: one JSON object or data-only frames, log-probabilities, usage, warnings."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from app.api.delivery import Connection, Delivery
from app.api.openai.schemas import LegacyLogprobs, OpenAIChunk, OpenAIFields, OpenAIResponse
from app.api.request_handle import RequestHandle
from app.api.schemas import Usage, top_token
from app.common.fault_injection import fault
from app.generation.collector import CollectedOutput
from app.generation.receipt import fingerprint
from app.generation.request import CompletionEvent, Delta, Finished, TokenDetail, TokenTable
from app.http import sse
from app.http.event_stream_response import EventStreamResponse
from app.http.json_stream import LazyArray
from app.http.response_model import NOT_SENT, ResponseModel
from model.tokenizer.tokenizer import Tokenizer

_HOLE = f"hole-{secrets.token_hex(16)}"
"""A text that no client can send on purpose: `user` may be any text."""
_HOLE_JSON = f'"{_HOLE}"'


def _around_holes(model: ResponseModel) -> list[str]:
    """The JSON before, between and after the fields that are _HOLE."""
    return sse.ascii_json(model).split(_HOLE_JSON)


def legacy_logprobs(tokenizer: Tokenizer, details: Sequence[TokenDetail]) -> LegacyLogprobs:
    """Log-probabilities of a chunk."""
    return LegacyLogprobs(*[[value(tokenizer, detail) for detail in details] for value in _COLUMNS])


def lazy_legacy_logprobs(tokenizer: Tokenizer, details: TokenTable) -> LegacyLogprobs:
    """Log-probabilities of a whole response, computed while it is sent."""

    def column(value: _Column) -> LazyArray[Any]:
        return LazyArray(lambda: ([value(tokenizer, detail)] for detail in details))

    return LegacyLogprobs(*map(column, _COLUMNS))


def name_of(tokenizer: Tokenizer, token: int) -> str:
    """A token's text if its bytes are valid UTF-8; otherwise its bytes, or its name in the vocabulary."""
    data = tokenizer.token_bytes(token)
    try:
        if data:
            return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return tokenizer.piece(token) or f"token:{token}"


def split_by_token(delta: Delta) -> Iterator[Delta]:
    """Splits a delta by token; a token that completes no character is joined with the next one that does."""
    if len(delta.tokens) < 2:
        yield delta
        return
    pending: list[TokenDetail] = []
    start = 0
    for token, next_token in zip(delta.tokens, [*delta.tokens[1:], None], strict=True):
        pending.append(token)
        end = len(delta.text) if next_token is None else min(len(delta.text), next_token.offset - delta.start)
        if next_token is None or start < end < len(delta.text):
            ids = delta.ids if next_token is None else ()
            yield Delta(delta.index, delta.text[start:end], tuple(pending), delta.start + start, ids)
            start, pending = end, []


def _top_by_name(tokenizer: Tokenizer, detail: TokenDetail) -> dict[str, float | None]:
    """The most likely tokens, always including the chosen one; if two share a name, the likelier one gets it."""
    named = {name_of(tokenizer, detail.id): detail.logprob}
    others: dict[str, float | None] = {}
    for token, logprob in detail.top:
        name = name_of(tokenizer, token)
        is_taken = name in others or (name in named and token != detail.id)
        others[f"token:{token}" if is_taken else name] = logprob
    return others | named


_Column = Callable[[Tokenizer, TokenDetail], Any]
_COLUMNS: Sequence[_Column] = (
    lambda tokenizer, detail: name_of(tokenizer, detail.id),
    lambda _, detail: detail.logprob,
    lambda tokenizer, detail: None if detail.logprob is None else _top_by_name(tokenizer, detail),
    lambda _, detail: detail.offset,
    lambda tokenizer, detail: [top_token(tokenizer, token, logprob) for token, logprob in detail.top],
)
"""The entry of a token in each field of LegacyLogprobs."""


PING_SECONDS = 15.0
_PING, _DONE = b": ping\n", b"data: [DONE]\n\n"


def _frame(data: ResponseModel | dict[str, Any]) -> bytes:
    return f"data: {sse.ascii_json(data)}\n\n".encode("ascii")


def common_fields(handle: RequestHandle, prefix: str, kind: str) -> dict[str, Any]:
    """The leading fields of the response and of every chunk."""
    return {
        "id": f"{prefix}-{handle.name.removeprefix('req-')}",
        "object": kind,
        "created": int(time.time()),
        "model": handle.admitted.instance.model_name,
        "system_fingerprint": fingerprint(handle.admitted.model_version, handle.admitted.numerics),
        "seed": handle.admitted.params.seed,
    }


class Responder(Delivery):
    """Writes one request's response; subclasses define the format of a choice."""

    response_type: type[OpenAIResponse]
    chunk_type: type[OpenAIChunk] = OpenAIChunk

    def __init__(self, handle: RequestHandle, body: OpenAIFields, head: dict[str, Any]) -> None:
        super().__init__(handle)
        self.started: set[int] = set()
        """Choices with an encoded chunk."""
        self._stream = bool(body.stream)
        options = body.stream_options
        self._includes_usage = bool(options and options.include_usage)
        self._has_continuous_usage = bool(options and options.continuous_usage_stats)
        self._pending: dict[int, Delta] = {}
        """By choice: tokens and ids without text, which are sent with the next text, or with the end."""
        resumption = handle.admitted.request.resumption
        received = resumption.choices if resumption else ()
        self._arrived_ends = {index for index, choice in enumerate(received) if choice.is_finished}
        """Choices whose end the client had when it resumed the response."""
        self._head = head
        echoed = {"user": body.user, "request_id": body.request_id, "truncated": handle.admitted.truncated or None}
        self._extra: dict[str, Any] = {**echoed, "warnings": body.warnings or None}
        usage: Any = _HOLE if self._has_continuous_usage else None if self._includes_usage else NOT_SENT
        before, *self._after = _around_holes(self.chunk_type(**head, choices=[_HOLE], **self._extra, usage=usage))
        self._before = f"data: {before}"
        """What comes before the choice in a chunk; `_after` is what comes after it, in two parts around the usage."""
        self._around_texts: dict[int, tuple[str, str]] = {}
        """What comes before and after the text in a chunk with this choice, from its second chunk on."""

    def full_choice(self, index: int, output: CollectedOutput) -> ResponseModel:
        """A choice of a non-streaming response; large parts are encoded lazily."""
        raise NotImplementedError

    def chunk_choice(self, delta: Delta, finished: Finished | None) -> ResponseModel:
        """A choice's part in a chunk."""
        raise NotImplementedError

    async def respond(self, request: Request) -> Response:
        """Sends the response and ends the request."""
        if self._stream:
            self.attach(connection := Connection())
            return EventStreamResponse(partial(self.frames, connection), self.handle.end, self.handle.headers)
        return await self.handle.respond(self._full_response(), request)

    async def _full_response(self) -> OpenAIResponse:
        """The response as one object. Raises EngineError."""
        outputs = self._select_best(await self.handle.collect())
        choices = [self.full_choice(i, output) for i, output in enumerate(outputs)]
        return self.response_type(**self._head, choices=choices, usage=Usage.of(self.completion), **self._extra)

    def encode_end(self) -> bytes:
        """The chunk with the usage, if the client asked for it, and `[DONE]`."""
        if not self._includes_usage:
            return _DONE
        usage = Usage.of(self.completion)
        return _frame(OpenAIResponse(**self._head, choices=[], usage=usage, **self._extra)) + _DONE

    def encode_error(self, body: dict[str, Any]) -> bytes:
        """The error as a chunk, and `[DONE]`."""
        return _frame(body) + _DONE

    def encode(self, event: CompletionEvent) -> bytes:
        """The chunks of an event; tokens without text are sent with the next text, or with the end."""
        if isinstance(event, Finished):
            if event.index in self._arrived_ends:
                return b""
            return self._chunk(self._pending.pop(event.index, Delta(event.index, "")), event)
        if not isinstance(event, Delta):  # no client knows of queues; a proxy must see that the connection lives
            return _PING if time.monotonic() - self.written_at >= PING_SECONDS else b""
        if not (event.tokens or event.ids or self._pending):  # nearly all events
            return self._chunk(event)
        pending = self._pending.pop(event.index, None)
        if pending:
            tokens, ids = pending.tokens + event.tokens, pending.ids + event.ids
            event = Delta(event.index, event.text, tokens, event.start, ids)
        if not event.text:
            self._pending[event.index] = event
            return b""
        return b"".join(map(self._chunk, split_by_token(event)))

    def _chunk(self, delta: Delta, finished: Finished | None = None) -> bytes:
        """A chunk with one choice. That of a text alone takes a tenth of the time: only the text is encoded."""
        index = delta.index
        after = self._after[0]
        if self._has_continuous_usage:
            after = f"{after}{sse.ascii_json(Usage.of(self.completion))}{self._after[1]}"
        if index in self._around_texts and not (delta.tokens or delta.ids or finished):
            start, end = self._around_texts[index]
            return f"{start}{sse.quoted(delta.text)}{end}{after}\n\n".encode("ascii")
        fault("api.chunk", self._extra)
        choice = sse.ascii_json(self.chunk_choice(delta, finished))
        self.started.add(index)
        if index not in self._around_texts and not finished:
            start, end = _around_holes(self.chunk_choice(Delta(index, _HOLE), None))
            self._around_texts[index] = f"{self._before}{start}", end
        return f"{self._before}{choice}{after}\n\n".encode("ascii")

    def _select_best(self, outputs: list[CollectedOutput]) -> list[CollectedOutput]:
        """The n continuations of each prompt with the best mean log-probability of their tokens."""
        request, choices = self.handle.admitted.request, self.completion.choices
        if not request.is_ranked:
            return outputs
        best = []
        for start in range(0, len(outputs), request.n_sampled):
            indices = range(start, start + request.n_sampled)
            ranked = sorted(indices, key=lambda index: -choices[index].mean_logprob)
            best += [outputs[index] for index in ranked[: request.n]]
        return best
