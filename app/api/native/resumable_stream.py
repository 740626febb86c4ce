"""Resumable stream: the events of a native completion, numbered and kept for a client that reconnects.

`Last-Event-ID` (https://html.spec.whatwg.org/multipage/server-sent-events.html, 9.2.4) names the last event that a
client has; the stream replays the events after it byte for byte, and goes on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from app.access.rate_limiter import Reservation
from app.access.tenant import Tenant
from app.api import schemas
from app.api.delivery import Connection, Delivery
from app.api.request_handle import RequestHandle
from app.api.resume_store import ResumeStore
from app.generation.request import CompletionEvent, Delta, Finished, Heartbeat, Queued, Started
from app.http import sse
from app.http.errors import ApiError
from app.http.response_cycle import BodyWriter
from app.http.response_model import ResponseModel

if TYPE_CHECKING:
    from app.http.tracing import RequestTrace  # its packages are optional

_WEIGHTS_CLOSED = "the weights of this stream are no longer served: send the request again"
_PIECE_BYTES = 16 << 10
"""Replayed at once: a connection that does not read holds one piece beyond the server's write buffer, not a copy of
the whole stream."""


class ReplayBuffer:
    """The last frames of one stream: as many as fit into `limit` bytes, and always the newest one."""

    __slots__ = ("_frames", "_limit", "_size", "next_number")

    def __init__(self, limit: int, first: int = 0) -> None:
        """`first`: the number of the first frame."""
        self._limit = limit
        self._frames: deque[bytes] = deque()
        self.next_number = first
        """The next frame's number."""
        self._size = 0

    @property
    def first(self) -> int:
        """The number of the oldest frame in the buffer."""
        return self.next_number - len(self._frames)

    def append(self, frame: bytes) -> bytes:
        """Appends a frame and returns it."""
        self._frames.append(frame)
        self.next_number += 1
        self._size += len(frame)
        while self._size > self._limit and len(self._frames) > 1:
            self._size -= len(self._frames.popleft())
        return frame

    def since(self, number: int, limit: int) -> Sequence[bytes]:
        """The frames from this number on, as many as fit into `limit` bytes and at least one; the buffer has them."""
        frames: list[bytes] = []
        size = 0
        for frame in islice(self._frames, number - self.first, None):
            size += len(frame)
            if frames and size > limit:
                break
            frames.append(frame)
        return frames


