"""Lines to a descriptor by a thread of its own: whoever logs never waits for whoever reads. Knows no format.

A pipe takes 64 KiB; if nobody reads it, the next line would hold the event loop, or the engine, for ever.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import threading
import time
from queue import SimpleQueue

MOST_LINES = 4096
"""That may wait; what comes then is dropped and counted."""
_LAST_SECONDS = 1.0
_TOLD_SECONDS = 1.0
_log = logging.getLogger("inkstream")


class AsyncLogHandler(logging.Handler):
    """Formats where it is called, which is bounded, and writes elsewhere, which is not.

    It uses the descriptor and no stream: a stream has a lock, and a thread that holds it for ever would stop every
    print(), and the interpreter at its end.
    """

    def __init__(self, descriptor: int, encoding: str) -> None:
        super().__init__()
        self.dropped = 0
        """Lines that nobody will read."""
        self._descriptor = descriptor
        self._encoding = encoding
        self._waiting: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._told = 0
        self._told_at = 0.0
        self._is_stuck = False
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Never waits."""
        if self._waiting.qsize() >= MOST_LINES:
            self.dropped += 1
            return
        try:
            self.put(self.format(record))
        except Exception:
            self.handleError(record)

    def put(self, line: str) -> None:
        """A line as it is, however many wait."""
        self._waiting.put(f"{line}\n".encode(self._encoding, "backslashreplace"))

    def flush(self) -> None:
        """At the end, of a process or of what may still be told: waits until all is written, for a second at most."""
        done = threading.Event()
        self._waiting.put(done)
        self._is_stuck = not done.wait(0 if self._is_stuck else _LAST_SECONDS)

    def _run(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._write(item)
            late = time.monotonic() - self._told_at > _TOLD_SECONDS
            if self.dropped > self._told and (late or self._waiting.empty()):
                self._tell_dropped()

    def _tell_dropped(self) -> None:
        count, self._told, self._told_at = self.dropped - self._told, self.dropped, time.monotonic()
        words = "%d lines of the log were dropped: they were not read as fast as they were written"
        record = _log.makeRecord(_log.name, logging.WARNING, "", 0, words, (count,), None)
        self._write(f"{self.format(record)}\n".encode(self._encoding, "backslashreplace"))

    def _write(self, line: bytes) -> None:
        """One line a call: both processes write to one pipe, and up to 4 KiB nothing comes between."""
        try:
            while line:
                try:
                    line = line[os.write(self._descriptor, line) :]
                except BlockingIOError:  # whoever started us made it so
                    select.select([], [self._descriptor], [])
        except OSError:  # the reader has gone, or the disk is full
            self.dropped += 1


def impatient(descriptor: int) -> int:
    """The same pipe as a descriptor that loses what does not fit instead of waiting; else `descriptor` itself.

    For what is written where no thread can help: when native code crashes or hangs. The flag belongs to whoever shares
    the pipe, so it is opened a second time.
    """
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # another user's pipe, or a system without /proc
        pass
    return descriptor
