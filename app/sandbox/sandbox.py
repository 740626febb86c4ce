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
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from app.access.tenant_queue import TenantQueue, WorkAccount
from app.common.errors import EngineFailed
from app.sandbox.sandbox_child import LENGTH

_START_SECONDS = 30.0
_ROOT = Path(__file__).parents[2]
_WORKERS = 2
_MAX_BYTES = 16 << 20
"""Limit of the queued requests together, and of one response."""


class SandboxKilled(Exception):
    """The child was killed; the message says which limit it exceeded."""


class SandboxPool:
    """Children that run `python -m MODULE`, started on the first request. Owned by the event loop.

    A turn lasts until a killed child is replaced: only the tenant whose request killed it waits for that.
    """

    def __init__(self, module: str, *arguments: str, seconds: float, max_jobs: int = 32) -> None:
        """`seconds` limits one response; `max_jobs` limits the pending requests."""
        self._command = (module, str(seconds), *arguments)
        self._seconds = seconds
        self._children: dict[int, SandboxedProcess] = {}  # by worker
        self._started: dict[int, asyncio.Future[None]] = {}
        self._queue = TenantQueue(_WORKERS, max_jobs=max_jobs, max_size=_MAX_BYTES)
        # For each worker a thread that waits for its child, and one that has not noticed that its child was killed.
        self._threads = ThreadPoolExecutor(2 * _WORKERS, "sandbox")
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Ids of the running children."""
        return [child.pid for child in self._children.values() if child.is_running]

    async def call(self, request: bytes, account: WorkAccount, max_bytes: int = _MAX_BYTES) -> bytes:
        """A child's response of at most `max_bytes`. Raises SandboxKilled, Busy, EngineFailed."""
        with self._queue.admitted(account, len(request)):
            if not self.pids:  # the start of the first child is charged to no tenant
                await asyncio.shield(self._start(0))
            turn = await self._queue.acquire(account, len(request))
            try:
                for worker in range(_WORKERS):
                    self._start(worker)
                for _ in range(2):  # something else may have killed the child; a second death is caused by the request
                    if (response := await self._call(turn.worker, request, max_bytes)) is not None:
                        return response
                raise SandboxKilled("took too much memory")
            finally:
                if (started := self._start(turn.worker)).done():
                    turn.end()
                else:  # a child that does not start is reported by the next request
                    started.add_done_callback(lambda _: turn.end())

    async def close(self) -> None:
        """Stops the children; idempotent. Pending requests fail."""
        self._is_closed = True
        self._queue.close()
        for child in self._children.values():
            child.kill()
        self._threads.shutdown(wait=False)

    def _start(self, worker: int) -> asyncio.Future[None]:
        """Starts the worker's child unless it runs. Done when it accepts requests; fails with EngineFailed."""
        loop = asyncio.get_running_loop()
        child = self._children.get(worker)
        if self._is_closed:
            self._started[worker] = loop.create_future()
            self._started[worker].set_exception(EngineFailed(f"the process of {self._command[0]} was closed"))
        elif child is None or not child.is_running:
            if child:
                child.kill()  # closes its pipes
            self._children[worker] = child = SandboxedProcess(self._command)
            self._started[worker] = loop.run_in_executor(self._threads, child.wait_ready)
        else:
            return self._started[worker]
        self._started[worker].add_done_callback(lambda future: future.cancelled() or future.exception())
        return self._started[worker]

    async def _call(self, worker: int, request: bytes, max_bytes: int) -> bytes | None:
        """The response; None if the child died, or said too much."""
        await asyncio.shield(self._start(worker))
        child = self._children[worker]
        work = asyncio.get_running_loop().run_in_executor(self._threads, child.call, request, self._seconds, max_bytes)
        try:
            return await work
        except TimeoutError:
            raise SandboxKilled(f"took more than {self._seconds:g} seconds") from None
        except BaseException:  # cancelled: this response would be taken for the next request's
            child.kill()
            raise


class SandboxedProcess:
    """One child, which handles one request at a time. Its methods block the thread that calls them, and no other."""

    def __init__(self, command: Sequence[str]) -> None:
        """Spawns `python -m COMMAND`; it accepts requests when wait_ready() returns."""
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("INKSTREAM_")}
        self._name = command[0]
        self._process = subprocess.Popen(
            # -P and an explicit path, so that a folder named app in the working directory is not imported.
            [sys.executable, "-P", "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl+C on the terminal must only reach the parent
        )
        self.pid = self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the child has not ended."""
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Waits until its imports are done. Raises EngineFailed."""
        with contextlib.suppress(TimeoutError):
            if self._with_timeout(_START_SECONDS, lambda: self._read(0)) is not None:
                return
        raise EngineFailed(f"the process of {self._name} does not start")

    def call(self, request: bytes, seconds: float, max_bytes: int) -> bytes | None:
        """The response; None if the child died, or said too much. Raises TimeoutError. No child survives an error."""

        def exchange() -> bytes | None:
            assert self._process.stdin
            self._process.stdin.write(LENGTH.pack(len(request)) + request)
            self._process.stdin.flush()
            return self._read(max_bytes)

        return self._with_timeout(seconds, exchange)

    def kill(self) -> None:
        """Kills the process; idempotent."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(OSError):  # unread data in the pipe
            self._process.stdin.close()
        self._process.stdout.close()

    def _with_timeout(self, seconds: float, exchange: Callable[[], bytes | None]) -> bytes | None:
        has_timed_out, response = threading.Event(), None

        def end() -> None:
            has_timed_out.set()
            self._process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            response = exchange()
        except (OSError, ValueError):  # the pipe is broken or closed
            pass
        finally:
            timer.cancel()
            if response is None:
                self.kill()
        if has_timed_out.is_set():
            raise TimeoutError
        return response

    def _read(self, max_bytes: int) -> bytes | None:
        assert self._process.stdout
        header = self._process.stdout.read(LENGTH.size)
        if len(header) < LENGTH.size or (length := LENGTH.unpack(header)[0]) > max_bytes:
            return None
        content = self._process.stdout.read(length)
        return content if len(content) == length else None
