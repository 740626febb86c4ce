"""How fast a queue moves, measured while it does: work that left it, and the time in which there was some left. Pure.

A queue that is empty now and then says nothing: whoever comes is let in at once. So only the time counts between two
reports of which the first told of a backlog, and what left the queue in it; both fade, over half a minute of such time.
"""

from __future__ import annotations

import math

_FADING = 30.0
_FIRST, _FIRST_INTERVAL = 2, 0.1
"""Requests, and seconds between two of them, that are taken to have left before anything is known."""
_ENOUGH = 8


class ThroughputEstimate:
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

        A few are taken to have left quickly, which counts for less and less: the first ones are waited for without a
        measurement, and an engine that stands still gets slower with each second, not endlessly slow.
        """
        first = _FIRST * max(0.05, 1 - self._seconds / _FADING)
        return work * (self._measured(now) + first * _FIRST_INTERVAL) / (self._work + first * one)

    def is_sure(self, one: float, seconds: float, now: float) -> bool:
        """Whether enough was seen to refuse somebody for it: some have left, or nobody has for so many seconds."""
        return self.has_backlog and (self._work >= _ENOUGH * one or self._measured(now) >= seconds)

    def _measured(self, now: float) -> float:
        standing = 0.0 if self._backlog_since is None else max(0.0, now - self._backlog_since)
        return self._seconds + standing
