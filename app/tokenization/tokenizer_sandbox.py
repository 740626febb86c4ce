"""Sandboxed processes that run a tokenizer whose regular expressions are not known to be linear.

A call into the tokenizers library cannot be interrupted, and it may hold the GIL. A child process can be killed
(app/tokenization/tokenizer_worker.py). Calls block the calling thread and no other: make them from worker threads.
"""

from __future__ import annotations

import json
import threading
from array import array
from pathlib import Path
from typing import Literal

import msgspec

from app.common.errors import EngineFailed
from app.sandbox.sandbox import SandboxedProcess
from model.files import snapshot_files
from model.tokenizer.token_spans import CompactSpans, Spans

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
        self._command = ("app.tokenization.tokenizer_worker", str(weights), purpose, files)
        self._lock = threading.Lock()
        self._idle: list[SandboxedProcess] = []
        self._all: set[SandboxedProcess] = set()
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
                response = child.call(content, seconds, _MAX_RESPONSE_BYTES)
            except TimeoutError:
                raise TooSlow(f"takes more than {seconds:.1f} s") from None
            finally:
                self._release(child)
            if response is not None:
                reply = msgspec.msgpack.decode(response, type=TokenizerReply)
                if reply.problem:
                    raise TooSlow(reply.problem)
                return reply
        raise TooSlow("takes too much memory")

    def _acquire(self) -> SandboxedProcess:
        with self._lock:
            if self._is_closed:
                raise EngineFailed("the tokenizer's process was closed")
            if self._idle:
                return self._idle.pop()
            child = SandboxedProcess(self._command)
            self._all.add(child)
        try:
            child.wait_ready()
        except BaseException:
            self._release(child)
            raise
        return child

    def _release(self, child: SandboxedProcess) -> None:
        with self._lock:
            if child.is_running and len(self._idle) < _MAX_IDLE and not self._is_closed:
                self._idle.append(child)
                return
            self._all.discard(child)
        child.kill()


def _numbers(content: bytes) -> array[int]:
    numbers = array("I")
    numbers.frombytes(content)
    return numbers
