"""Backpressure and deadlines of one connection: when it is read, and whether its client still reads."""

from __future__ import annotations

import asyncio
import enum
import fcntl
import math
import socket
import struct
import termios
import time
from collections.abc import Callable
from typing import Any

from app.common.lazy_timer import LazyTimer

_MIN_READ_BYTES = 1024
"""Bytes that a slow reader must take within the timeout; a client that takes fewer has stalled."""


class ReadBlock(enum.Enum):
    """Why a connection is not read, whatever the application asks for."""

    QUEUE = "the body of a queued request, or what follows a rejected one"
    TURN = "input that waits for a turn to be parsed"


class FlowControl:
    """Flow control in both directions, with a block on reading that the application cannot override."""

    def __init__(self, transport: asyncio.Transport, write_seconds: float) -> None:
        # pause_writing() is then called as soon as the socket buffer is full, and nothing is buffered in this process.
        transport.set_write_buffer_limits(high=0)
        self.is_write_paused = False
        self.write_deadline = math.inf
        """Deadline of the client's next read in seconds of time.monotonic(); infinite while no output is pending."""
        self._transport = transport
        self._socket: Any = transport.get_extra_info("socket")
        self._write_seconds = write_seconds
        self._is_read_paused = False
        self._blocks: set[ReadBlock] = set()
        self._is_writable = asyncio.Event()
        self._is_writable.set()
        self._unacknowledged = 0

    def pause_reading(self) -> None:
        """Stops reading until the application asks for more."""
        if not self._is_read_paused:
            self._is_read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resumes reading, unless it is blocked."""
        if self._is_read_paused and not self._blocks:
            self._is_read_paused = False
            self._transport.resume_reading()

    def block_reading(self, reason: ReadBlock) -> None:
        """Stops reading until unblock_reading() for this reason."""
        self._blocks.add(reason)
        self.pause_reading()

    def unblock_reading(self, *reasons: ReadBlock) -> None:
        """Resumes reading, unless it is blocked for another reason."""
        self._blocks.difference_update(reasons)
        self.resume_reading()

    async def drain(self) -> None:
        """Waits until the socket buffer has been drained, or the connection is lost."""
        await self._is_writable.wait()

    def pause_writing(self) -> None:
        """The socket buffer is full."""
        self.is_write_paused = True
        self._is_writable.clear()
        self._unacknowledged = self._unacknowledged_bytes()
        self.write_deadline = time.monotonic() + self._write_seconds

    def resume_writing(self) -> None:
        """The socket buffer has been drained, or the connection is lost."""
        self.is_write_paused = False
        self._is_writable.set()
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

    def __init__(self, flow: FlowControl, on_timeout: Callable[[], None], on_stall: Callable[[], None]) -> None:
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
