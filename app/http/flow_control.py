"""Timeouts, size limits and backpressure of one connection."""

from __future__ import annotations

import enum
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

from app.common.event_loop import LazyTimer
from app.http.connection_limits import HttpLimits
from app.http.errors import ApiError


class ReceivePhase(enum.Enum):
    """HEAD --all headers--> BODY --all of it--> DONE --first byte of another request--> HEAD."""

    HEAD = enum.auto()
    BODY = enum.auto()
    DONE = enum.auto()
    LINGER = enum.auto()
    """Input is discarded: the connection is about to close."""


class RequestLimits:
    """Size limits of one connection. Each method that records input raises ApiError if it exceeds a limit."""

    def __init__(self, limits: HttpLimits) -> None:
        self.phase = ReceivePhase.HEAD
        self.head_bytes = 0
        """Received in HEAD, except for bytes that arrived together with the end of an earlier request."""
        self._limits = limits
        self._n_headers = 0
        self._header_bytes = 0
        self._bodiless_bytes = 0
        """Received since the last chunk of body data."""
        self._began_in_piece = False

    def begin_head(self) -> None:
        """Starts a new request."""
        self.phase, self.head_bytes, self._began_in_piece = ReceivePhase.HEAD, 0, True

    def begin_headers(self) -> None:
        """The parser has seen the start of a request."""
        self._n_headers = self._header_bytes = 0

    def url(self, size: int) -> None:
        """Records the length of the URL so far."""
        if size > self._limits.url_bytes:
            raise ApiError(414, f"the URL is longer than {self._limits.url_bytes} bytes", code="url_too_long")

    def header(self, size: int) -> None:
        """Records a header or trailer of `size` bytes."""
        self._n_headers += 1
        self._header_bytes += size
        if self._header_bytes > self._limits.header_bytes:
            raise self._headers_too_large()
        if self._n_headers > self._limits.headers:
            raise ApiError(431, f"there are over {self._limits.headers} headers", code="headers_too_large")

    def begin_body(self) -> None:
        """All headers have arrived."""
        self.phase, self._bodiless_bytes = ReceivePhase.BODY, 0

    def body(self) -> None:
        """A chunk of body data has arrived."""
        self._bodiless_bytes = 0

    def before(self, size: int) -> None:
        """Records `size` bytes before they are parsed."""
        self._bodiless_bytes += size
        self._began_in_piece = False

    def after(self, size: int) -> None:
        """Checks after parsing that the parser's own buffers stay bounded."""
        if self.phase is ReceivePhase.HEAD and not self._began_in_piece:
            self.head_bytes += size
            if self.head_bytes > self._limits.url_bytes + self._limits.header_bytes:
                raise self._headers_too_large()
        if self.phase is ReceivePhase.BODY and self._bodiless_bytes > self._limits.header_bytes:
            raise ApiError(400, "the body's framing is longer than any body's", code="bad_request")

    def _headers_too_large(self) -> ApiError:
        return ApiError(431, f"the headers have over {self._limits.header_bytes} bytes", code="headers_too_large")


_LEAST_TAKEN = 1024
"""Bytes that a slow reader must take within the timeout; a client that takes fewer has stalled."""


class ConnectionFlowControl(FlowControl):
    """uvicorn's flow control, with a hold on reading that the application cannot override, and stall detection."""

    def __init__(self, transport: Any, write_seconds: float) -> None:
        super().__init__(transport)
        # pause_writing() is then called as soon as the socket buffer is full, and nothing is buffered in this process.
        transport.set_write_buffer_limits(high=0)
        self._socket = transport.get_extra_info("socket")
        self._write_seconds = write_seconds
        self._is_held = False
        self._unsent = 0
        self.write_due: float | None = None
        """Deadline of the client's next read in seconds of time.monotonic(); None while no output is pending."""

    def resume_reading(self) -> None:
        """Resumes reading, unless it is held."""
        if not self._is_held:
            super().resume_reading()

    def hold(self) -> None:
        """Stops reading until release()."""
        self._is_held = True
        self.pause_reading()

    def release(self) -> None:
        """Ends the hold and resumes reading."""
        self._is_held = False
        self.resume_reading()

    def pause_writing(self) -> None:
        """The socket buffer is full."""
        super().pause_writing()
        self._unsent = self._outstanding()
        self.write_due = time.monotonic() + self._write_seconds

    def resume_writing(self) -> None:
        """The socket buffer has been drained."""
        super().resume_writing()
        self.write_due = None

    def has_stalled(self, now: float) -> bool:
        """Whether the client has stopped reading; if it has not, its deadline is extended."""
        if self.write_due is None or now < self.write_due:
            return False
        unsent = self._outstanding()
        if unsent > self._unsent - _LEAST_TAKEN:
            return True
        self._unsent, self.write_due = unsent, now + self._write_seconds
        return False

    def forget_unsent(self) -> None:
        """Makes the kernel discard unread output when the connection closes."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _outstanding(self) -> int:
        """Bytes that the client has not acknowledged: those buffered here and those in the kernel."""
        waiting: int = self._transport.get_write_buffer_size()
        return waiting + int(struct.unpack("i", fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4)))[0])


class ConnectionTimeouts:
    """Calls `on_late` once when the deadline of expect() passes, and `on_stall` when the client stops reading."""

    def __init__(self, flow: ConnectionFlowControl, on_late: Callable[[], None], on_stall: Callable[[], None]) -> None:
        self._flow = flow
        self._on_late = on_late
        self._on_stall = on_stall
        self._alarm = LazyTimer(self._look)
        self._due: float | None = None

    def expect(self, seconds: float | None) -> None:
        """Sets the deadline for the client's input; None clears it."""
        self._due = None if seconds is None else time.monotonic() + seconds
        self.look_later()

    def look_later(self) -> None:
        """Schedules the timer for the earliest deadline."""
        if dues := [due for due in (self._due, self._flow.write_due) if due is not None]:
            self._alarm.set(min(dues))

    def end(self) -> None:
        """Cancels the timer."""
        self._alarm.cancel()

    def _look(self) -> None:
        """Timer callback: a deadline may have passed or moved."""
        now = time.monotonic()
        if self._flow.has_stalled(now):
            self._on_stall()
            return
        if self._due is not None and now >= self._due:
            self._due = None
            self._on_late()
        self.look_later()
