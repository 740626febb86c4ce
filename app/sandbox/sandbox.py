"""Sandboxed child processes with time and memory limits for untrusted work.

A request can make a template or a grammar run forever, and a thread cannot be killed. A child sets its own limits and
handles one request after another (app/sandbox/sandbox_child.py); a child that does not respond in time is killed and
replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from app.access.tenant_queue import TenantQueue, Turn, WorkAccount
from app.common.errors import EngineFailed
from app.sandbox.sandbox_child import LENGTH

_START_SECONDS = 30.0
_ROOT = Path(__file__).parents[2]
_WORKERS = 2
_MAX_BYTES = 16 << 20
"""Limit of the queued requests together, and of one response."""


class SandboxKilled(Exception):
    """The child was killed; the message says which limit it exceeded."""


class _ChildExited(Exception):
    """The child exited during a request."""


class SandboxPool:
    """Children that run `python -m MODULE`, started on the first request. Owned by the event loop.

    A turn lasts until a killed child is replaced: only the tenant whose request killed it waits for that.
    """

    def __init__(self, module: str, *arguments: str, seconds: float, max_jobs: int = 32) -> None:
        """`seconds` limits one response; `max_jobs` limits the pending requests."""
        # -P and an explicit path, so that a folder named app in the working directory is not imported.
        command = (sys.executable, "-P", "-m", module, str(seconds), *arguments)
        self._children = [SandboxedProcess(command, seconds) for _ in range(_WORKERS)]
        self._queue = TenantQueue(_WORKERS, max_jobs=max_jobs, max_size=_MAX_BYTES)
        self._replacements: set[asyncio.Task[None]] = set()

    @property
    def pids(self) -> list[int]:
        """Ids of the running children."""
        return [child.pid for child in self._children if child.pid is not None]

    async def call(self, request: bytes, account: WorkAccount, max_bytes: int = _MAX_BYTES) -> bytes:
        """A child's response of at most `max_bytes`. Raises SandboxKilled, Busy, EngineFailed."""
        with self._queue.admitted(account, len(request)):
            if not self.pids:  # the start of the first child is charged to no tenant
                await asyncio.shield(self._children[0].start())
            turn = await self._queue.acquire(account, len(request))
            child = self._children[turn.worker]
            for spare in self._children:
                spare.start()
            try:
                return await _call_with_retry(child, request, max_bytes)
            finally:
                if child.pid is None:
                    task = asyncio.create_task(_replace(child, turn))
                    self._replacements.add(task)
                    task.add_done_callback(self._replacements.discard)
                else:
                    turn.end()

    async def close(self) -> None:
        """Stops the children; idempotent. Pending requests fail."""
        self._queue.close()
        for task in self._replacements:
            task.cancel()
        await asyncio.gather(*(child.close() for child in self._children))
        await asyncio.gather(*self._replacements, return_exceptions=True)


class SandboxedProcess:
    """One child, which handles one request at a time."""

    def __init__(self, command: tuple[str, ...], seconds: float) -> None:
        self._command = command
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Process id of the child, while it runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    def start(self) -> asyncio.Task[None]:
        """Starts the child unless it runs; the task is done when it accepts requests, and fails with EngineFailed."""
        if self._starting is None or (self._starting.done() and self.pid is None):
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(lambda task: task.cancelled() or task.exception())  # may have no waiter
        return self._starting

    async def call(self, request: bytes, max_bytes: int) -> bytes:
        """The child's response. Raises SandboxKilled, _ChildExited, EngineFailed, after which the child is stopped."""
        await asyncio.shield(self.start())
        process = self._process
        if process is None:
            raise _ChildExited
        assert process.stdin and process.stdout
        try:
            process.stdin.write(LENGTH.pack(len(request)) + request)
            async with asyncio.timeout(self._seconds):
                await process.stdin.drain()
                return await _frame(process.stdout, max_bytes)
        except TimeoutError:
            await self._kill(process)
            raise SandboxKilled(f"took more than {self._seconds:g} seconds") from None
        except ValueError:
            await self._kill(process)
            raise SandboxKilled("took too much memory") from None
        except (OSError, asyncio.IncompleteReadError):
            await self._kill(process)
            raise _ChildExited from None
        except BaseException:  # cancelled: this response would be taken for the next request's
            await self._kill(process)
            raise

    async def close(self) -> None:
        """Stops the child; idempotent. A pending request fails."""
        self._is_closed = True
        if self._starting:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._process:
            await self._kill(self._process)

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        if self._process is process:
            self._process = None
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdin
        process.stdin.close()
        await process.wait()

    async def _start(self) -> None:
        if self._process:
            await self._kill(self._process)
        if self._is_closed:
            raise EngineFailed(f"the process of {self._command[3]} was closed")
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("INKSTREAM_")}
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl+C on the terminal must only reach the parent
        )
        assert process.stdout
        try:
            async with asyncio.timeout(_START_SECONDS):
                await _frame(process.stdout, 0)  # its imports are done
        except (OSError, asyncio.IncompleteReadError) as error:
            await self._kill(process)
            raise EngineFailed(f"the process of {self._command[3]} does not start") from error
        except BaseException:
            await self._kill(process)
            raise


async def _call_with_retry(child: SandboxedProcess, request: bytes, max_bytes: int) -> bytes:
    with contextlib.suppress(_ChildExited):
        return await child.call(request, max_bytes)
    # Something else may have killed it: retry the same request on a new child.
    with contextlib.suppress(_ChildExited):
        return await child.call(request, max_bytes)
    raise SandboxKilled("took too much memory")


async def _replace(child: SandboxedProcess, turn: Turn) -> None:
    try:
        with contextlib.suppress(EngineFailed):  # the next request reports it
            await asyncio.shield(child.start())
    finally:
        turn.end()


async def _frame(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > max_bytes:
        raise ValueError("the response is too long")
    return await reader.readexactly(length)
