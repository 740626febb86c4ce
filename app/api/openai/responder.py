"""What OpenAI's doors have in common: one JSON object or data-only frames, usage, warnings. Knows no route."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from app.api.openai.chunk_writer import ChunkWriter, frame
from app.api.openai.serializers import one_by_one
from app.api.request_handle import CollectedOutput, RequestHandle
from app.api.serializers import echoed
from app.common.fault_injection import fault
from app.common.time_slice import TimeSlice
from app.generation.events import Delta, Finished, News, TokenDetail
from app.http import sse

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
