"""From the events of a request to the frames of its response, in the response's task or without waking it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from app.api.request_handle import RequestHandle
from app.common.event_loop import TimeSlice
from app.engine_client.token_stream import Writes
from app.generation.request import CompletionEvent, Finished
from app.http.sse import BodyWriter

_LATENCIES = 16
"""Inter-token latencies that the metrics get at once; the end of the request adds the rest."""


class EventFrames(ABC):
    """A response that streams events; a subclass defines the format of its frames.

    While the task that sends the response waits in next_frames(), the callback that delivers the engine's report writes
    the frames itself: waking the task for each token would cost more than the token.
    """

    is_finished: bool
    """Whether the last frame was encoded: the end, or an error."""
    written_at = 0.0
    """When frames were last written while the task waited, in monotonic seconds."""
    _writer: BodyWriter | None = None
    """Of the connection that waits in next_frames(); None if it must be woken for what arrives."""

    def __init__(self, handle: RequestHandle) -> None:
        self.handle = handle
        self._session = handle.session

    @abstractmethod
    def encode(self, event: CompletionEvent) -> bytes:
        """The frames of an event; empty if it has none."""

    @abstractmethod
    def encode_end(self) -> bytes:
        """The frames after the last event; empty if there are none."""

    @abstractmethod
    def encode_error(self, body: dict[str, Any]) -> bytes:
        """The last frame of a request that failed."""

    async def next_frames(self, writer: BodyWriter | None, is_current: Callable[[], bool] = lambda: True) -> bytes:
        """Waits for events, and returns their frames; empty if none came, or all were written to `writer`.

        is_current: whether this connection still gets the frames.
        """
        self._writer = writer if is_current() else None
        try:
            await self._session.wait_event(self._write_events)
        except Exception as error:
            return self._fail(error)
        return self._encode_events() if is_current() else b""

    def _write_events(self, writes: Writes) -> bool:
        """Encodes what has arrived; False if there is more to do, or the client does not read so fast."""
        writer = self._writer
        if not (writer and writer.is_ready):
            return False
        session = self._session
        if frames := self._encode_events():
            writes.append(writer.prepare(frames))
            self.written_at = session.last_event_at
        return not (session.events or self.is_finished)

    def _encode_events(self) -> bytes:
        """Encodes all pending events, up to a time slice after the first one; empty if there are none."""
        session, events = self._session, self._session.events
        frames: list[bytes] = []
        time_slice: TimeSlice | None = None
        try:
            if session.stream.work_seconds or len(session.inter_token_latencies) >= _LATENCIES:
                self.handle.record_progress()
            while events and not (self.is_finished or (time_slice and time_slice.is_due)):
                event = events.popleft()
                if isinstance(event, Finished):
                    self.handle.record_finished(event)
                frames.append(self.encode(event))
                if isinstance(event, Finished) and session.is_done:
                    self.is_finished = True
                    frames.append(self.encode_end())
                if events and not time_slice:
                    time_slice = TimeSlice()
        except Exception as error:
            frames.append(self._fail(error))
        return frames[0] if len(frames) == 1 else b"".join(frames)

    def _fail(self, error: Exception) -> bytes:
        self.is_finished = True
        return self.encode_error(self.handle.on_error(error).body(self.handle.callers_id or self.handle.name))
