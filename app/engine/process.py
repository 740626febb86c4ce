"""One engine process and its pipe: spawn, frames in and out, end. asyncio, no torch, no requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from app.engine.frames import HEADER_BYTES, Down, Up, body_length, decode_up, encode_frame

# -P and our own path: a folder called app in the working directory is somebody else's.
WORKER = (sys.executable, "-P", "-m", "app.engine.worker")
_ROOT = Path(__file__).parents[2]


class EngineProcess:
    """A child whose only links are a socket pair and its exit code; it ends when the pipe does."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def spawn(cls, command: Sequence[str] = WORKER) -> EngineProcess:
        """Starts `command` with the descriptor of its end of the pipe as the last argument."""
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
        return cls(process, *await asyncio.open_connection(sock=ours))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def receive(self) -> Up | None:
        """The next frame; None when the process has gone."""
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            return decode_up(await self._reader.readexactly(body_length(header)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def send(self, frame: Down) -> None:
        """Never waits; what is sent to a process that has gone is lost with it."""
        if not self._writer.is_closing():
            self._writer.write(encode_frame(frame))

    def kill(self) -> None:
        """At once; no error where it is gone already."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self, patience_seconds: float = 1.0) -> int:
        """Closes the pipe, waits for the process to follow, kills it where it does not. Returns its exit code."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), patience_seconds)
        except TimeoutError:
            self.kill()
        except asyncio.CancelledError:  # no time to wait, and no orphan either
            self.kill()
            raise
        return await self._process.wait()
