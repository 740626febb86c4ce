"""Runs a command that is killed with its parent process: `python -I -S guarded_subprocess.py [--idle] COMMAND...`.

When standard input closes, which also happens if the parent is killed, the guard kills the command and its
descendants. A compiler is a driver and its children, so killing only the driver would leave the children behind.
--idle runs the command at idle CPU priority.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_TERM_GRACE_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1


def guarded_command(command: Sequence[str], *, idle: bool = False) -> list[str]:
    """The command line that runs `command` under the guard."""
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), *(["--idle"] if idle else []), *command]


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns its exit code, 128 + n if signal n ended it, or 127 if it cannot be started."""
    idle = arguments[0] == "--idle"
    with contextlib.suppress(PermissionError):  # already a session leader
        os.setsid()
    # A no-op handler instead of SIG_IGN, which the command would inherit: the guard waits until the command has ended.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _ignore_signal)
    if idle:
        _set_idle_priority()
    try:
        child = subprocess.Popen(arguments[1 if idle else 0 :], stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    except OSError as error:
        print(f"error: {arguments[1 if idle else 0]}: {error.strerror}", file=sys.stderr)
        return 127
    threading.Thread(target=_kill_when_stdin_closes, args=(child,), daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def _kill_when_stdin_closes(child: subprocess.Popen[bytes]) -> None:
    """Waits until standard input closes; then sends SIGTERM, so that temporary files are removed, and then SIGKILL."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_TERM_GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _set_idle_priority() -> None:
    os.nice(19)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _die_with_parent() -> None:
    """Ends the command even if the guard itself is killed and cannot end it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _ignore_signal(number: int, frame: object) -> None:
    del number, frame


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
