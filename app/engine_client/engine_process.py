"""One engine process and its pipe: spawn, send and receive frames, terminate."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from app.common.ipc import Down, FrameDecoder, Up, decode_up, encode_frame

# -P and an explicit path: a folder called app in the working directory must not be imported.
WORKER = (sys.executable, "-P", "-m", "app.engine.worker")
_ROOT = Path(__file__).parents[2]


class EngineProcess:
    """A child whose only links are a socket pair and its exit code; it ends when the pipe does."""

    def __init__(self, process: asyncio.subprocess.Process, transport: asyncio.WriteTransport, pipe: _Pipe) -> None:
        self._process = process
        self._transport = transport
        self._pipe = pipe

    @classmethod
    async def spawn(cls, take: Callable[[Up], None], command: Sequence[str] = WORKER) -> EngineProcess:
        """Starts `command` with the descriptor of its end of the pipe as the last argument.

        take: is given every frame in the turn of the event loop in which it was read.
        """
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl+C on the terminal is for the API process
            )
            undo.pop_all()
        transport, pipe = await asyncio.get_running_loop().create_connection(lambda: _Pipe(take), sock=ours)
        return cls(process, transport, pipe)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def gone(self) -> None:
        """Waits until the process has closed its end. Raises what taking a frame raised: no more are read then."""
        await self._pipe.closed

    def send(self, frame: Down) -> None:
        """Never waits; what is sent to a process that has gone is lost with it."""
        if not self._transport.is_closing():
            self._transport.write(encode_frame(frame))

    def kill(self) -> None:
        """At once; no error where it is gone already."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self, patience_seconds: float = 1.0) -> int:
        """Closes the pipe, waits for the process to follow, kills it where it does not. Returns its exit code."""
        self._transport.close()
        try:
            await asyncio.wait_for(self._process.wait(), patience_seconds)
        except TimeoutError:
            self.kill()
        except asyncio.CancelledError:  # no time to wait, and no orphan either
            self.kill()
            raise
        return await self._process.wait()


def fate(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


class _Pipe(asyncio.Protocol):
    """Our end: bytes to frames without a task between them, which would take its turn for every step of the engine."""

    def __init__(self, take: Callable[[Up], None]) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take = take
        self._frames = FrameDecoder()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._take(decode_up(body))
        except Exception as error:  # the event loop would only log it
            self._end(error)
            assert self._transport
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - however it ended, the child is gone
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self.closed.done():
            return
        if error:
            self.closed.set_exception(error)
        else:
            self.closed.set_result(None)
