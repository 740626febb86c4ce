"""Console output of a training run, which a closed pipe or a full disk must not end."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from model.files import CheckpointError, write_file

ERASE_LINE = "\r\x1b[J"
"""To the end of the screen: a narrower window may have wrapped the line."""
_FIRST_SECONDS, _EVERY_SECONDS = 3.0, 5.0


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


def print_stdout(text: str) -> None:
    """Prints to stdout. Ignores a closed pipe (| head) or a full disk."""
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
    """How a user calls this program: `inkstream train` where it was started by that, else `python -m model.train`."""
    return "inkstream train" if program_command("train")[-1] == "train" else "python -m model.train"


def program_command(verb: str) -> list[str]:
    """The command of a verb, train or serve, in the way this program was started."""
    program, executable = Path(sys.argv[0]), _short_path(sys.executable)
    if program.name == "inkstream":
        return [_short_path(program), verb]
    if program.parent.name == "inkstream":  # python -m inkstream
        return [executable, "-m", "inkstream", verb]
    return [executable, "-m", *{"train": ["model.train"], "serve": ["app", "serve"]}[verb]]


def _short_path(program: str | Path) -> str:
    """Path of a program, relative to the working directory if it is inside."""
    directory, executable = Path.cwd(), Path(program)
    return str(executable.relative_to(directory) if executable.is_relative_to(directory) else executable)


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
