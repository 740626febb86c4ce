"""Console output of a training run besides the progress line, and early ends: divergence and signals."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from model.files import CheckpointError, write_file


def duration(seconds: float | None) -> str:
    """Formats a duration in its largest units: seconds, minutes, or hours and minutes."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    if round(seconds) < 60:
        return f"{round(seconds)}s"
    minutes = round(seconds / 60)
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02}m"


def format_count(number: float) -> str:
    """Formats a count: exactly below a million, else in millions."""
    return f"{number / 1e6:.2f} M" if number >= 1e6 else f"{round(number):,}"


def short(number: float) -> str:
    """Formats a number below a billion in at most six columns."""
    if number < 1e4:
        return f"{number:.0f}"
    return f"{number / 1e3:.1f}k" if number < 1e6 else f"{number / 1e6:.2f}M"


_FIRST_SECONDS = 3.0
_EVERY_SECONDS = 5.0


def print_stdout(text: str) -> None:
    """Prints to stdout. Ignores a closed pipe (| head) or a full disk, which must not end hours of training."""
    _print(text, sys.stdout)


def print_stderr(text: str) -> None:
    """Prints to stderr. Ignores a closed one: the signal that stops the run may also have ended | tee."""
    _print(text, sys.stderr)


def write_extra(path: Path, content: str) -> None:
    """Replaces `path` atomically, or warns."""
    try:
        write_file(path, content.encode())
    except CheckpointError as error:
        print_stderr(f"warning: {error}; training continues")


class Ticker:
    """Prints progress of slow work, and nothing for fast work."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _FIRST_SECONDS

    def tick(self, text: str) -> None:
        """Reports progress, at most once per interval."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_SECONDS
            print_stderr(text)


def program_name() -> str:
    """How this program is called: `inkstream train` where it was started by that, otherwise `python -m model.train`."""
    return "inkstream train" if _is_verb() else "python -m model.train"


def program_command(verb: str) -> list[str]:
    """The command of a verb, train or serve, in the way this program was started."""
    if not _is_verb():
        return [_short_path(sys.executable), "-m", *{"train": ["model.train"], "serve": ["app", "serve"]}[verb]]
    if Path(sys.argv[0]).name == "inkstream":
        return [_short_path(sys.argv[0]), verb]
    return [_short_path(sys.executable), "-m", "inkstream", verb]


def _is_verb() -> bool:
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # None for a script
    return Path(sys.argv[0]).name == "inkstream" or (spec is not None and spec.name == "inkstream.__main__")


def _short_path(program: str) -> str:
    """Path of a program, relative to the working directory if it is inside."""
    directory, executable = Path.cwd(), Path(program)
    return str(executable.relative_to(directory) if executable.is_relative_to(directory) else executable)


ERASE_LINE = "\r\x1b[J"
"""To the end of the screen: a narrower window may have wrapped the line."""


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is an open terminal that can erase a line."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
    except ValueError:  # closed
        return False


def _print(text: str, stream: TextIO) -> None:
    """Prints in place of the progress bar, if there is one; the next redraw puts it below.

    Replaces characters that the stream cannot encode with "?": printing a sample must not fail a run.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    erase = ERASE_LINE if is_terminal(stream) else ""
    with contextlib.suppress(OSError, RuntimeError):
        print(erase + text.encode(encoding, errors="replace").decode(encoding), file=stream, flush=True)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl+C, termination by another process, and a closed terminal."""


class Diverged(RuntimeError):
    """The loss, its gradient or the weights are not finite. The weights were not saved."""

    def __init__(self, what: str, good: Path | None) -> None:
        """good: the last snapshot."""
        snapshot = f"the last good snapshot is {good}" if good else "there is no snapshot yet"
        super().__init__(
            f"{what}; {snapshot}. Start over with --overwrite and half the --lr (with Muon also the --matrix-lr), or a "
            "longer --warm-up"
        )


class Interrupted(RuntimeError):
    """A signal interrupted the run."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class StopRequest:
    """Whether a signal asked the run to stop."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the first signal; 0 before one arrived."""

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Records signals within the block. Signals that the parent process ignores stay ignored."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        handled = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]
        for number in handled:
            signal.signal(number, self._remember)
        try:
            yield
        finally:
            for number in handled:
                signal.signal(number, before[number])

    def raise_if_stopped(self) -> None:
        """Raises Interrupted if a signal has arrived."""
        if self.number:
            raise Interrupted(self.number)

    def _remember(self, number: int, _frame: object) -> None:
        self.number = self.number or number
        # Only this signal: torchrun adds its own SIGTERM to a terminal's SIGINT, which is not a second request.
        signal.signal(number, signal.SIG_DFL)
        print_stderr("saving, then exiting; send the same signal again to exit immediately")
