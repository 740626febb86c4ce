"""Resumable event stream of the native completion API."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from app.api import serializers
from app.api.request_handle import RequestHandle
from app.api.resume_store import ReplayBuffer, ResumeStore
from app.common.event_loop import TimeSlice
from app.generation.request import Delta, Finished, Heartbeat, News, Queued, Started
from app.http import sse
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
        self._receipt = serializers.receipt(job.admitted)
        self._journal = ReplayBuffer(journal_bytes)
        self._ends: dict[int, Finished] = {}
        self.is_finished = self._paused = False
        self._reader: Subscription | None = None
        shelf.put(self)

    def attach(self) -> Subscription:
        """Subscribes a connection. Raises Unavailable or ApiError if the completion cannot be resumed."""
        if self._paused and self._job.completion.stream.is_open:
            if self._job.admitted.served.is_closed:
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
            if not completion.is_over and not await completion.ready():
                return b""
            breather = TimeSlice()
            while reader is self._reader and completion.has_news and not (frames and breather.is_due):
                news = completion.take()
                self._job.note(news)
                frames.append(sse.PING if isinstance(news, Heartbeat) else self._written(news))
        except Exception as error:
            self.is_finished = True
            frames.append(self._kept("error", self._job.failure(error).body(self.name)))
        return b"".join(frames)

    def _written(self, news: News) -> bytes:
        match news:
            case Delta(index, text, details):
                if not details:
                    return self._journal.append(sse.text_event(index, text, self._next_id))
                tokens = serializers.tokens(self._job.admitted.tokenizer, details)
                return self._kept("token", {"index": index, "text": text, "tokens": tokens})
            case Queued(position):
                eta_ms = round(self._job.engine.queue.eta_seconds(position, time.monotonic()) * 1e3)
                return self._kept("queue", {"position": position, "eta_ms": eta_ms})
            case Started():
                return self._kept("start", self._start())
            case Finished(index):
                self._ends[index] = news
                if self._job.completion.is_over:
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
            "model": self._job.admitted.served.model_name,
            "weights_version": self._receipt["weights_version"],
            "seed": self._receipt["seed"],
            "prompt_tokens": self._job.completion.prompt_tokens,
            "cached_tokens": self._job.completion.cached_tokens,
            "settings": self._receipt["settings"],
            **self._extra,
        }

    def _done(self) -> dict[str, Any]:
        return {
            "choices": [serializers.choice(self._ends[index]) for index in sorted(self._ends)],
            "usage": self._job.completion.usage(),
            "timings": self._job.completion.timings(),
            "receipt": self._receipt,
        }
