"""Timeouts, size limits and backpressure of one connection."""

from __future__ import annotations

import fcntl
import math
import socket
import struct
import termios
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

from app.common.event_loop import LazyTimer
from app.http.connection_limits import HttpLimits, ReceivePhase
from app.http.errors import ApiError


class RequestLimits:
    """Size limits of one connection. Each method that records input raises ApiError if it exceeds a limit."""

    def __init__(self, limits: HttpLimits) -> None:
        self.phase = ReceivePhase.NEW
        self._limits = limits
        self._n_headers = 0
        self._header_bytes = 0
        self._buffered_bytes = 0
        """Bytes received since the parser's last event, at most: the parser may buffer them."""

    def begin_headers(self) -> None:
        """The parser has seen the start of a request."""
        self._n_headers = self._header_bytes = self._buffered_bytes = 0

    def record_url(self, size: int) -> None:
        """Records the length of the URL so far."""
        self._buffered_bytes = 0
        if size > self._limits.url_bytes:
            message = f"the URL is longer than {self._limits.url_bytes} bytes: send a shorter one"
            raise ApiError(414, message, code="url_too_long")

    def record_header(self, size: int) -> None:
        """Records a header or trailer of `size` bytes."""
        self._buffered_bytes = 0
        self._n_headers += 1
        self._header_bytes += size
        if self._header_bytes > self._limits.header_bytes:
            raise self._headers_too_large()
        if self._n_headers > self._limits.headers:
            message = f"the request has more than {self._limits.headers} headers: send fewer"
            raise ApiError(431, message, code="headers_too_large")

    def record_body(self) -> None:
        """A chunk of body data has arrived."""
        self._buffered_bytes = 0

    def before_parsing(self, size: int) -> None:
        """Records `size` bytes before they are parsed."""
        self._buffered_bytes += size

    def after_parsing(self) -> None:
        """Checks after parsing that the parser's own buffers stay bounded."""
        limit = self._limits.header_bytes
        if self.phase is ReceivePhase.HEAD and self._buffered_bytes > self._limits.url_bytes + limit:
            raise self._headers_too_large()
        if self.phase is ReceivePhase.BODY and self._buffered_bytes > limit:
            raise ApiError(400, f"the body has over {limit} bytes of framing without data", code="bad_request")

    def _headers_too_large(self) -> ApiError:
        message = f"the headers are longer than {self._limits.header_bytes} bytes: send fewer or shorter ones"
        return ApiError(431, message, code="headers_too_large")


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
        self.write_deadline = math.inf
        """Deadline of the client's next read in seconds of time.monotonic(); infinite while no output is pending."""

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
        self.write_deadline = math.inf

    def check_stalled(self, now: float) -> bool:
        """Returns whether the client has stopped reading; extends its deadline if it has not."""
        if now < self.write_deadline:
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
        self._deadline = math.inf

    def set_deadline(self, seconds: float) -> None:
        """Sets the deadline for the client's input."""
        self._deadline = time.monotonic() + seconds
        self.schedule()

    def schedule(self) -> None:
        """Schedules the timer for the earliest deadline."""
        if (due := min(self._deadline, self._flow.write_deadline)) < math.inf:
            self._timer.set(due)

    def cancel(self) -> None:
        """Cancels the timer."""
        self._timer.cancel()

    def _on_timer(self) -> None:
        """Timer callback: a deadline may have passed or moved."""
        now = time.monotonic()
        if self._flow.check_stalled(now):
            self._on_stall()
            return
        if now >= self._deadline:
            self._deadline = math.inf
            self._on_timeout()
        self.schedule()
