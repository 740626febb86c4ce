"""Whether this process hangs on a terminal. SIGHUP means that it closed, or, where it did not, whatever we like."""

from __future__ import annotations

import os


def has_terminal() -> bool:
    """Whether there is one, and somebody at its other end."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
