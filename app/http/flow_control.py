"""When a connection is read from, and whether its client takes what is written. Knows bytes, no HTTP."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import time
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

_LEAST_TAKEN = 1024
"""Bytes that a slow reader takes in the time it has; who takes fewer has stopped reading."""


class ConnectionFlowControl(FlowControl):
    """uvicorn's, which can also hold reading back whatever the application wants, and watches the reader."""

    def __init__(self, transport: Any, write_seconds: float) -> None:
        super().__init__(transport)
        # pause_writing() is then called as soon as the kernel takes no more, and nothing piles up in this process.
        transport.set_write_buffer_limits(high=0)
        self._socket = transport.get_extra_info("socket")
        self._write_seconds = write_seconds
        self._is_held = False
        self._unsent = 0
        self.write_due: float | None = None
        """When the client must have read on, in seconds of time.monotonic(); None while nothing waits for it."""

    def resume_reading(self) -> None:
        """Not while it is held."""
        if not self._is_held:
            super().resume_reading()

    def hold(self) -> None:
        """Nothing more is read until release()."""
        self._is_held = True
        self.pause_reading()

    def release(self) -> None:
        """Read again."""
        self._is_held = False
        self.resume_reading()

    def pause_writing(self) -> None:
        """The kernel takes no more for now."""
        super().pause_writing()
        self._unsent = self._outstanding()
        self.write_due = time.monotonic() + self._write_seconds

    def resume_writing(self) -> None:
        """It took all there was."""
        super().resume_writing()
        self.write_due = None

    def has_stalled(self, now: float) -> bool:
        """Whether the client has not read on in time; if it has, it gets as much time again."""
        if self.write_due is None or now < self.write_due:
            return False
        unsent = self._outstanding()
        if unsent > self._unsent - _LEAST_TAKEN:
            return True
        self._unsent, self.write_due = unsent, now + self._write_seconds
        return False

    def forget_unsent(self) -> None:
        """The kernel shall not keep what the client has not read when the connection ends."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _outstanding(self) -> int:
        """Bytes that the client has not taken: those that wait here, and the kernel's."""
        waiting: int = self._transport.get_write_buffer_size()
        return waiting + int(struct.unpack("i", fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
