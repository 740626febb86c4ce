"""Delivery: the frames of one completion, written to the connection that reads it.

The callback that delivers an engine's reports encodes the new events of all completions and then writes all frames,
without waking the tasks of the responses: waking a task for each token would cost more than the token. A task wakes for
what it alone can do: wait until a slow client has read, go on after a time slice, and end the response.

    engine's report -> Completion -> flush() -- the connection is ready --> ResponseWriter
                                        |  not ready, time slice over, end
                                        +--------------------------------> frames() in the response's task
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from app.api.request_handle import RequestHandle
from app.common.time_slice import TimeSlice
from app.engine_client.open_sequences import Writes
from app.generation.request import CompletionEvent, Finished
from app.http.response_cycle import BodyWriter

_LATENCIES = 16
"""Inter-token latencies that the metrics get at once; the end of the request adds the rest."""


class Connection:
    """Identity of one connection that reads a delivery; a newer one replaces it."""


class Delivery(ABC):
    """A response that streams events; a subclass defines the format of its frames."""

    def __init__(self, handle: RequestHandle) -> None:
        self.handle = handle
        self.completion = handle.completion
        self.is_finished = False
        """Whether the last frame was encoded: the end, or an error."""
        self.written_at = time.monotonic()
        """When frames were last encoded, in monotonic seconds; at first, when the delivery began."""
        self._connection: Connection | None = None
        self._writer: BodyWriter | None = None
        """Of the connection, while its task sleeps and flush() may write."""
        self._woken = asyncio.Event()

    @abstractmethod
    def encode(self, event: CompletionEvent) -> bytes:
        """The frames of an event; empty if it has none."""

    @abstractmethod
    def encode_end(self) -> bytes:
        """The frames after the last event; empty if there are none."""

    @abstractmethod
    def encode_error(self, body: dict[str, Any]) -> bytes:
        """The last frame of a request that failed."""

    def attach(self, connection: Connection) -> None:
        """Makes this the connection that gets the frames; the task of an earlier one ends."""
        self._connection, self._writer = connection, None
        self._woken.set()
        self.completion.read(self.flush)

    async def frames(self, connection: Connection, writer: BodyWriter | None) -> AsyncIterator[bytes]:
        """The frames that flush() cannot write to `writer`, until the last one or a newer connection."""
        while connection is self._connection and not self.is_finished:
            frames = self._encode_events()
            if not self.completion.events:
                self.completion.resume()
            if frames:
                yield frames
            elif self.completion.events:  # without frames, as tokens that complete no character
                await asyncio.sleep(0)
            elif not self.is_finished:
                self._woken.clear()
                self._writer = writer
                await self._woken.wait()
                if connection is self._connection:
                    self._writer = None

    def flush(self, writes: Writes) -> bool:
        """Encodes what has arrived and adds the write; wakes the task for everything else. See Consumer."""
        writer = self._writer
        if writer is None or not writer.is_ready:
            self._woken.set()
            return False
        if frames := self._encode_events():
            writes.append(writer.prepare(frames))
        if self.completion.events or self.is_finished:
            self._woken.set()
        return True

    def _encode_events(self) -> bytes:
        """Encodes all pending events, up to a time slice after the first one; empty if there are none."""
        completion = self.completion
        events = completion.events
        frames: list[bytes] = []
        time_slice: TimeSlice | None = None
        try:
            if completion.work_seconds or len(completion.inter_token_latencies) >= _LATENCIES:
                self.handle.record_progress()
            while events and not (self.is_finished or (time_slice and time_slice.is_due)):
                event = events.popleft()
                frames.append(self.encode(event))
                if isinstance(event, Finished):
                    self.handle.record_finished(event)
                    if completion.is_done:
                        self.is_finished = True
                        frames.append(self.encode_end())
                if events and not time_slice:
                    time_slice = TimeSlice()
            if completion.failure and not (events or self.is_finished):
                raise completion.failure
        except Exception as error:
            self.is_finished = True
            frames.append(self.encode_error(self.handle.on_error(error).body(self.handle.public_name)))
        encoded = frames[0] if len(frames) == 1 else b"".join(frames)
        if encoded:
            self.written_at = completion.last_event_at
        return encoded
