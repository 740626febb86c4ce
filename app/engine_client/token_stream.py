"""Token stream: the engine's events for the sequences of one response, on the event loop.

open --last item--> ended        pause(): cancels the open sequences; EnginePool.resume() submits them again
                                 suspended: the same, because the reader does not keep up; resumes once it does
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from app.common.errors import EngineError, EngineFailed
from app.common.types import PromptScores, Request, RequestStarted, SampledEvent

MAX_BUFFERED = 4096
"""Tokens and top log-probabilities that may be buffered for a busy reader: about 1.2 MB of plain tokens (300 bytes
each), or 0.6 MB of tokens with 20 log-probabilities (3 KB). That is many pages of text, so that streams are rarely
suspended: submitting one again costs the engine a prompt, which is mostly in its cache."""


class Cancelled(EngineError):
    """The request was cancelled (DELETE /complete/{id})."""


Item = RequestStarted | PromptScores | SampledEvent | EngineError


class Arrival(Struct, frozen=True, gc=False):
    """One item, for one of the stream's sequences. A msgspec struct, since there are thousands per second."""

    at: float
    """Monotonic seconds, by the clock of the engine's step."""
    choice: int
    """Index of the sequence in the stream."""
    item: Item


Writes = list[tuple[Callable[[bytes], object], bytes]]
"""Writes to sockets, as (function, data), which wait until every stream of a report is encoded. A write wakes the
client that reads the socket; it takes the core, and the caches with it, from the streams that are not encoded yet."""
Consumer = Callable[[Writes], bool]
"""Consumes what has arrived where it arrives, and adds what is to be written; it may take(), and must not raise.
Returns whether the reader need not wake."""


