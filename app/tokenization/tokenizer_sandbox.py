"""Sandboxed processes that run a tokenizer whose regular expressions are not known to be linear.

A call into the tokenizers library cannot be interrupted, and it may hold the GIL. A child process can be killed
(app/tokenization/tokenizer_worker.py). Calls block the calling thread and no other: make them from worker threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from app.common.errors import EngineFailed
from app.sandbox.sandbox_child import LENGTH
from model.files import snapshot_files
from model.tokenizer.token_spans import CompactSpans, Spans

_ROOT = Path(__file__).parents[2]
_START_SECONDS = 30.0
_MAX_IDLE = 2
"""Idle children that are kept; more run only while more threads call."""
_MAX_RESPONSE_BYTES = 64 << 20
MAX_ATTACK_SECONDS = 0.25
"""CPU time limit for 4,096 characters; known patterns take 10 ms."""


class Encode(msgspec.Struct, tag=True):
    """Request: a text to encode."""

    text: str
    is_plain: bool
    has_spans: bool = False


class AttackTrial(msgspec.Struct, tag=True):
    """Request: a pattern to time on adversarial texts; None means the whole tokenizer."""

    pattern: str | None


class TokenizerReply(msgspec.Struct):
    """Response: arrays of unsigned 32-bit numbers, as bytes."""

    ids: bytes = b""
    starts: bytes = b""
    ends: bytes = b""
    problem: str = ""


class TooSlow(ValueError):
    """The tokenizer took longer than allowed, took too much memory, or gave up; the message says which."""


class TokenizerSandbox:
    """A tokenizer in child processes, which start on the first call. Thread-safe."""

    def __init__(self, weights: Path, purpose: Literal["encode", "attack"] = "encode") -> None:
        # Children that start later still read the snapshot that is in use now (model/files.py).
        files = json.dumps(dict(snapshot_files(weights)))
        self._command = [sys.executable, "-P", "-m", "app.tokenization.tokenizer_worker", str(weights), purpose, files]
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._is_closed = False

    def encode(self, text: str, *, is_plain: bool = False, seconds: float) -> list[int]:
        """Ids of a text, with the special tokens that the tokenizer adds or plain. Raises TooSlow, EngineFailed."""
        return list(_numbers(self._call(Encode(text=text, is_plain=is_plain), seconds).ids))

    def encode_spans(self, text: str, *, is_plain: bool = False, seconds: float) -> CompactSpans:
        """Like Tokenizer.encode_spans(). Raises TooSlow, EngineFailed."""
        response = self._call(Encode(text=text, is_plain=is_plain, has_spans=True), seconds)
        spans = CompactSpans()
        spans.append(Spans(*map(_numbers, (response.ids, response.starts, response.ends))))
        return spans

    def attack(self, pattern: str | None, *, seconds: float) -> None:
        """Times a pattern, or with None the whole tokenizer, on adversarial texts. Raises TooSlow, EngineFailed."""
        self._call(AttackTrial(pattern=pattern), seconds)

    @property
    def pids(self) -> list[int]:
        """Ids of the running children."""
        with self._lock:
            return [child.pid for child in self._all]

    def close(self) -> None:
        """Stops the children; idempotent. Pending calls fail."""
        with self._lock:
            self._is_closed = True
            children, self._all, self._idle = self._all, set(), []
        for child in children:
            child.kill()

    def _call(self, request: Encode | AttackTrial, seconds: float) -> TokenizerReply:
        content = msgspec.msgpack.encode(request)
        for _ in range(2):  # something else may have killed the child; a second death is caused by the request
            child = self._acquire()
            try:
                response = child.call(content, seconds)
            except BaseException:
                self._release(child, is_usable=False)
                raise
            self._release(child, is_usable=response is not None)
            if response is not None:
                reply = msgspec.msgpack.decode(response, type=TokenizerReply)
                if reply.problem:
                    raise TooSlow(reply.problem)
                return reply
        raise TooSlow("takes too much memory")

    def _acquire(self) -> _Child:
        with self._lock:
            if self._is_closed:
                raise EngineFailed("the tokenizer's process was closed")
            if self._idle:
                return self._idle.pop()
        child = _Child(self._command)
        with self._lock:
            self._all.add(child)
            if self._is_closed:
                child.kill()
        return child

    def _release(self, child: _Child, *, is_usable: bool) -> None:
        with self._lock:
            if is_usable and len(self._idle) < _MAX_IDLE and not self._is_closed:
                self._idle.append(child)
                return
            self._all.discard(child)
        child.kill()


class _Child:
    """One process, which handles one request at a time."""

    def __init__(self, command: list[str]) -> None:
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("INKSTREAM_")}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl+C on the terminal must not end it
        )
        self.pid = self._process.pid
        if self._with_timeout(_START_SECONDS, self._read) is None:
            self.kill()
            raise EngineFailed("the tokenizer's process does not start")

    def call(self, request: bytes, seconds: float) -> bytes | None:
        """The response; None if the child died. Raises TooSlow."""

        def exchange() -> bytes | None:
            assert self._process.stdin
            self._process.stdin.write(LENGTH.pack(len(request)) + request)
            self._process.stdin.flush()
            return self._read()

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
        has_timed_out = False

        def end() -> None:
            nonlocal has_timed_out
            has_timed_out = True
            self._process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            response = exchange()
        except (OSError, ValueError):  # the pipe is broken or closed
            response = None
        finally:
            timer.cancel()
        if has_timed_out:
            raise TooSlow(f"takes more than {seconds:.1f} s")
        return response

    def _read(self) -> bytes | None:
        assert self._process.stdout
        header = self._process.stdout.read(LENGTH.size)
        if len(header) < LENGTH.size or (length := LENGTH.unpack(header)[0]) > _MAX_RESPONSE_BYTES:
            return None
        content = self._process.stdout.read(length)
        return content if len(content) == length else None


def _numbers(content: bytes) -> array[int]:
    numbers = array("I")
    numbers.frombytes(content)
    return numbers
