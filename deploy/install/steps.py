"""A command under way, and the lines that a reader sees."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


class Progress:
    """One line per finished step; on a terminal, below them, the one under way."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._erase()
        print(text, file=self._stream, flush=True)

    def step(self, name: str, text: str, seconds: float, size: int) -> None:
        """A finished step."""
        self.say(f"  {name:<12} {seconds:6.1f} s  {size_text(size):>7}  {text}")

    def running(self, name: str, seconds: float, downloaded: int) -> None:
        """The step under way, on a terminal."""
        if self._is_terminal:
            self._erase()
            note = f"{size_text(downloaded):>7} fetched " if downloaded else ""
            print(f"  {name:<12} {seconds:6.1f} s  {note}...", end="", file=self._stream, flush=True)

    def _erase(self) -> None:
        if self._is_terminal:
            print("\r\033[K", end="", file=self._stream)


def size_text(number: int) -> str:
    """In GB, MB or kB, whichever tells most."""
    for unit, least in (("GB", 10**9), ("MB", 10**6)):
        if number >= least:
            return f"{number / least:.{1 if unit == 'GB' else 0}f} {unit}"
    return f"{max(number, 0) / 1000:.0f} kB"


def bytes_below(folder: str | Path) -> int:
    """Space that a folder takes on disk."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                total += bytes_below(entry.path)
            else:
                with contextlib.suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


class Running:
    """A command whose output goes to a file. It inherits the lock: one that outlives make keeps others waiting."""

    def __init__(
        self, command: Sequence[str], *, folder: Path, log: Path, environment: Mapping[str, str], lock: int
    ) -> None:
        self.began = time.monotonic()
        self.seconds = 0.0
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=(lock,),
            )

    def poll(self) -> int | None:
        """The exit code, once it has ended."""
        code = self._process.poll()
        if code is not None and not self.seconds:
            self.seconds = time.monotonic() - self.began
        return code

    def output(self) -> str:
        """What it wrote."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Ends it, if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
