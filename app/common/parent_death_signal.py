"""A child process that does not outlive the one that started it, also where that is killed with SIGKILL. Linux only."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends, even while it hangs or computes.

    Strictly when the *thread* ends that started it: ours are started from the event loop, which runs in the main
    thread. Of a parent that was gone before this call only the end of the pipe tells; elsewhere than on Linux always.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
