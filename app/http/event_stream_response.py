"""A response of server-sent events, which ends when its client disconnects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.common.time_slice import TimeSlice
from app.http.disconnect import until_disconnect
from app.http.response_cycle import BodyWriter, body_writer
from app.http.sse import HEADERS

_RAW_HEADERS = [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in HEADERS.items()]

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
