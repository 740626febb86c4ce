"""Engine process: a child process and its pipe; spawns it, sends and receives frames, terminates it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

from app.common.frames import FrameDecoder
from app.common.ipc import Down, Up, decode_up, encode_frame
from app.common.python_child import python_command, python_environment

WORKER = python_command("app.engine")
_GRACE_SECONDS = 1.0


class EngineProcess(asyncio.Protocol):
    """A child process, connected by a socket pair; it exits when the socket is closed.

    Decodes frames in the transport's callback: a reader task would add a loop iteration to every engine step.
    """

    def __init__(self, process: asyncio.subprocess.Process, on_frame: Callable[[Up], None]) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the process has closed its end; raises the error of on_frame, after which no frames are read."""
        self._process = process
        self._on_frame = on_frame
        self._frames = FrameDecoder()
        self._unwritten: list[bytes] = []
        self._transport: Any = None

    @classmethod
    async def spawn(cls, on_frame: Callable[[Up], None], command: Sequence[str] = WORKER) -> EngineProcess:
        """Starts `command` with the descriptor of its end of the pipe as the last argument.

        on_frame: called with each frame, in the event loop iteration that reads it.
        """
        parent_end, child_end = socket.socketpair()
        with child_end, contextlib.ExitStack() as on_error:
            on_error.callback(parent_end.close)
            process = await asyncio.create_subprocess_exec(
                *command,
                str(child_end.fileno()),
                pass_fds=[child_end.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env=python_environment(),
                start_new_session=True,  # Ctrl+C on the terminal must only reach the API process
            )
            on_error.pop_all()
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: cls(process, on_frame), sock=parent_end))[1]

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, frame: Down) -> None:
        """Sends a frame without waiting; frames to a process that has exited are dropped.

        Frames of one iteration of the event loop are written together: uvloop makes a system call for each write.
        """
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write)
        self._unwritten.append(encode_frame(frame))

    def _write(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        if unwritten and not self._transport.is_closing():
            self._transport.write(b"".join(unwritten))

    def kill(self) -> None:
        """Kills the process; idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def terminate(self) -> int:
        """Closes the pipe, waits for the process to exit, and kills it if it does not. Returns its exit code."""
        self._write()
        self._transport.close()
        try:
            await asyncio.wait_for(self._process.wait(), _GRACE_SECONDS)
        except TimeoutError:
            self.kill()
        except asyncio.CancelledError:  # cannot wait, but must not leave an orphan
            self.kill()
            raise
        return await self._process.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            for body in self._frames.feed(data):
                self._on_frame(decode_up(body))
        except Exception as error:  # the event loop would only log it
            if not self.closed.done():
                self.closed.set_exception(error)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the child has exited in any case
        """See asyncio.Protocol."""
        if not self.closed.done():
            self.closed.set_result(None)


def describe_exit(code: int) -> str:
    """Describes how a process ended, by its exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
