"""OpenAI-compatible responses: one JSON object or data-only frames, log-probabilities, usage, warnings."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from app.api.request_handle import CollectedOutput, RequestHandle
from app.api.response_schemas import echoed, piece
from app.common.event_loop import TimeSlice
from app.common.fault_injection import fault
from app.generation.request import CompletionEvent, Delta, Finished, TokenDetail, TokenTable
from app.http import sse
from app.http.json_stream import Elements
from model.tokenizer.tokenizer import Tokenizer

NOT_ENDED = '"logprobs": null, "finish_reason": null, "stop_reason": null}'
"""The end of an unfinished choice without log-probabilities."""


def frame(data: Mapping[str, Any]) -> bytes:
    """One frame. The JSON is ASCII, because some clients treat U+2028 as a line end."""
    return f"data: {json.dumps(data)}\n\n".encode("ascii")


class ChunkWriter:
    """Encodes chunks of one choice each, with the fields of `head` before it and those of `extra` after it."""

    def __init__(self, head: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self._before = f'data: {json.dumps(head)[:-1]}, "choices": ['
        self._behind = "]" + "".join(f", {json.dumps(name)}: {json.dumps(value)}" for name, value in extra.items())

    def chunk(self, choice: str, more: str = "") -> bytes:
        """A chunk with this choice, which is encoded JSON; `more` is appended, with a leading comma."""
        return f"{self._before}{choice}{self._behind}{more}}}\n\n".encode("ascii")


def logprobs(tokenizer: Tokenizer, details: Iterable[TokenDetail]) -> dict[str, list[Any]]:
    """`tokens`, `token_logprobs`, `top_logprobs`, `text_offset`; and `top_tokens`, where no two tokens share a name."""
    details = list(details)
    return {name: [value(tokenizer, detail) for detail in details] for name, value in _COLUMNS.items()}


def logprob_elements(tokenizer: Tokenizer, details: TokenTable) -> dict[str, Elements]:
    """logprobs(), computed lazily while it is sent."""

    def column(value: _Column) -> Elements:
        return Elements(lambda: ([value(tokenizer, detail)] for detail in details))

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


def one_by_one(delta: Delta) -> Iterator[Delta]:
    """Splits a delta by token; a token that completes no character is joined with the next one that does."""
    if len(delta.tokens) < 2:
        yield delta
        return
    waiting: list[TokenDetail] = []
    start, base = 0, delta.tokens[0].offset
    for token, following in zip(delta.tokens, [*delta.tokens[1:], None], strict=True):
        waiting.append(token)
        end = len(delta.text) if following is None else min(len(delta.text), following.offset - base)
        if following is None or start < end < len(delta.text):
            yield Delta(delta.index, delta.text[start:end], tuple(waiting))
            start, waiting = end, []


def _top_by_name(tokenizer: Tokenizer, detail: TokenDetail) -> dict[str, float | None]:
    """The most likely tokens, always including the chosen one; if two share a name, the likelier one gets it."""
    named = {name_of(tokenizer, detail.id): detail.logprob}
    others: dict[str, float | None] = {}
    for token, logprob in detail.top:
        name = name_of(tokenizer, token)
        taken = name in others or (name in named and token != detail.id)
        others[f"token:{token}" if taken else name] = logprob
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


class StreamOptions(BaseModel):
    """What a stream reports besides its text."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = Field(None, description="A last chunk with the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="The usage so far in every chunk.")


class OpenAIBody(Protocol):
    """Fields that all OpenAI-compatible requests share."""

    stream: bool | None
    stream_options: StreamOptions | None
    user: str | None
    request_id: str | None

    @property
    def warnings(self) -> list[str]:
        """Fields that were sent and have no effect."""
        ...


def head_of(job: RequestHandle, prefix: str, kind: str) -> dict[str, Any]:
    """The leading fields of a response and of every chunk."""
    return {
        "id": f"{prefix}-{job.name.removeprefix('req-')}",
        "object": kind,
        "created": int(time.time()),
        "model": job.admitted.instance.model_name,
        "system_fingerprint": f"{job.admitted.weights_version[:16]}-{job.admitted.numerics}",
        "seed": job.admitted.params.seed,
    }


