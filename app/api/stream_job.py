"""A streamed completion of the native door: its events, and the client that may lose them and come back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from app.api import shapes, sse
from app.api.job import Job
from app.api.shelf import Journal, Shelf
from app.news import Begun, Delta, Ended, Idle, News, Queued


class Connection:
    """One connection's hold on a stream; a newer one takes it over."""


class StreamJob:
    """Every frame is numbered and kept; one reader at a time gets them."""

    def __init__(self, job: Job, shelf: Shelf, *, owner: str, extra: Mapping[str, Any], journal_bytes: int) -> None:
        self.name = job.name
        self.owner = owner
        self._job = job
        self._shelf = shelf
        self._extra = extra
        self._receipt = shapes.receipt(job.admitted)
        self._journal = Journal(journal_bytes)
        self._ends: dict[int, Ended] = {}
        self.is_finished = self._paused = False
        self._reader: Connection | None = None
        shelf.put(self)

    def attach(self) -> Connection:
        """A connection wants the frames. Raises Unavailable where the engine cannot go on with a paused stream now."""
        if self._paused and self._job.completion.stream.is_open:
            self._job.service.require_ready()
            self._job.service.engine.resume(self._job.completion.stream)
            self._job.completion.go_on()
        self._paused = False
        self._shelf.come_back(self)
        self._reader = Connection()
        self._job.completion.stream.wake()
        return self._reader

    def detach(self, reader: Connection) -> None:
        """The connection is over: the engine is free at once; the client may come back for a while."""
        if reader is self._reader:
            self._reader = None
            if self.is_finished:
                self._job.close()
            else:
                self._paused = self._job.completion.stream.is_open
                self._job.completion.pause()
            self._shelf.leave(self)

    def cancel(self) -> bool:
        """Ends the text, and its reader is told so; False where it had ended already."""
        running = self._job.completion.stream.is_open
        self._job.completion.stream.cancel()
        if running:
            self._job.note_cancelled()
        return running

    def close(self) -> None:
        """Nobody comes back."""
        self._job.close()

    @property
    def next_number(self) -> int:
        """The number of the frame that comes next."""
        return self._journal.next_number

    def keeps(self, number: int) -> bool:
        """Whether the frames from this one on can be given again."""
        return self._journal.first <= number <= self._journal.next_number

    async def frames(self, reader: Connection, number: int = 0) -> AsyncIterator[bytes]:
        """The event stream from frame `number` on; ends with exactly one `done` or `error`."""
        while reader is self._reader:
            if number < self._journal.next_number:
                yield self._journal.frame(number)
                number += 1
            elif self.is_finished:
                return
            elif await self._next(reader):
                yield sse.PING

    async def _next(self, reader: Connection) -> bool:
        """Writes the next frame, if there is one; True where there is nothing but a sign of life."""
        completion = self._job.completion
        try:
            if not completion.is_over and not await completion.ready():
                return False
            if reader is not self._reader:
                return False
            news = completion.take()
            self._job.note(news)
            if isinstance(news, Idle):
                return True
            self._write(news)
        except Exception as error:
            self.is_finished = True
            self._append("error", self._job.failure(error).body(self.name))
        return False

    def _write(self, news: News) -> None:
        match news:
            case Queued(position):
                eta_ms = round(self._job.service.engine.queue.eta_seconds(position) * 1e3)
                self._append("queue", {"position": position, "eta_ms": eta_ms})
            case Begun():
                self._append("start", self._start())
            case Delta(index, text, details):
                tokenizer = self._job.admitted.tokenizer
                detail = {"tokens": shapes.tokens(tokenizer, details)} if details else {}
                self._append("token", {"index": index, "text": text, **detail})
            case Ended(index):
                self._ends[index] = news
                if self._job.completion.is_over:
                    self.is_finished = True
                    self._append("done", self._done())

    def _append(self, name: str, data: Mapping[str, Any]) -> None:
        self._journal.append(sse.event(name, data, f"{self.name}:{self._journal.next_number}"))

    def _start(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "model": self._job.service.model_name,
            "weights_version": self._receipt["weights_version"],
            "seed": self._receipt["seed"],
            "prompt_tokens": self._job.completion.prompt_tokens,
            "cached_tokens": self._job.completion.cached_tokens,
            "settings": self._receipt["settings"],
            **self._extra,
        }

    def _done(self) -> dict[str, Any]:
        return {
            "choices": [shapes.choice(self._ends[index]) for index in sorted(self._ends)],
            "usage": self._job.completion.usage(),
            "timings": self._job.completion.timings(),
            "receipt": self._receipt,
        }
