"""Logging of both processes: one event a line, written by a thread so that loggers never block.

Client data must not leak into a log: control characters are escaped, and an exception is logged by its type and where
it was raised, without its message, which often quotes client data.
"""

from __future__ import annotations

import json
import logging
import os
import select
import stat
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal

# A pipe buffers 64 KiB; without a reader, the next line would block the event loop, or the engine, forever.

MAX_PENDING_LINES = 4096
"""Lines that may wait to be written; further lines are dropped and counted."""
_PAUSE_SECONDS = 0.02
"""Seconds until the thread writes again: waking it for each line took a tenth of the API process's time for a short
request, and mostly made the event loop wait for the GIL."""
_ATOMIC_BYTES = 4096
"""PIPE_BUF of Linux: both processes share a pipe, and writes of up to so many bytes are atomic (pipe(7))."""
_FLUSH_SECONDS = 1.0
REQUEST = "inkstream.request"
"""Logger of the request log: one line for each request, with its facts in `fields`."""
START = "inkstream.start"
"""Logger of the steps of a start, which the text format shows as one summary instead (app/start_summary.py)."""
_log = logging.getLogger("inkstream")


class AsyncLogHandler(logging.Handler):
    """Formats in the calling thread, which takes bounded time, and writes in a separate thread, which may block.

    Writes to the descriptor, not to a stream: a stream has a lock, and a thread that holds it forever would block every
    print(), and the interpreter at exit.
    """

    def __init__(self, descriptor: int, encoding: str) -> None:
        super().__init__()
        self.dropped = 0
        """Number of dropped lines."""
        self._descriptor = descriptor
        self._encoding = encoding
        self._queue: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._hurry = threading.Event()
        """Ends the pause between two batches."""
        self._reported = 0
        self._late = threading.Event()
        """The last flush that took too long; set once its turn has come."""
        self._late.set()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues a record; never blocks."""
        if self._queue.qsize() >= MAX_PENDING_LINES:
            self.dropped += 1
            return
        try:
            self.put(self.format(record))
        except Exception:
            self.handleError(record)
        if record.levelno >= logging.WARNING:  # it may be the last line of this process
            self._hurry.set()

    def put(self, line: str) -> None:
        """Queues a line unformatted, even if the queue is full."""
        self._queue.put(f"{line}\n".encode(self._encoding, "backslashreplace"))

    def flush(self) -> None:
        """Waits until all lines are written, for a second at most; not at all while an earlier flush is late."""
        done = threading.Event()
        self._queue.put(done)
        self._hurry.set()
        if not done.wait(_FLUSH_SECONDS if self._late.is_set() else 0):
            self._late = done

    def _run(self) -> None:
        batch = b""
        while True:
            item = self._queue.get()
            if isinstance(item, bytes):
                if batch and len(batch) + len(item) > _ATOMIC_BYTES:
                    self._write(batch)
                    batch = b""
                batch += item
                if not self._queue.empty():
                    continue
            self._write(batch)
            batch = b""
            if count := self.dropped - self._reported:
                self._reported += count
                message = "%d lines of the log were dropped: the reader of the log is too slow"
                record = _log.makeRecord(_log.name, logging.WARNING, "", 0, message, (count,), None)
                self._write(f"{self.format(record)}\n".encode(self._encoding, "backslashreplace"))
            if isinstance(item, threading.Event):
                item.set()
            elif self._queue.empty():
                self._hurry.wait(_PAUSE_SECONDS)
                self._hurry.clear()

    def _write(self, lines: bytes) -> None:
        """Writes a line, or several that are one atomic write."""
        try:
            while lines:
                try:
                    lines = lines[os.write(self._descriptor, lines) :]
                except BlockingIOError:  # the parent process made the pipe non-blocking
                    select.select([], [self._descriptor], [])
        except OSError:  # the reader has closed the pipe, or the disk is full
            self.dropped += lines.count(b"\n")


def open_nonblocking(descriptor: int) -> int:
    """Opens a pipe a second time, non-blocking, so that output that does not fit is lost; else returns `descriptor`.

    For output when native code crashes or hangs, where a writer thread cannot help. Processes that share a pipe also
    share its flags, so changing them would affect the others.
    """
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # another user's pipe, or a system without /proc
        pass
    return descriptor


_ROOT = Path(__file__).parents[2]
_MAX_FRAMES = 30

Format = Literal["text", "json"]
"""`text` is for a person who watches, `json` for programs."""


def set_up(level: str, log_format: Format) -> None:
    """Routes all loggers and uncaught exceptions of this process to stderr. `level` as in the settings."""
    handler = _handler()
    handler.setFormatter(_TextFormatter() if log_format == "text" else _JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level == "info":
        # uvicorn announces the start and the end of its server; the service's own lines say more.
        hidden = {"uvicorn.error", *([START] if log_format == "text" else [])}
        handler.addFilter(lambda record: record.levelno > logging.INFO or record.name not in hidden)
    logging.captureWarnings(True)
    # No format names the caller, thread or process: finding them is a third of a record's time (logging, Optimization).
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    sys.excepthook = _on_uncaught
    threading.excepthook = lambda args: _on_uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def print_lines(text: str) -> None:
    """Writes unformatted lines in their turn among the log lines; never blocks."""
    for writer in _writers():
        writer.put(text)


def write_line(line: str) -> None:
    """Writes an unformatted line for the operator after pending log lines; blocks for a second at most."""
    if _writers():
        print_lines(line)
        flush()
    else:
        print(line, file=sys.stderr, flush=True)


def flush() -> None:
    """Waits until pending log lines are written, for a second at most."""
    for writer in _writers():
        writer.flush()


def dropped() -> int:
    """Number of log lines that this process dropped."""
    return sum(writer.dropped for writer in _writers())


def resolve_format(setting: Literal["auto", "text", "json"]) -> Format:
    """Resolves `auto`: text if stderr is a terminal, otherwise JSON."""
    if setting == "auto":
        return "text" if sys.stderr is not None and sys.stderr.isatty() else "json"
    return setting


def trace_of(error: BaseException) -> list[str]:
    """Type and source lines of an error and its causes, innermost frame first, without their messages."""
    lines: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        # strerror is one of the operating system's fixed texts and contains no client data.
        reason = f" ({current.strerror})" if isinstance(current, OSError) and current.strerror else ""
        lines.append(f"{'because of' if lines else 'Traceback of'} {type(current).__name__}{reason}")
        frames = traceback.extract_tb(current.__traceback__)
        lines += [f"{_short_path(f.filename)}:{f.lineno} {f.name}" for f in reversed(frames[-_MAX_FRAMES:])]
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return lines


def _message(record: logging.LogRecord) -> str:
    message = record.getMessage()
    # asyncio adds lines that show the future, and with it the exception and its message.
    return message.partition("\n")[0] if record.name == "asyncio" else message


def _trace(record: logging.LogRecord) -> list[str]:
    return trace_of(record.exc_info[1]) if record.exc_info and record.exc_info[1] else []


class _JsonFormatter(logging.Formatter):
    """One JSON object in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields: dict[str, Any] = {"time": at, "level": record.levelname.lower(), "message": _message(record)}
        fields |= getattr(record, "fields", {})
        if trace := _trace(record):
            fields["trace"] = trace
        return json.dumps(fields)