class ResumableStream(Delivery):
    """A delivery whose client may reconnect: one connection at a time reads it, and a newer one replaces it."""

    def __init__(
        self,
        handle: RequestHandle,
        resume_store: ResumeStore,
        *,
        owner: str,
        extra: Mapping[str, Any],
        replay_bytes: int,
        after: int | None = None,
    ) -> None:
        """`after`: the client has `start` and the events up to this number, from a stream that broke."""
        super().__init__(handle)
        self.name = handle.name
        self.alias = handle.callers_id
        """Another name for its owner, the X-Request-Id that the caller chose; the last stream keeps it."""
        self.owner = owner
        self.headers = handle.headers
        self._resume_store = resume_store
        self._replay_buffer = ReplayBuffer(replay_bytes, 0 if after is None else after + 1)
        self._sends_start = after is None
        self._id_prefix = f"{handle.name}:"
        self._extra = extra
        self._receipt = schemas.Receipt.of(handle.admitted)
        self._finished: dict[int, Finished] = {}
        self._is_detached = False
        """Whether the completion was detached before its end."""
        self._replay: Reservation | None = None
        """Of a connection that reads a completion whose own reservation has ended."""
        resume_store.put(self)

    @property
    def next_number(self) -> int:
        """The next frame's number."""
        return self._replay_buffer.next_number

    def can_replay_from(self, number: int) -> bool:
        """Whether all frames from this number on can be replayed."""
        return self._replay_buffer.first <= number <= self.next_number

    def attach(self, connection: Connection) -> None:
        """Makes this the connection that gets the frames."""
        self._is_detached = False
        self._resume_store.mark_attached(self)
        super().attach(connection)

    def admit_reconnection(self, tenant: Tenant) -> None:
        """A client reconnects, which is a request like any other; attach() follows.

        Raises Unavailable or ApiError if the completion cannot be resumed, or the tenant's limits do not allow it.
        """
        handle = self.handle
        if self._is_detached and self.completion.is_open:
            if handle.admitted.instance.is_closed:
                raise ApiError(404, _WEIGHTS_CLOSED, code="events_gone")
            handle.service.require_open()  # the engine may be restarting: the completion waits for it
            handle.attach()
        elif self._connection:  # which ends now
            (self._replay or handle.admitted.reservation).count_reconnection(time.monotonic())
        else:
            self._replay = handle.service.admission.reserve_delivery(tenant)

    def detach(self, connection: Connection) -> None:
        """The client left: it may reconnect within the resume timeout."""
        if connection is not self._connection:
            return
        self._connection = None
        self._end_replay()
        if self.is_finished:
            self.handle.end()
        else:
            self._is_detached = self.completion.is_open
            self.handle.detach()
        self._resume_store.mark_detached(self)

    def cancel(self) -> bool:
        """Cancels the completion and tells its reader; False if it had already finished."""
        was_running = self.completion.cancel()
        if was_running:
            self.handle.record_cancelled()
        return was_running

    def end(self) -> None:
        """Releases the completion; the stream can no longer be resumed."""
        self._connection = None
        self._woken.set()
        self._end_replay()
        self.handle.end()

    def _end_replay(self) -> None:
        if self._replay:
            self._replay.end(0)
            self._replay = None

    @property
    def trace(self) -> RequestTrace | None:
        """The trace of the request that began this stream."""
        return self.handle.trace

    def log_fields(self) -> dict[str, Any]:
        """Fields for the log line of a request that resumes this stream."""
        return {**self.handle.log_fields(), "stream": self.name}

    async def frames_from(self, number: int, connection: Connection, writer: BodyWriter | None) -> AsyncIterator[bytes]:
        """The event stream from frame `number` on; ends with exactly one `done` or `error`."""
        for piece in self._replayed(number, connection):
            yield piece
        async for frames in self.frames(connection, writer):
            yield frames

    def _replayed(self, number: int, connection: Connection) -> Iterator[bytes]:
        """The stored frames from `number` on in pieces, while no newer connection reads; none are added."""
        while connection is self._connection and number < self.next_number:
            frames = self._replay_buffer.since(number, _PIECE_BYTES)
            number += len(frames)
            yield b"".join(frames)

    def encode(self, event: CompletionEvent) -> bytes:
        """The frame of an event, also for the replay buffer."""
        if isinstance(event, Delta) and not (event.tokens or event.ids):  # first, since nearly all events are
            buffer = self._replay_buffer
            return buffer.append(token_frame(event.index, event.text, f"{self._id_prefix}{buffer.next_number}"))
        match event:
            case Delta(index, text, details, ids=ids):
                tokenizer = self.handle.admitted.tokenizer
                tokens = [schemas.token(tokenizer, detail) for detail in details]
                return self._append("token", schemas.TokenEvent(index, text, tokens or None, list(ids) or None))
            case Queued(position):
                eta_ms = round(self.handle.engine.queue.eta_seconds(position, time.monotonic()) * 1e3)
                return self._append("queue", schemas.QueueEvent(position, eta_ms))
            case Started() if self._sends_start:
                return self._append("start", self._start())
            case Finished(index):
                self._finished[index] = event
            case Heartbeat():
                return sse.PING
        return b""

    def encode_end(self) -> bytes:
        """The event `done`."""
        return self._append("done", self._done())

    def encode_error(self, body: dict[str, Any]) -> bytes:
        """The event `error`."""
        return self._append("error", body)

    def _append(self, name: str, data: ResponseModel | dict[str, Any]) -> bytes:
        return self._replay_buffer.append(sse.event(name, data, f"{self._id_prefix}{self.next_number}"))

    def _start(self) -> schemas.StartEvent:
        return schemas.StartEvent(
            id=self.name,
            model=self.handle.admitted.instance.model_name,
            weights_version=self._receipt.weights_version,
            seed=self._receipt.seed,
            prompt_tokens=self.completion.prompt_tokens,
            cached_tokens=self.completion.cached_tokens,
            settings=self._receipt.settings,
            numerics=self._receipt.numerics,
            prompt_sha256=self._receipt.prompt_sha256,
            source_sha256=self._receipt.source_sha256,
            suffix_sha256=self._receipt.suffix_sha256,
            **self._extra,
        )

    def _done(self) -> schemas.DoneEvent:
        completion = self.completion
        choices = [
            schemas.ChoiceEnd(i, end.finish_reason, end.stop_reason) for i, end in sorted(self._finished.items())
        ]
        return schemas.DoneEvent(choices, schemas.Usage.of(completion), schemas.Timings.of(completion), self._receipt)


def token_frame(index: int, text: str, event_id: str) -> bytes:
    """sse.event("token", TokenEvent(index, text), event_id) in a tenth of the time, for nearly all events."""
    text = sse.quoted(text)
    return f'id: {event_id}\nevent: token\ndata: {{"index": {index}, "text": {text}}}\n\n'.encode("ascii")


def next_number(request_id: str, last_event_id: str | None) -> int:
    """The number of the event that comes after `last_event_id`. Raises ApiError 400."""
    if last_event_id is None:
        return 0
    name, _, number = last_event_id.rpartition(":")
    if name != request_id or not number.isdecimal() or len(number) > 9:
        raise ApiError(400, "Last-Event-ID must be the id of an event of this stream", param="Last-Event-ID")
    return int(number) + 1
