"""Runs a Python script so that Ctrl+C ends it and all its descendants at once, wherever it hangs. Linux only.

Ray's client waits for its cluster in C++, where no KeyboardInterrupt arrives, and its nodes outlive the process that
started them. So the script runs outside the terminal's process group, and this process adopts its orphaned descendants.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    """Runs the script; returns its exit status, or 130 if interrupted."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return subprocess.run([sys.executable, *arguments], start_new_session=True, check=False).returncode
    except KeyboardInterrupt:
        return 130
    finally:
        end_all()


def end_all() -> None:
    """Kills all descendants of this process, including those that they start meanwhile."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