class _TextFormatter(logging.Formatter):
    """Local time, level above info, message, and fields as name=value; the facts of a request in a few words."""

    def format(self, record: logging.LogRecord) -> str:
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        if record.name == REQUEST and "status" in fields:
            parts = [_request_facts(fields)]
        else:
            parts = [_message(record), *(f"{k}={v}" for k, v in fields.items() if v is not None)]
        if record.levelno > logging.INFO:
            parts.insert(0, f"{record.levelname.lower()}:")
        if trace := _trace(record):
            parts.append(f"[{' < '.join(trace)}]")
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(parts))
        return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(record.created))}  {line}"


def _request_facts(fields: Mapping[str, Any]) -> str:
    """Status, route, tokens, speed, time, how it ended, stream and key; the request id where the request failed."""
    is_failure = fields["status"] >= 400 or fields["outcome"] in ("disconnected", "error", "server_error")
    tokens, speed = fields.get("completion_tokens"), fields.get("tokens_per_second")
    facts = [
        "" if tokens is None else f"{tokens:,} tokens",
        f"{speed:,.0f} tokens/s" if speed else "",
        f"{fields['duration_ms']:,.1f} ms",
        "" if fields["outcome"] == "ok" else str(fields["outcome"]),
        f"stream {fields['stream']}" if fields.get("stream") else "",
        f"key {fields['key']}" if fields["key"] else "",
        str(fields["request_id"]) if is_failure else "",
    ]
    route = f"{fields['method'] or '-'} {fields['route'] or '(no route)'}"
    return f"{fields['status']}  {route}  {', '.join(filter(None, facts))}"


def _handler() -> logging.Handler:
    """AsyncLogHandler if stderr is a file of the operating system; else a StreamHandler, which cannot block."""
    try:
        return AsyncLogHandler(sys.stderr.fileno(), sys.stderr.encoding)
    except (AttributeError, OSError):  # closed, or an in-memory buffer
        return logging.StreamHandler(sys.stderr)


def _writers() -> list[AsyncLogHandler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, AsyncLogHandler)]


def _short_path(filename: str) -> str:
    path = Path(filename)
    if path.is_relative_to(_ROOT):
        return str(path.relative_to(_ROOT))
    return "/".join(path.parts[-2:])


def _on_uncaught(kind: type[BaseException], error: BaseException | None, where: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        return
    _log.critical("uncaught exception", exc_info=(kind, error or kind(), where))
