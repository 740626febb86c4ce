"""A child process for work that may never end or take all memory: asked, waited for, killed. Knows no question.

What a caller sends can make a template or a grammar run for ever, and a thread cannot be ended. The child sets its own
limits and answers questions one after the other (app/confined.py); where it does not, it is killed, and the next
question starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from app.confined import LENGTH
from app.engine.errors import EngineFailed, Unavailable

_START_SECONDS = 30.0
_ROOT = Path(__file__).parents[1]


class Killed(Exception):
    """The child gave no answer; the message says what it took too much of. The next question gets a new child."""


class Busy(Unavailable):
    """Too many questions wait already."""


class KillableHelper:
    """Runs `python -m MODULE` when it is first asked. Owned by the event loop; questions wait for one another."""

    def __init__(self, module: str, *arguments: str, seconds: float, most_waiting: int = 16) -> None:
        """`seconds` is what one answer may take; `most_waiting` bounds how many questions may be open."""
        # -P and our own path: a folder called app in the working directory is somebody else's.
        self._command = (sys.executable, "-P", "-m", module, str(seconds), *arguments)
        self._seconds = seconds
        self._most_waiting = most_waiting
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the child, while there is one."""
        return self._process.pid if self._process else None

    async def ask(self, question: bytes, most_bytes: int = 16 << 20) -> bytes:
        """The child's answer, of at most that many bytes. Raises Killed, Busy, EngineFailed."""
        if self._waiting >= self._most_waiting:
            raise Busy("too many requests of this kind are being looked at: try again in a moment", 1)
        self._waiting += 1
        try:
            async with self._turn:
                return await self._answer(question, most_bytes)
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        """Ends the child; any number of times. A question that is open fails."""
        if process := self._process:
            self._process = None
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            assert process.stdin
            process.stdin.close()
            await process.wait()

    async def _answer(self, question: bytes, most_bytes: int) -> bytes:
        if self._process and self._process.returncode is not None:  # it died while nobody asked
            await self.close()
        try:
            process = self._process or await self._start()
            assert process.stdin and process.stdout
            process.stdin.write(LENGTH.pack(len(question)) + question)
            async with asyncio.timeout(self._seconds):
                await process.stdin.drain()
                return await _frame(process.stdout, most_bytes)
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:  # a time-out is an OSError
            await self.close()
            took = f"took more than {self._seconds:g} seconds"
            raise Killed(took if isinstance(error, TimeoutError) else "took too much memory") from None
        except BaseException:  # whoever asked has left: the answer would be taken for the next question's
            await self.close()
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("INKSTREAM_")}
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl+C on the terminal is for us
        )
        assert process.stdout
        try:
            async with asyncio.timeout(_START_SECONDS):
                await _frame(process.stdout, 0)  # it has imported what it needs
        except (OSError, asyncio.IncompleteReadError) as error:
            raise EngineFailed(f"the process of {self._command[3]} does not start") from error
        return process


async def _frame(reader: asyncio.StreamReader, most_bytes: int) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > most_bytes:
        raise ValueError("the answer is too long")
    return await reader.readexactly(length)
