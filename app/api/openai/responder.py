"""Writes OpenAI-compatible answers: one JSON object or data-only frames, log-probabilities, usage, warnings."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from app.api.request_handle import CollectedOutput, RequestHandle
from app.api.serializers import echoed, piece
from app.common.event_loop import TimeSlice
from app.common.fault_injection import fault
from app.generation.request import Delta, Finished, News, TokenDetail
from app.generation.token_table import TokenTable
from app.http import sse
from app.http.json_stream import Elements
from model.tokenizer.tokenizer import Tokenizer

NOT_ENDED = '"logprobs": null, "finish_reason": null, "stop_reason": null}'
"""The end of a choice that goes on and was not asked for log-probabilities."""


def frame(data: Mapping[str, Any]) -> bytes:
    """One frame. The JSON is ASCII: some clients take U+2028 for the end of a line."""
    return f"data: {json.dumps(data)}\n\n".encode("ascii")


class ChunkWriter:
    """Writes chunks that begin with `head` and end with `extra`, each with one choice between them."""

    def __init__(self, head: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        self._before = f'data: {json.dumps(head)[:-1]}, "choices": ['
        self._behind = "]" + "".join(f", {json.dumps(name)}: {json.dumps(value)}" for name, value in extra.items())

    def chunk(self, choice: str, more: str = "") -> bytes:
        """A chunk with this choice, which is JSON already; `more` stands at its end, comma first."""
        return f"{self._before}{choice}{self._behind}{more}}}\n\n".encode("ascii")


def logprobs(tokenizer: Tokenizer, details: Iterable[TokenDetail]) -> dict[str, list[Any]]:
    """`tokens`, `token_logprobs`, `top_logprobs`, `text_offset`; and `top_tokens`, where no two tokens share a name."""
    details = list(details)
    return {name: [value(tokenizer, detail) for detail in details] for name, value in _COLUMNS.items()}


def logprob_elements(tokenizer: Tokenizer, details: TokenTable) -> dict[str, Elements]:
    """logprobs(), made while it is written."""

    def column(value: _Column) -> Elements:
        return Elements(lambda: ([value(tokenizer, detail)] for detail in details))

    return {name: column(value) for name, value in _COLUMNS.items()}


def name_of(tokenizer: Tokenizer, token: int) -> str:
    """A token as text, where its bytes are some; else the bytes, or how the vocabulary writes it."""
    data = tokenizer.token_bytes(token)
    try:
        if data:
            return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return tokenizer.piece(token) or f"token:{token}"


def one_by_one(delta: Delta) -> Iterator[Delta]:
    """The delta in pieces of one token each; a token that completes no character goes with the next that does."""
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
    """The most likely tokens, the chosen one always among them; a name that two tokens share goes to the likelier."""
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
    """What a stream tells beside its text."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = Field(None, description="A last chunk with the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="The usage so far in every chunk.")


class OpenAIBody(Protocol):
    """What every request of these doors may say."""

    stream: bool | None
    stream_options: StreamOptions | None
    user: str | None
    request_id: str | None

    @property
    def warnings(self) -> list[str]:
        """What was sent and has no effect."""
        ...


def head_of(job: RequestHandle, prefix: str, kind: str) -> dict[str, Any]:
    """What stands at the beginning of an answer and of every chunk."""
    return {
        "id": f"{prefix}-{job.name.removeprefix('req-')}",
        "object": kind,
        "created": int(time.time()),
        "model": job.admitted.served.model_name,
        "system_fingerprint": f"{job.admitted.weights_version[:16]}-{job.admitted.numerics}",
        "seed": job.admitted.params.seed,
    }


class Responder:
    """One request's answer; what a choice looks like is the door's own."""

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
        """A choice of an answer in one object; large parts are made while they are written (json_stream.Elements)."""
        raise NotImplementedError

    def part_of_choice(
        self, index: int, text: str, tokens: Sequence[TokenDetail], ended: Finished | None
    ) -> dict[str, Any]:
        """What a chunk tells of a choice."""
        raise NotImplementedError

    def text_of_choice(self, index: int, text: str) -> str:
        """part_of_choice() without tokens and end, as JSON; nearly all chunks are of this kind."""
        raise NotImplementedError

    async def respond(self, request: Request) -> Response:
        """The response; the job ends with it."""
        if self._stream:
            return sse.EventStreamResponse(self._frames(), self.job.close, self.job.headers)
        return await self.job.respond(self._whole(), request)

    async def _whole(self) -> dict[str, Any]:
        """The answer in one object. Raises EngineError."""
        collected = self._best(await self.job.collect())
        choices = [self.whole_choice(i, one) for i, one in enumerate(collected)]
        return {**self._head, "choices": choices, "usage": self.job.completion.usage(), **self._extra}

    async def _frames(self) -> AsyncIterator[bytes]:
        """Data-only frames; a sign of life after long silence; `[DONE]` in the end."""
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
        """Frames of all the news there is, but for what would keep others waiting; nothing where there is none."""
        completion = self.job.completion
        frames: list[bytes] = []
        try:
            await completion.ready()
            breather = TimeSlice()
            while completion.has_news and not (frames and breather.is_due):
                frames.append(self._written(completion.take()))
            self._is_over = completion.is_over
            if self._is_over and self._tells_usage:
                frames.append(frame({**self._head, "choices": [], "usage": completion.usage(), **self._extra}))
        except Exception as error:
            self._is_over = True
            frames.append(frame(self.job.failure(error).body(self.job.name)))
        return b"".join(frames)

    def _written(self, news: News) -> bytes:
        self.job.note(news)
        if isinstance(news, Finished):
            return self._chunk(news.index, "", self._pending.pop(news.index, ()), news)
        if not isinstance(news, Delta):
            return b""
        tokens = (*self._pending.pop(news.index, ()), *news.tokens)
        if not news.text:  # tokens without text go with the next that have some, or with the end
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
        """Of every prompt's continuations the n best, by the mean log-probability of their tokens."""
        wish, choices = self.job.admitted.wish, self.job.completion.choices
        if not wish.ranks:
            return collected
        best = []
        for start in range(0, len(collected), wish.n_drawn):
            places = range(start, start + wish.n_drawn)
            ranked = sorted(places, key=lambda place: -choices[place].mean_logprob)
            best += [collected[place] for place in ranked[: wish.n]]
        return best
