"""How fast a queue moves, measured while it does: work that left it, and the time in which there was some left. Pure.

A queue that is empty now and then says nothing: whoever comes is let in at once. So only the time counts between two
reports of which the first told of a backlog, and what left the queue in it; both fade, over half a minute of such time.
"""

from __future__ import annotations

import math

_FADING = 30.0
_FIRST_INTERVAL = 0.1
"""Seconds between two requests as long as nothing is known."""


class Pace:
    """Work per second, whatever unit work is in."""

    def __init__(self) -> None:
        self._work = self._seconds = 0.0
        self._backlog_since: float | None = None

    @property
    def has_backlog(self) -> bool:
        """Whether something waited when the last report came: new requests do not begin at once."""
        return self._backlog_since is not None

    def note(self, left: float, now: float, *, has_backlog: bool) -> None:
        """So much work has left the queue since the last time, and something still waits, or not."""
        if self._backlog_since is not None:
            seconds = max(0.0, now - self._backlog_since)
            fading = math.exp(-seconds / _FADING)
            self._work = self._work * fading + left
            self._seconds = self._seconds * fading + seconds
        self._backlog_since = now if has_backlog else None

    def seconds_for(self, work: float, one: float, now: float) -> float:
        """How long `work` takes to leave the queue, where a request is about `one`.

        One is taken to be about to leave: the first ones are waited for without a measurement, and an engine that
        stands still gets slower with each second, not endlessly slow.
        """
        standing = 0.0 if self._backlog_since is None else max(0.0, now - self._backlog_since)
        return work * (self._seconds + standing + _FIRST_INTERVAL) / (self._work + one)