class Responder:
    """Writes one request's response; subclasses define the format of a choice."""

    def __init__(self, job: RequestHandle, body: OpenAIBody, head: dict[str, Any]) -> None:
        self.job = job
        self._stream = bool(body.stream)
        options = body.stream_options
        self._tells_usage = bool(options and options.include_usage)
        self._keeps_telling_usage = bool(options and options.continuous_usage_stats)
        self._is_over = False
        self._pending: dict[int, tuple[TokenDetail, ...]] = {}
        self._head = head
        self._extra: dict[str, Any] = {**echoed(body)}
        if job.admitted.truncated:
            self._extra["truncated"] = True
        if body.warnings:
            self._extra["warnings"] = body.warnings
        self._chunks = ChunkWriter(head, self._extra)

    def whole_choice(self, index: int, one: CollectedOutput) -> dict[str, Any]:
        """A choice of a non-streaming response; large parts are encoded lazily (json_stream.Elements)."""
        raise NotImplementedError

    def part_of_choice(
        self, index: int, text: str, tokens: Sequence[TokenDetail], ended: Finished | None
    ) -> dict[str, Any]:
        """A choice's part in a chunk."""
        raise NotImplementedError

    def text_of_choice(self, index: int, text: str) -> str:
        """part_of_choice() without tokens and finish reason, as JSON; nearly all chunks are of this kind."""
        raise NotImplementedError

    async def respond(self, request: Request) -> Response:
        """Sends the response, which ends the job."""
        if self._stream:
            return sse.EventStreamResponse(self._frames(), self.job.close, self.job.headers)
        return await self.job.respond(self._whole(), request)

    async def _whole(self) -> dict[str, Any]:
        """The response as one object. Raises EngineError."""
        collected = self._best(await self.job.collect())
        choices = [self.whole_choice(i, one) for i, one in enumerate(collected)]
        return {**self._head, "choices": choices, "usage": self.job.completion.usage(), **self._extra}

    async def _frames(self) -> AsyncIterator[bytes]:
        """Data-only frames, with heartbeats during long silence, and `[DONE]` at the end."""
        last = time.monotonic()
        while not self._is_over:
            if frames := await self._next():
                yield frames
                last = time.monotonic()
            elif time.monotonic() - last >= PING_SECONDS:
                yield b": ping\n"
                last = time.monotonic()
        yield b"data: [DONE]\n\n"

    async def _next(self) -> bytes:
        """Encodes all pending events, up to a time slice; empty if there are none."""
        completion = self.job.completion
        frames: list[bytes] = []
        try:
            await completion.wait_event()
            breather = TimeSlice()
            while completion.has_event and not (frames and breather.is_due):
                frames.append(self._written(completion.next_event()))
            self._is_over = completion.is_done
            if self._is_over and self._tells_usage:
                frames.append(frame({**self._head, "choices": [], "usage": completion.usage(), **self._extra}))
        except Exception as error:
            self._is_over = True
            frames.append(frame(self.job.failure(error).body(self.job.name)))
        return b"".join(frames)

    def _written(self, news: CompletionEvent) -> bytes:
        self.job.note(news)
        if isinstance(news, Finished):
            return self._chunk(news.index, "", self._pending.pop(news.index, ()), news)
        if not isinstance(news, Delta):
            return b""
        tokens = (*self._pending.pop(news.index, ()), *news.tokens)
        if not news.text:  # tokens without text are sent with the next text, or with the end
            self._pending[news.index] = tokens
            return b""
        parts = one_by_one(Delta(news.index, news.text, tokens))
        return b"".join([self._chunk(part.index, part.text, part.tokens) for part in parts])

    def _chunk(self, index: int, text: str, tokens: Sequence[TokenDetail], ended: Finished | None = None) -> bytes:
        if tokens or ended:
            fault("api.chunk", self._extra)
            choice = json.dumps(self.part_of_choice(index, text, tokens, ended))
        else:
            choice = self.text_of_choice(index, text)
        if self._keeps_telling_usage:
            return self._chunks.chunk(choice, f', "usage": {json.dumps(self.job.completion.usage())}')
        return self._chunks.chunk(choice, ', "usage": null' if self._tells_usage else "")

    def _best(self, collected: list[CollectedOutput]) -> list[CollectedOutput]:
        """The n best continuations of each prompt, by the mean log-probability of their tokens."""
        wish, choices = self.job.admitted.request, self.job.completion.choices
        if not wish.is_ranked:
            return collected
        best = []
        for start in range(0, len(collected), wish.n_sampled):
            places = range(start, start + wish.n_sampled)
            ranked = sorted(places, key=lambda place: -choices[place].mean_logprob)
            best += [collected[place] for place in ranked[: wish.n]]
        return best
