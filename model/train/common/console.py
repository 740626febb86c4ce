"""What a training run tells its user outside the progress line, and how it ends early: diverged, or by a signal."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model.files import CheckpointError, write_file


def duration(seconds: float | None) -> str:
    """In the two units that matter."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    if round(seconds) < 60:
        return f"{round(seconds)}s"
    minutes = round(seconds / 60)
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02}m"


def counted(number: float) -> str:
    """To its last digit below a million."""
    return f"{number / 1e6:.2f} M" if number >= 1e6 else f"{round(number):,}"


def short(number: float) -> str:
    """In six columns at most, up to a billion."""
    if number < 1e4:
        return f"{number:.0f}"
    return f"{number / 1e3:.1f}k" if number < 1e6 else f"{number / 1e6:.2f}M"


_FIRST_SECONDS = 3.0
_EVERY_SECONDS = 5.0


def say(text: str) -> None:
    """Prints to stdout. A closed pipe (| head) or a full disk must not end hours of training."""
    with contextlib.suppress(OSError, RuntimeError):
        print(_in_encoding_of(sys.stdout, text), flush=True)


def tell(text: str) -> None:
    """Prints to stderr, which the same signal may have closed (| tee): the run must be saved anyway."""
    with contextlib.suppress(OSError, RuntimeError):
        print(_in_encoding_of(sys.stderr, text), file=sys.stderr, flush=True)


def write_extra(path: Path, content: str) -> None:
    """Replaces `path` at once, or warns."""
    try:
        write_file(path, content.encode())
    except CheckpointError as error:
        tell(f"warning: {error}; training goes on")


class Ticker:
    """Prints progress of slow work, and nothing of work that is done soon."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _FIRST_SECONDS

    def tick(self, text: str) -> None:
        """Reports progress, at most once per interval."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_SECONDS
            tell(text)


def python() -> str:
    """This interpreter, as it can be typed from here."""
    here, executable = Path.cwd(), Path(sys.executable)
    return str(executable.relative_to(here) if executable.is_relative_to(here) else executable)


def _in_encoding_of(stream: object, text: str) -> str:
    """With "?" for what the stream cannot show: samples have curly quotes, and a result is not lost over them."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, errors="replace").decode(encoding)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl+C, termination by another process, and a closed terminal."""


class Diverged(RuntimeError):
    """The loss, its gradient or the weights are not finite. The weights were not saved."""

    def __init__(self, what: str, good: Path | None) -> None:
        """good: the last snapshot."""
        stands = f"the last good snapshot is {good}" if good else "there was no snapshot yet"
        super().__init__(
            f"{what}; {stands}. Start anew with --overwrite and half of --lr (with Muon of --matrix-lr, too), or a "
            "longer --warm-up"
        )


class Interrupted(RuntimeError):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class StopRequest:
    """Whether a signal asked the run to stop."""

    def __init__(self) -> None:
        self.number = 0
        """Of the first signal; 0 while there was none."""

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Within the block, signals are remembered. Signals that the parent process ignores stay ignored."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        caught = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]
        for number in caught:
            signal.signal(number, self._remember)
        try:
            yield
        finally:
            for number in caught:
                signal.signal(number, before[number])

    def obey(self) -> None:
        """Raises Interrupted where a signal has come."""
        if self.number:
            raise Interrupted(self.number)

    def _remember(self, number: int, _frame: object) -> None:
        self.number = self.number or number
        # The same one again. torchrun adds a SIGTERM of its own to a terminal's SIGINT, which is no second request.
        signal.signal(number, signal.SIG_DFL)
        tell("saving, then ending; the same signal again ends at once")
