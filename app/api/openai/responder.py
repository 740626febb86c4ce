"""OpenAI-compatible responses: one JSON object or data-only frames, log-probabilities, usage, warnings."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from app.api.openai.schemas import OpenAIFields
from app.api.request_handle import CollectedOutput, RequestHandle
from app.api.schemas import echoed_fields, piece
from app.common.event_loop import TimeSlice
from app.common.fault_injection import fault
from app.generation.request import CompletionEvent, Delta, Finished, TokenDetail, TokenTable
from app.http import sse
from app.http.json_stream import LazyArray
from model.tokenizer.tokenizer import Tokenizer

UNFINISHED_SUFFIX = '"logprobs": null, "finish_reason": null, "stop_reason": null}'
"""Closes the JSON of an unfinished choice without log-probabilities."""


def frame(data: Mapping[str, Any]) -> bytes:
    """One frame. The JSON is ASCII, because some clients treat U+2028 as a line end."""
    return f"data: {json.dumps(data)}\n\n".encode("ascii")


class ChunkWriter:
    """Encodes chunks with one choice each: the fields of `head` come before it, those of `extra` after it."""

    def __init__(self, head: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self._before = f'data: {json.dumps(head)[:-1]}, "choices": ['
        self._after = "]" + "".join(f", {json.dumps(name)}: {json.dumps(value)}" for name, value in extra.items())

    def chunk(self, choice: str, more: str = "") -> bytes:
        """A chunk with this choice, which is encoded JSON; `more` is appended and starts with a comma."""
        return f"{self._before}{choice}{self._after}{more}}}\n\n".encode("ascii")


def token_logprobs(tokenizer: Tokenizer, details: Iterable[TokenDetail]) -> dict[str, list[Any]]:
    """`tokens`, `token_logprobs`, `top_logprobs`, `text_offset`; and `top_tokens`, which keeps tokens of equal text."""
    details = list(details)
    return {name: [value(tokenizer, detail) for detail in details] for name, value in _COLUMNS.items()}


def logprob_elements(tokenizer: Tokenizer, details: TokenTable) -> dict[str, LazyArray]:
    """token_logprobs(), computed lazily while it is sent."""

    def column(value: _Column) -> LazyArray:
        return LazyArray(lambda: ([value(tokenizer, detail)] for detail in details))

    return {name: column(value) for name, value in _COLUMNS.items()}


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
    start, base = 0, delta.tokens[0].offset
    for token, next_token in zip(delta.tokens, [*delta.tokens[1:], None], strict=True):
        pending.append(token)
        end = len(delta.text) if next_token is None else min(len(delta.text), next_token.offset - base)
        if next_token is None or start < end < len(delta.text):
            yield Delta(delta.index, delta.text[start:end], tuple(pending))
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
_COLUMNS: Mapping[str, _Column] = {
    "tokens": lambda tokenizer, detail: name_of(tokenizer, detail.id),
    "token_logprobs": lambda _, detail: detail.logprob,
    "top_logprobs": lambda tokenizer, detail: None if detail.logprob is None else _top_by_name(tokenizer, detail),
    "text_offset": lambda _, detail: detail.offset,
    "top_tokens": lambda tokenizer, detail: [piece(tokenizer, token, logprob) for token, logprob in detail.top],
}


PING_SECONDS = 15.0


def common_fields(handle: RequestHandle, prefix: str, kind: str) -> dict[str, Any]:
    """The leading fields of a response and of every chunk."""
    return {
        "id": f"{prefix}-{handle.name.removeprefix('req-')}",
        "object": kind,
        "created": int(time.time()),
        "model": handle.admitted.instance.model_name,
        "system_fingerprint": f"{handle.admitted.weights_version[:16]}-{handle.admitted.numerics}",
        "seed": handle.admitted.params.seed,
    }


class Responder:
    """Writes one request's response; subclasses define the format of a choice."""

    def __init__(self, handle: RequestHandle, body: OpenAIFields, head: dict[str, Any]) -> None:
        self.handle = handle
        self._stream = bool(body.stream)
        options = body.stream_options
        self._includes_usage = bool(options and options.include_usage)
        self._has_continuous_usage = bool(options and options.continuous_usage_stats)
        self._is_done = False
        self._pending: dict[int, tuple[TokenDetail, ...]] = {}
        self._head = head
        self._extra: dict[str, Any] = {**echoed_fields(body)}
        if handle.admitted.truncated:
            self._extra["truncated"] = True
        if body.warnings:
            self._extra["warnings"] = body.warnings
        self._chunks = ChunkWriter(head, self._extra)

    def full_choice(self, index: int, output: CollectedOutput) -> dict[str, Any]:
        """A choice of a non-streaming response; large parts are encoded lazily (json_stream.Elements)."""
        raise NotImplementedError

    def chunk_choice(
        self, index: int, text: str, tokens: Sequence[TokenDetail], finished: Finished | None
    ) -> dict[str, Any]:
        """A choice's part in a chunk."""
        raise NotImplementedError

    def encode_text_chunk(self, index: int, text: str) -> str:
        """chunk_choice() without tokens and finish reason, as JSON; nearly all chunks are of this kind."""
        raise NotImplementedError

    async def respond(self, request: Request) -> Response:
        """Sends the response and ends the request."""
        if self._stream:
            return sse.EventStreamResponse(self._frames(), self.handle.close, self.handle.headers)
        return await self.handle.respond(self._full_response(), request)

    async def _full_response(self) -> dict[str, Any]:
        """The response as one object. Raises EngineError."""
        outputs = self._select_best(await self.handle.collect())
        choices = [self.full_choice(i, output) for i, output in enumerate(outputs)]
        return {**self._head, "choices": choices, "usage": self.handle.session.usage(), **self._extra}

    async def _frames(self) -> AsyncIterator[bytes]:
        """Data-only frames, with heartbeats when there is no output for long, and `[DONE]` at the end."""
        last = time.monotonic()
        while not self._is_done:
            if frames := await self._next():
                yield frames
                last = time.monotonic()
            elif time.monotonic() - last >= PING_SECONDS:
                yield b": ping\n"
                last = time.monotonic()
        yield b"data: [DONE]\n\n"

    async def _next(self) -> bytes:
        """Encodes all pending events, up to a time slice; empty if there are none."""
        session = self.handle.session
        frames: list[bytes] = []
        try:
            await session.wait_event()
            time_slice = TimeSlice()
            while session.has_event and not (frames and time_slice.is_due):
                frames.append(self._encode(session.next_event()))
            self._is_done = session.is_done
            if self._is_done and self._includes_usage:
                frames.append(frame({**self._head, "choices": [], "usage": session.usage(), **self._extra}))
        except Exception as error:
            self._is_done = True
            frames.append(frame(self.handle.on_error(error).body(self.handle.name)))
        return b"".join(frames)

    def _encode(self, event: CompletionEvent) -> bytes:
        self.handle.record_event(event)
        if isinstance(event, Finished):
            return self._chunk(event.index, "", self._pending.pop(event.index, ()), event)
        if not isinstance(event, Delta):
            return b""
        tokens = (*self._pending.pop(event.index, ()), *event.tokens)
        if not event.text:  # tokens without text are sent with the next text, or with the end
            self._pending[event.index] = tokens
            return b""
        parts = split_by_token(Delta(event.index, event.text, tokens))
        return b"".join([self._chunk(part.index, part.text, part.tokens) for part in parts])

    def _chunk(self, index: int, text: str, tokens: Sequence[TokenDetail], finished: Finished | None = None) -> bytes:
        if tokens or finished:
            fault("api.chunk", self._extra)
            choice = json.dumps(self.chunk_choice(index, text, tokens, finished))
        else:
            choice = self.encode_text_chunk(index, text)
        if self._has_continuous_usage:
            return self._chunks.chunk(choice, f', "usage": {json.dumps(self.handle.session.usage())}')
        return self._chunks.chunk(choice, ', "usage": null' if self._includes_usage else "")

    def _select_best(self, outputs: list[CollectedOutput]) -> list[CollectedOutput]:
        """The n continuations of each prompt with the best mean log-probability of their tokens."""
        request, choices = self.handle.admitted.request, self.handle.session.choices
        if not request.is_ranked:
            return outputs
        best = []
        for start in range(0, len(outputs), request.n_sampled):
            indices = range(start, start + request.n_sampled)
            ranked = sorted(indices, key=lambda index: -choices[index].mean_logprob)
            best += [outputs[index] for index in ranked[: request.n]]
        return best
