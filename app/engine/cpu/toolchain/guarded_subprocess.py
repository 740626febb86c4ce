"""Runs a command that ends with the process that started it: `python -I -S guarded_subprocess.py [--idle] COMMAND...`.

When standard input closes, also because the parent was killed, the command and everything that it started is killed. A
compiler is a driver and its children, so killing only the driver would leave the children behind. --idle runs the
command at idle CPU priority.
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

_PATIENCE_SECONDS = 2.0
_PR_SET_PDEATHSIG = 1


def leashed(command: Sequence[str], *, idle: bool = False) -> list[str]:
    """The command line that runs `command` under this guard."""
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), *(["--idle"] if idle else []), *command]


def main(arguments: Sequence[str]) -> int:
    """The command's exit code; 128 and the number of the signal that ended it; 127 where there is none."""
    idle = arguments[0] == "--idle"
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    # Not ignored, since the command would inherit that: the guard stays until the command has ended.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stay)
    if idle:
        _be_idle()
    try:
        child = subprocess.Popen(arguments[1 if idle else 0 :], stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    except OSError as error:
        print(f"error: {arguments[1 if idle else 0]}: {error.strerror}", file=sys.stderr)
        return 127
    threading.Thread(target=_watch, args=(child,), daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def _watch(child: subprocess.Popen[bytes]) -> None:
    """Waits for the end of standard input; then first asks, so that temporary files are removed, and then kills."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_PATIENCE_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _be_idle() -> None:
    os.nice(19)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _die_with_parent() -> None:
    """Ends the command even if the guard itself is killed and cannot end it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _stay(number: int, frame: object) -> None:
    del number, frame


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
