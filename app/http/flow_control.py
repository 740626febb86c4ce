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
        """Bytes received in HEAD, except for those that arrived together with the end of an earlier request."""
        self._limits = limits
        self._n_headers = 0
        self._header_bytes = 0
        self._framing_bytes = 0
        """Bytes received since the last chunk of body data."""
        self._started_in_chunk = False

    def begin_head(self) -> None:
        """Starts a new request."""
        self.phase, self.head_bytes, self._started_in_chunk = ReceivePhase.HEAD, 0, True

    def begin_headers(self) -> None:
        """The parser has seen the start of a request."""
        self._n_headers = self._header_bytes = 0

    def record_url(self, size: int) -> None:
        """Records the length of the URL so far."""
        if size > self._limits.url_bytes:
            raise ApiError(
                414, f"the URL is longer than {self._limits.url_bytes} bytes: send a shorter one", code="url_too_long"
            )

    def record_header(self, size: int) -> None:
        """Records a header or trailer of `size` bytes."""
        self._n_headers += 1
        self._header_bytes += size
        if self._header_bytes > self._limits.header_bytes:
            raise self._headers_too_large()
        if self._n_headers > self._limits.headers:
            raise ApiError(
                431, f"the request has more than {self._limits.headers} headers: send fewer", code="headers_too_large"
            )

    def begin_body(self) -> None:
        """All headers have arrived."""
        self.phase, self._framing_bytes = ReceivePhase.BODY, 0

    def record_body(self) -> None:
        """A chunk of body data has arrived."""
        self._framing_bytes = 0

    def before_parsing(self, size: int) -> None:
        """Records `size` bytes before they are parsed."""
        self._framing_bytes += size
        self._started_in_chunk = False

    def after_parsing(self, size: int) -> None:
        """Checks after parsing that the parser's own buffers stay bounded."""
        if self.phase is ReceivePhase.HEAD and not self._started_in_chunk:
            self.head_bytes += size
            if self.head_bytes > self._limits.url_bytes + self._limits.header_bytes:
                raise self._headers_too_large()
        if self.phase is ReceivePhase.BODY and self._framing_bytes > self._limits.header_bytes:
            limit = self._limits.header_bytes
            raise ApiError(400, f"the body has over {limit} bytes of framing without data", code="bad_request")

    def _headers_too_large(self) -> ApiError:
        return ApiError(
            431,
            f"the headers are longer than {self._limits.header_bytes} bytes: send fewer or shorter ones",
            code="headers_too_large",
        )


_MIN_READ_BYTES = 1024
"""Bytes that a slow reader must take within the timeout; a client that takes fewer has stalled."""


class ConnectionFlowControl(FlowControl):
    """uvicorn's flow control, plus a block on reading that the application cannot override, and stall detection."""

    def __init__(self, transport: Any, write_seconds: float) -> None:
        super().__init__(transport)
        # pause_writing() is then called as soon as the socket buffer is full, and nothing is buffered in this process.
        transport.set_write_buffer_limits(high=0)
        self._socket = transport.get_extra_info("socket")
        self._write_seconds = write_seconds
        self._is_blocked = False
        self._unacknowledged = 0
        self.write_deadline: float | None = None
        """Deadline of the client's next read in seconds of time.monotonic(); None while no output is pending."""

    def resume_reading(self) -> None:
        """Resumes reading, unless it is blocked."""
        if not self._is_blocked:
            super().resume_reading()

    def block_reading(self) -> None:
        """Stops reading until unblock_reading()."""
        self._is_blocked = True
        self.pause_reading()

    def unblock_reading(self) -> None:
        """Resumes reading after block_reading()."""
        self._is_blocked = False
        self.resume_reading()

    def pause_writing(self) -> None:
        """The socket buffer is full."""
        super().pause_writing()
        self._unacknowledged = self._unacknowledged_bytes()
        self.write_deadline = time.monotonic() + self._write_seconds

    def resume_writing(self) -> None:
        """The socket buffer has been drained."""
        super().resume_writing()
        self.write_deadline = None

    def check_stalled(self, now: float) -> bool:
        """Returns whether the client has stopped reading; extends its deadline if it has not."""
        if self.write_deadline is None or now < self.write_deadline:
            return False
        unacknowledged = self._unacknowledged_bytes()
        if unacknowledged > self._unacknowledged - _MIN_READ_BYTES:
            return True
        self._unacknowledged, self.write_deadline = unacknowledged, now + self._write_seconds
        return False

    def discard_unsent(self) -> None:
        """Makes the kernel discard unread output when the connection closes."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _unacknowledged_bytes(self) -> int:
        """Bytes that the client has not acknowledged: those buffered here and those in the kernel."""
        buffered: int = self._transport.get_write_buffer_size()
        return buffered + int(struct.unpack("i", fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4)))[0])


class ConnectionTimeouts:
    """Calls `on_timeout` once when the input deadline passes, and `on_stall` when the client stops reading."""

    def __init__(
        self, flow: ConnectionFlowControl, on_timeout: Callable[[], None], on_stall: Callable[[], None]
    ) -> None:
        self._flow = flow
        self._on_timeout = on_timeout
        self._on_stall = on_stall
        self._timer = LazyTimer(self._on_timer)
        self._deadline: float | None = None

    def set_deadline(self, seconds: float | None) -> None:
        """Sets the deadline for the client's input; None clears it."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self.schedule()

    def schedule(self) -> None:
        """Schedules the timer for the earliest deadline."""
        if deadlines := [deadline for deadline in (self._deadline, self._flow.write_deadline) if deadline is not None]:
            self._timer.set(min(deadlines))

    def cancel(self) -> None:
        """Cancels the timer."""
        self._timer.cancel()

    def _on_timer(self) -> None:
        """Timer callback: a deadline may have passed or moved."""
        now = time.monotonic()
        if self._flow.check_stalled(now):
            self._on_stall()
            return
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            self._on_timeout()
        self.schedule()
