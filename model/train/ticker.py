"""A line on stderr now and then about work that takes long. Knows no work."""

from __future__ import annotations

import contextlib
import sys
import time

_FIRST_SECONDS = 3.0
_EVERY_SECONDS = 5.0


class Ticker:
    """Says nothing of work that is soon done."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _FIRST_SECONDS

    def tick(self, text: str) -> None:
        """How far the work is; told only when it is time again."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_SECONDS
            with contextlib.suppress(OSError):  # a terminal that has gone must not end the work
                print(text, file=sys.stderr, flush=True)
