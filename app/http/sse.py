"""Server-sent events: the frame writer, the parser, and a response that ends when its client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping
from types import coroutine
from typing import Any, NamedTuple, TypeVar

from msgspec import to_builtins
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.common.event_loop import TimeSlice
from app.common.fault_injection import fault
from app.http.response_cycle import BodyWriter, body_writer

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}
_RAW_HEADERS = [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in HEADERS.items()]
_T = TypeVar("_T")
PING = b": ping\n\n"
quoted = json.encoder.encode_basestring_ascii
"""Encodes a text as a JSON string in ASCII."""
ascii_json = json.JSONEncoder(check_circular=False, default=to_builtins).encode
"""Encodes response models, dicts and lists. ASCII, because some clients treat U+2028 as a line separator."""


def event(name: str, data: Any, event_id: str) -> bytes:
    """One event; `data` is a response model or a dict."""
    fault("api.event", (event_id, data))
    return f"id: {event_id}\nevent: {name}\ndata: {ascii_json(data)}\n\n".encode("ascii")


class Event(NamedTuple):
    """A server-sent event."""

    name: str
    """`message` if the stream names none; empty for a comment, whose lines are the data."""
    data: bytes
    id: str = ""


class EventParser:
    """Incremental parser of server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html, 9.2.6).

    Lines end with LF or CRLF, and may be split anywhere between two feeds. `retry` is ignored.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """Adds data; returns the events that are now complete."""
        return [event for block in self.blocks(data) if (event := parse_event(block))]

    @property
    def is_empty(self) -> bool:
        """Whether no part of an event waits for the rest of it."""
        return not self._rest

    def blocks(self, data: bytes) -> list[bytes]:
        """Adds data; returns the lines of each event that is now complete, without the empty one at its end."""
        *blocks, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        return blocks


def parse_event(block: bytes) -> Event | None:
    """The event of the lines before an empty line; None if they hold neither data nor a comment."""
    name, event_id, data = "message", "", []
    for line in block.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("ascii")
        elif field == b"id":
            event_id = value.decode("ascii")
    if data:
        return Event(name, b"\n".join(data), event_id)
    comment = block.lstrip(b"\n")  # there may be several empty lines before it
    return Event("", comment) if comment.startswith(b":") else None


FrameSource = Callable[[BodyWriter | None], AsyncIterator[bytes]]
"""Makes the frames of a response. Some of them may be written to the BodyWriter, if there is one, while the next is
awaited."""


class EventStreamResponse(Response):
    """Sends frames until they end or the client disconnects; always calls `close`, even before the first byte."""

    def __init__(self, frames: FrameSource, close: Callable[[], None], headers: Mapping[str, str]) -> None:
        super().__init__()
        own = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self.raw_headers = [*_RAW_HEADERS, *own]
        self._frames = frames
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(self._pump(send, body_writer(scope)), receive)
        finally:
            self._close()

    async def _pump(self, send: Send, writer: BodyWriter | None) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        time_slice = TimeSlice()
        async for frame in self._frames(writer):
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            await time_slice.pause_if_due()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(work: Coroutine[Any, Any, _T], receive: Receive) -> _T | None:
    """Runs `work` in this task; if the client disconnects first, cancels it and returns None.

    No result is lost: `work` either returns one, which is returned, or is cancelled while it waits. Work that never
    waits, as that of nearly all requests before they are queued, needs no task that watches the client.
    """
    try:
        awaited = work.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    task = asyncio.current_task()
    assert task
    n_cancellations = task.cancelling()
    is_working, is_cancelled = True, False

    def cancel_work(watching: asyncio.Task[None]) -> None:
        nonlocal is_cancelled
        if not watching.cancelled():
            watching.exception()  # a client whose receive() fails is gone, too
        if is_working:  # otherwise this would cancel what the task awaits next
            is_cancelled = True
            task.cancel()

    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    watching.add_done_callback(cancel_work)
    try:
        return await _resume(work, awaited)
    except asyncio.CancelledError:
        if is_cancelled and task.cancelling() == n_cancellations + 1:  # only cancel_work() has cancelled the task
            return None
        raise
    finally:
        is_working = False
        watching.cancel()
        if is_cancelled:
            task.uncancel()


@coroutine
def _resume(work: Coroutine[Any, Any, _T], awaited: Any) -> Generator[Any, Any, _T]:
    """Awaits a coroutine that has begun and waits for `awaited`; like `yield from`, which would begin it (PEP 380)."""
    try:
        while True:
            try:
                sent = yield awaited
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:
                awaited = work.throw(error)
            else:
                awaited = work.send(sent)
    except StopIteration as end:
        result: _T = end.value
        return result


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
