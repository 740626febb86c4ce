"""Sandboxed child processes with time and memory limits for untrusted work.

A request can make a template, a grammar or a tokenizer run forever, and a thread cannot be killed. A child sets its own
limits and handles one request after another (app/sandbox/sandbox_child.py); a child that does not respond in time is
killed and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Sequence

from app.access.worker_turns import TenantThreads, WorkAccount
from app.common.errors import EngineFailed
from app.common.frames import encode_body, read_body
from app.common.python_child import python_command, python_environment
from app.common.start_signals import stop_signals_blocked

_START_SECONDS = 30.0
_WORKERS = 2
"""Children that are kept; more run only while more threads call."""
_MAX_BYTES = 16 << 20
"""Limit of the queued requests together, and of one response."""


class SandboxError(ValueError):
    """The work could not be done within its limits; the message says why: takes more than ..."""


class Sandbox:
    """Children that run `python -m MODULE`, started by the first call. Thread-safe; a call blocks its thread alone."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = (module, *arguments)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Ids of the running children."""
        with self._lock:
            return [child.pid for child in self._all if child.is_running]

    def start(self) -> None:
        """Starts a child that the next call finds ready. Raises EngineFailed."""
        self._release(self._started())

    def call(self, request: bytes, *, seconds: float, max_bytes: int) -> bytes:
        """A child's response of at most `max_bytes`; returns once a killed child is replaced.

        Raises SandboxError, EngineFailed.
        """
        for _ in range(2):  # something else may have killed the child; a second death is caused by the request
            with self._lock:
                child = self._idle.pop() if self._idle else None
            child = child or self._started()
            try:
                response = child.response(request, seconds, max_bytes)
            except TimeoutError:
                raise SandboxError(f"takes more than {seconds:.1f} seconds") from None
            finally:
                self._release(child)
            if response is not None:
                return response
        raise SandboxError("takes too much memory")

    def close(self) -> None:
        """Stops the children; idempotent. Pending calls fail."""
        with self._lock:
            self._is_closed = True
            children, self._all, self._idle = self._all, set(), []
        for child in children:
            child.kill()

    def _started(self) -> _Child:
        """A new child that accepts requests."""
        with self._lock:
            if self._is_closed:
                raise EngineFailed(f"the process of {self._command[0]} was closed")
            child = _Child(self._command)
            self._all.add(child)
        with contextlib.suppress(TimeoutError):
            if child.response(None, _START_SECONDS, 0) is not None:
                return child
        self._discard(child)
        raise EngineFailed(f"the process of {self._command[0]} does not start")

    def _release(self, child: _Child) -> None:
        """Keeps a child for the next call, or its replacement if it died."""
        if not child.is_running:
            self._discard(child)
            try:
                child = self._started()
            except EngineFailed:  # the next call reports it
                return
        with self._lock:
            if len(self._idle) < _WORKERS and not self._is_closed:
                self._idle.append(child)
                return
        self._discard(child)

    def _discard(self, child: _Child) -> None:
        with self._lock:
            self._all.discard(child)
        child.kill()


class SandboxPool:
    """A sandbox whose children tenants take in turns. Owned by the event loop.

    A turn lasts until a killed child is replaced: only the tenant whose request killed it waits for that.
    """

    def __init__(self, module: str, *arguments: str, seconds: float, max_jobs: int = 32) -> None:
        """`seconds` limits one response; `max_jobs` limits the pending requests."""
        self._sandbox = Sandbox(module, str(seconds), *arguments)
        self._seconds = seconds
        self._threads = TenantThreads("sandbox", _WORKERS, max_jobs=max_jobs, max_size=_MAX_BYTES)
        self._starting: asyncio.Future[None] | None = None

    @property
    def pids(self) -> list[int]:
        """Ids of the running children."""
        return self._sandbox.pids

    async def call(self, request: bytes, account: WorkAccount) -> bytes:
        """A child's response. Raises SandboxError, Busy, EngineFailed."""
        with self._threads.admitted(account, len(request)):
            await self._start()

            def work() -> bytes:
                return self._sandbox.call(request, seconds=self._seconds, max_bytes=_MAX_BYTES)

            return await self._threads.run(work, account, len(request))

    def close(self) -> None:
        """Stops the children; idempotent. Pending requests fail."""
        self._threads.close()
        self._sandbox.close()

    async def _start(self) -> None:
        """Starts the first children, which is charged to no tenant; returns when one is ready. Raises EngineFailed."""
        starting = self._starting
        if starting is None or (starting.done() and (starting.cancelled() or starting.exception() or not self.pids)):
            loop = asyncio.get_running_loop()
            starts = [loop.run_in_executor(None, self._sandbox.start) for _ in range(_WORKERS)]
            for start in starts:
                start.add_done_callback(lambda done: done.cancelled() or done.exception())
            starting = self._starting = starts[0]
        await asyncio.shield(starting)


class _Child:
    """One process, which handles one request at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        """Spawns `python -m COMMAND`, which writes an empty response once its imports are done."""
        environment = {name: value for name, value in python_environment().items() if not name.startswith("INKSTREAM_")}
        with stop_signals_blocked():  # for as long as the child runs
            self._process = subprocess.Popen(
                python_command(*command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**environment, "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,  # Ctrl+C on the terminal must only reach the parent
            )
        self.pid = self._process.pid
        threading.Thread(target=self._reap, name="sandbox-reaper", daemon=True).start()

    def _reap(self) -> None:
        """Collects the exit status when the child ends: one that is killed between two calls would stay a zombie."""
        with contextlib.suppress(ChildProcessError):  # something else was faster
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._process.poll()

    @property
    def is_running(self) -> bool:
        """Whether the child has not ended."""
        return self._process.poll() is None

    def response(self, request: bytes | None, seconds: float, max_bytes: int) -> bytes | None:
        """The response to a request, or with None the first one; None if the child died or wrote over `max_bytes`.

        Raises TimeoutError. No child survives an error.
        """
        deadline, content = time.monotonic() + seconds, None
        timer = threading.Timer(seconds, self._process.kill)
        timer.daemon = True
        timer.start()
        try:
            assert self._process.stdin and self._process.stdout
            if request is not None:
                self._process.stdin.write(encode_body(request))
                self._process.stdin.flush()
            content = read_body(self._process.stdout, max_bytes)
        except (OSError, ValueError):  # the pipe is broken or closed
            pass
        finally:
            timer.cancel()
            if content is None:
                self.kill()
        if content is None and time.monotonic() >= deadline:
            raise TimeoutError
        return content

    def kill(self) -> None:
        """Kills the process; idempotent."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError):  # unread data in the pipe
            self._process.stdin.close()
        self._process.stdout.close()
