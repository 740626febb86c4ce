"""Signals while a process starts: none ends a service by accident, and none prints a traceback.

Imported before everything else, so it imports little itself. What arrives earlier, while Python itself starts, has
Python's effect.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class HeldHangup:
    """Handler of SIGHUP until there is a server: remembers the signal, and ends with the terminal if that closed."""

    def __init__(self) -> None:
        self.ends_with_terminal = has_terminal()
        self.is_pending = False

    def __call__(self, *_: object) -> None:
        if self.ends_with_terminal and not has_terminal():
            os._exit(128 + signal.SIGHUP)
        self.is_pending = True


def hold_signals(*, serves: bool) -> None:
    """Until the verb installs its own handlers, Ctrl+C ends silently with 130, and `serve` keeps SIGHUP for later.

    Ctrl+C during an import: pydantic and torch turn it into a traceback. There is nothing to clean up yet. What the
    parent process ignores stays ignored: SIGINT in the background of a script, SIGHUP under nohup.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if serves and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, HeldHangup())


def ignore_stop_signals() -> None:
    """For a child process: systemd signals every process of a service, but the parent decides when this one ends."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Within this context (one thread), children start with these signals blocked, so also before their first line.

    Another thread of this process handles what arrives meanwhile, or this one afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def has_terminal() -> bool:
    """Whether this process has a controlling terminal that is still open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # it could not be asked
    return True
