"""The engine process's end of the pipe, the way in: bytes to frames. No torch, no requests."""

from __future__ import annotations

import select
import socket

from app.common.ipc import Down, FrameDecoder, decode_down


class FrameReceiver:
    """Frames that have arrived, without waiting where there is other work. Raises EOFError at the pipe's end."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._frames = FrameDecoder()
        self._poll = select.poll()  # not select(), which fails for descriptors from 1,024 on
        self._poll.register(pipe, select.POLLIN)

    @property
    def is_closed(self) -> bool:
        """Whether nobody is at the other end, whatever is still to be read."""
        return any(event & select.POLLHUP for _, event in self._poll.poll(0))

    def receive(self, wait_seconds: float) -> list[Down]:
        """All frames there are; waits up to `wait_seconds` for the first one."""
        frames: list[Down] = []
        while self._poll.poll(0 if frames else wait_seconds * 1000):
            data = self._pipe.recv(1 << 20)
            if not data:
                raise EOFError
            frames += map(decode_down, self._frames.feed(data))
        return frames