class TokenStream:
    """Owned by the event loop. cancel_sequence(), close(), cancel() and pause() cancel its sequences without waiting.

    The buffer is bounded: if more than MAX_BUFFERED is buffered and no reader awaits receive(), the stream is
    suspended. It never is while a reader awaits, even if much arrives at once because the event loop was busy.
    """

    __slots__ = (  # every token touches an instance that the caches have lost: a dict would be further misses
        *("requests", "crash_count", "n_suspensions", "incidents", "work_seconds", "engine", "is_suspended"),
        *("_cancel", "_position", "_suspend_in_pool", "_resume_in_pool", "_open", "_has_started", "_attempts"),
        *("_generated", "_scored", "_arrivals", "_n_buffered", "_is_awaited", "_consumer", "_arrived"),
    )

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        cancel: Callable[[Sequence[str]], None],
        position: Callable[[str], int | None],
        suspend: Callable[[TokenStream], None],
        resume: Callable[[TokenStream], None],
    ) -> None:
        """The callbacks are methods of the engine pool: EnginePool.new_stream() in engine_pool.py passes them."""
        self.requests = tuple(requests)
        self.crash_count = 0
        """Consecutive crashes in which it was in flight when it was released; for the engine client."""
        self.n_suspensions = 0
        """Times that it was suspended."""
        self.incidents: list[tuple[float, str]] = []
        """What interrupted it, with the time in monotonic seconds; for its trace."""
        self.work_seconds = 0.0
        """CPU time of its grammars outside the engine's steps."""
        self.engine: int | None = None
        """Engine that the latest of its requests was sent to; for the engine pool."""
        self._cancel, self._position, self._suspend_in_pool, self._resume_in_pool = cancel, position, suspend, resume
        self._open = {request.id: index for index, request in enumerate(requests)}
        self._has_started = False
        self._attempts = 1
        self._generated: list[list[int]] = [list(request.generated) for request in requests]
        self._scored = [request.scored for request in requests]
        self._arrivals: list[Arrival] = []
        self._n_buffered = 0
        """Tokens and top log-probabilities in `_arrivals`."""
        self.is_suspended = False
        """Whether it is suspended because its reader does not keep up."""
        self._is_awaited = False
        self._consumer: Consumer | None = None
        """That of the reader that awaits receive()."""
        self._arrived = asyncio.Event()

    @property
    def queue_position(self) -> int | None:
        """How many requests wait ahead of this stream's first; None once one of its requests runs, or all ended."""
        return None if self._has_started or not self._open else self._position(next(iter(self._open)))

    @property
    def is_open(self) -> bool:
        """Whether any sequence has not ended."""
        return bool(self._open)

    @property
    def open_ids(self) -> list[str]:
        """The requests that have not ended."""
        return list(self._open)

    @property
    def open_requests(self) -> list[Request]:
        """The original requests that have not ended."""
        return [self.requests[index] for index in self._open.values()]

    async def receive(self, consumer: Consumer | None = None) -> list[Arrival]:
        """Everything that has arrived; empty after wake().

        An error, or a SampledEvent with `finish`, is the last item of its sequence.

        consumer: called after each report with items for this stream, instead of waking the reader, which would cost
            more than the items.
        """
        self._is_awaited, self._consumer = True, consumer
        try:
            await self._arrived.wait()
        finally:
            self._is_awaited, self._consumer = False, None
        self._arrived.clear()
        return self.take()

    def take(self) -> list[Arrival]:
        """Everything that has arrived, without waiting."""
        arrivals, self._arrivals, self._n_buffered = self._arrivals, [], 0
        if self.is_suspended and self._open:
            self._resume_in_pool(self)
        return arrivals

    def wake(self) -> None:
        """Lets receive() return."""
        self._arrived.set()

    def cancel_sequence(self, index: int) -> None:
        """Cancels one sequence. A second call, or one after its end, does nothing."""
        request_id = next((name for name, other in self._open.items() if other == index), None)
        if request_id is not None:
            del self._open[request_id]
            self._cancel([request_id])

    def close(self) -> None:
        """Cancels the open sequences when the reader is done; idempotent."""
        names = list(self._open)
        self._open.clear()
        if names:
            self._cancel(names)

    def cancel(self) -> None:
        """Like close(), and ends the stream with a Cancelled error for its reader."""
        self.fail(Cancelled("the request was cancelled"), 0.0)

    def pause(self) -> None:
        """Cancels the open sequences in the engine; keeps what has arrived."""
        self.is_suspended = False
        if self._open:
            self._cancel(list(self._open))

    def renew(self) -> list[Request]:
        """The sequences that have not ended, as requests that continue from their last token; for the engine client.

        They get new ids, so that events that the engine sent before it was paused are not attributed to them.
        """
        self._attempts += 1
        # A suspended stream was admitted before: neither its queue timeout nor its Started event repeats.
        self._has_started, self.is_suspended = self.is_suspended, False
        self._open = {f"{self.requests[index].id}~{self._attempts}": index for index in self._open.values()}
        return [self.request(name) for name in self._open]

    def request(self, request_id: str) -> Request:
        """An open sequence as a request for an engine that has no state of it; for the engine client."""
        index = self._open[request_id]
        request, generated = self.requests[index], tuple(self._generated[index])
        if request_id == request.id and (generated, self._scored[index]) == (request.generated, request.scored):
            return request
        return replace(
            request,
            id=request_id,
            generated=generated,
            scored=self._scored[index],
            # Once it has generated tokens it needs no leader; before that it still waits for the prompt's scores.
            leader=None if generated else self._current_id(request.leader),
        )

    def progress(self, request_id: str) -> int:
        """Tokens generated and scored so far of an open sequence."""
        index = self._open[request_id]
        return len(self._generated[index]) + self._scored[index]

    def push(self, request_id: str, at: float, item: Item) -> None:
        """Adds an item; for the engine client, which then calls notify(). Items of an ended sequence are dropped."""
        index = self._open.get(request_id)
        if index is None:
            return
        if isinstance(item, SampledEvent):  # first, since nearly all are
            if item.token is not None:
                self._generated[index].append(item.token)
            if item.finish:
                del self._open[request_id]
            self._n_buffered += 1 + len(item.top)
            if self._n_buffered > MAX_BUFFERED:
                self._suspend()
        elif isinstance(item, RequestStarted):
            self._has_started = True
        elif isinstance(item, PromptScores):
            self._scored[index] = item.start - 1 + len(item.tokens)
            self._n_buffered += sum(1 + len(top) for _, top in item.tokens)
            if self._n_buffered > MAX_BUFFERED:
                self._suspend()
        elif isinstance(item, EngineError):
            del self._open[request_id]
        self._arrivals.append(Arrival(at, index, item))

    def notify(self, writes: Writes) -> None:
        """Lets the reader have what was pushed; for notify() below, which makes the writes that this adds."""
        if not (self._consumer and self._consumer(writes)):
            self._arrived.set()

    def fail(self, error: EngineError, at: float) -> None:
        """Ends and cancels every open sequence with an error."""
        names = list(self._open)
        for request_id in names:
            self.push(request_id, at, error)
        if names:
            self._cancel(names)
            notify([self])

    def _suspend(self) -> None:
        """Suspends the stream until its reader has taken what is buffered."""
        if self._open and not (self._is_awaited or self.is_suspended):
            self.is_suspended = True
            self.n_suspensions += 1
            self.incidents.append((time.monotonic(), "suspended: the client does not read"))
            self._suspend_in_pool(self)

    def _current_id(self, leader: str | None) -> str | None:
        return next((name for name, index in self._open.items() if self.requests[index].id == leader), None)


def notify(streams: Iterable[TokenStream]) -> None:
    """Lets the readers of these streams have what was pushed: first all of them encode, then all is written."""
    encoded: list[tuple[TokenStream, Writes]] = []
    for stream in streams:
        writes: Writes = []
        stream.notify(writes)
        if writes:
            encoded.append((stream, writes))
    for stream, writes in encoded:
        try:
            for write, data in writes:
                write(data)
        except Exception as error:  # concerns this request, not the engine whose report is being delivered
            stream.fail(EngineFailed(f"the response cannot be written: {error}"), time.monotonic())
